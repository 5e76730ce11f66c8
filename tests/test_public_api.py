"""Tests every public name on eight ranks against NumPy; pytest's selections always include this.

Each check lists the public names that it exercises. When it ends, those of the names that are
functions must have been called as attributes of `jax_ep`.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from support.contract import AXIS, assert_bitwise_equal, most_ranks, per_rank
from support.dense_moe import E, F, H, K, dense, make_params, make_x
from support.flax_layers import LAYERS, as_dict
from support.meshes import expert_mesh, mesh
from support.published import mixtral, publish

import jax_ep
from jax_ep import placement, reference

# The number of ranks, and of tokens on each.
N, T = most_ranks(8), 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, T, H)).astype(np.float32)
LOGITS = RNG.standard_normal((N, T, E)).astype(np.float32)
WI_0, WI_1 = (RNG.standard_normal((N, E // N, H, F)).astype(np.float32) / 4 for _ in range(2))
WO = RNG.standard_normal((N, E // N, F, H)).astype(np.float32) / 4
ROUTED = reference.top_k_routing(LOGITS.reshape(-1, E), K)
IDX = ROUTED.topk_idx.reshape(N, T, K).astype(np.int32)
WEIGHTS = ROUTED.topk_weights.reshape(N, T, K).astype(np.float32)

CHECKS: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {}


def exercises(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS[check.__name__] = (names, check)
        return check

    return register


def on_ranks(function: Any, *arrays: np.ndarray) -> Any:
    """Jits `function` on all ranks; each rank gets its entry of the arrays [N, ...]."""
    return jax.jit(per_rank(function, N))(*arrays)


def close(got: Any, want: Any) -> None:
    """Asserts closeness within float32 rounding of sums of a few dozen terms."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


def layer_in_float64() -> np.ndarray:
    wide = (a.reshape(-1, *a.shape[2:]).astype(np.float64) for a in (X, IDX, WEIGHTS))
    tokens, topk_idx, weights = wide
    experts = (w.reshape(E, *w.shape[2:]).astype(np.float64) for w in (WI_0, WI_1, WO))
    return reference.moe_layer(tokens, topk_idx.astype(int), weights, *experts).reshape(X.shape)


@exercises("dispatch", "dispatch_like", "combine", "Dispatched", "Handle", "reference")
def exchange() -> None:
    def there_and_back(x: Any, topk_idx: Any, weights: Any) -> Any:
        sent = jax_ep.dispatch(x, topk_idx, num_experts=E, axis_name=AXIS)
        assert isinstance(sent, jax_ep.Dispatched) and isinstance(sent.handle, jax_ep.Handle)
        again = jax_ep.dispatch_like(-x, sent.handle)
        out, pull = jax.vjp(lambda y: jax_ep.combine(y, sent.handle, weights), sent.tokens)
        return sent.tokens, sent.group_sizes, again, out, *pull(x)

    tokens, group_sizes, again, out, grad = on_ranks(there_and_back, X, IDX, WEIGHTS)
    sent = jax_ep.reference.dispatch(list(X), list(IDX), num_experts=E)
    routes, rows = [d.routes for d in sent], [d.tokens for d in sent]
    assert_bitwise_equal(tokens, np.stack(rows))
    assert_bitwise_equal(group_sizes, np.stack([d.group_sizes for d in sent]))
    assert_bitwise_equal(again, np.stack(reference.dispatch_like(list(-X), routes)))
    close(out, np.stack(reference.combine(rows, routes, list(WEIGHTS))))
    close(grad, np.stack(reference.combine_grad(list(X), rows, routes, list(WEIGHTS))[0]))


@exercises("dispatch", "group_by_expert", "sum_by_token", "RankDispatched", "RankHandle")
def rank_major() -> None:
    def there_and_back(x: Any, topk_idx: Any, weights: Any, *experts: Any) -> Any:
        options: dict[str, Any] = dict(layout="rank", topk_weights=weights)
        received = jax_ep.dispatch(x, topk_idx, num_experts=E, axis_name=AXIS, **options)
        assert isinstance(received, jax_ep.RankDispatched)
        assert isinstance(received.handle, jax_ep.RankHandle)
        grouped = jax_ep.group_by_expert(received)
        y = jax_ep.expert_mlp(grouped.tokens, *experts, grouped.group_sizes)
        return jax_ep.combine(jax_ep.sum_by_token(y, grouped, received), received.handle)

    close(on_ranks(there_and_back, X, IDX, WEIGHTS, WI_0, WI_1, WO), layer_in_float64())


@exercises("expert_mlp", "grouped_matmul", "routed_experts")
def experts() -> None:
    def layer(x: Any, topk_idx: Any, weights: Any, wi_0: Any, wi_1: Any, wo: Any) -> Any:
        sent = jax_ep.dispatch(x, topk_idx, num_experts=E, axis_name=AXIS)
        y = jax_ep.expert_mlp(sent.tokens, wi_0, wi_1, wo, sent.group_sizes)
        product = jax_ep.grouped_matmul(sent.tokens, wi_0, sent.group_sizes)
        at_once = jax_ep.routed_experts(sent, wi_0, wi_1, wo, weights)
        out = jax_ep.combine(y, sent.handle, weights)
        return out, at_once, jax_ep.combine(product, sent.handle)

    out, at_once, products = on_ranks(layer, X, IDX, WEIGHTS, WI_0, WI_1, WO)
    close(out, layer_in_float64())
    assert_bitwise_equal(at_once, out)
    # The matrices of each choice's expert have shape [N, T, K, H, F].
    of_choices = WI_0.reshape(E, H, F).astype(np.float64)[IDX]
    close(products, np.einsum("nth,ntkhf->ntf", X, of_choices))


@exercises(
    "top_k_routing", "Routing", "load_balance_loss", "router_z_loss", "update_expert_bias"
)  # fmt: skip
def routers() -> None:
    def route(logits: Any) -> Any:
        routed = jax_ep.top_k_routing(logits, K)
        assert isinstance(routed, jax_ep.Routing)
        balance = jax_ep.load_balance_loss(routed.probs, routed.topk_idx, axis_name=AXIS)
        z = jax_ep.router_z_loss(logits, axis_name=AXIS)
        counts = lax.psum(jnp.zeros(E, jnp.int32).at[routed.topk_idx].add(1), AXIS)
        bias = jax_ep.update_expert_bias(jnp.zeros(E), counts, 0.1)
        replicated = lax.pcast((balance, z, bias), AXIS, to="varying")
        return routed.topk_idx, routed.topk_weights, *replicated

    topk_idx, weights, balance, z, bias = on_ranks(route, LOGITS)
    np.testing.assert_array_equal(topk_idx, IDX)
    close(weights, WEIGHTS)
    close(balance, np.full(N, reference.load_balance_loss(ROUTED.probs, ROUTED.topk_idx)))
    close(z, np.full(N, reference.router_z_loss(LOGITS.reshape(-1, E))))
    counts = np.bincount(IDX.ravel(), minlength=E)
    close(bias, np.stack([reference.update_expert_bias(np.zeros(E), counts, 0.1)] * N))


@exercises("all_gather", "all_reduce", "all_reduce_rms_norm", "all_to_all", "reduce_scatter")
def collectives() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((N, 2 * N, H)).astype(np.float32)
    residual = rng.standard_normal((2 * N, H)).astype(np.float32)

    def everything(x: Any) -> Any:
        norm = jax_ep.all_reduce_rms_norm(x, jnp.asarray(residual), jnp.ones(H), AXIS)
        total = jax_ep.all_reduce(x, AXIS)
        of_each = jax_ep.reduce_scatter(x, AXIS), jax_ep.all_to_all(x, AXIS)
        return total, *norm, jax_ep.all_gather(x, AXIS), *of_each

    got = jax.jit(per_rank(everything, N, check_vma=False))(x)
    total = x.astype(np.float64).sum(axis=0)
    new = total + residual
    want = (
        np.stack([total] * N),
        np.stack([new / np.sqrt((new**2).mean(axis=-1, keepdims=True) + 1e-6)] * N),
        np.stack([new] * N),
        np.stack([x.reshape(-1, H)] * N),
        total.reshape(N, 2, H),
        x.reshape(N, N, 2, H).swapaxes(0, 1).reshape(x.shape),
    )
    for result, expected in zip(got, want, strict=True):
        close(result, expected)


@exercises(
    "moe_layer", "MoEConfig", "MoEMetrics", "MoEParams", "BalanceSums", "pooled_load_balance_loss"
)  # fmt: skip
def layer_as_a_function() -> None:
    params, x = make_params(), make_x()
    assert isinstance(params, jax_ep.MoEParams)
    config = jax_ep.MoEConfig(num_experts=E, num_experts_per_token=K)
    with jax.set_mesh(expert_mesh(N)):
        out, metrics = jax.jit(lambda *args: jax_ep.moe_layer(*args, config))(params, x)
    want, counts = dense(params, x)
    assert isinstance(metrics, jax_ep.MoEMetrics)
    assert isinstance(metrics.balance, jax_ep.BalanceSums)
    # As all tokens choose K experts, the loss of `transformers` is K times that of Switch.
    pooled = jax_ep.pooled_load_balance_loss([metrics.balance, metrics.balance])
    close(pooled, K * np.asarray(metrics.load_balance_loss))
    close(out, want)
    np.testing.assert_array_equal(metrics.expert_counts, counts)


@exercises("linen", "nnx")
def layers_of_flax() -> None:
    params, x = make_params(shared=False), make_x()
    for kind in LAYERS.values():
        layer = kind(H, F, num_experts=E, num_experts_per_token=K)
        with jax.set_mesh(expert_mesh(N)):
            out, _ = jax.jit(layer)(as_dict(params), x)
        close(out, dense(params, x)[0])


@exercises("placement", "dispatch", "combine")
def copies_of_experts() -> None:
    """Rows that are dispatched to slots must reach copies of the experts that were chosen."""
    load = np.bincount(IDX.ravel(), minlength=E)[None]
    placed = jax_ep.placement.balance(load, num_slots=2 * E, num_ranks=N)
    assert placed.num_copies.max() > 1
    of_layer = jax.tree.map(lambda a: jnp.asarray(a[0]), placed)
    expert_of_slot = of_layer.expert_of_slot

    def there_and_back(x: Any, topk_idx: Any, weights: Any) -> Any:
        slots = jax_ep.placement.choose_slots(
            topk_idx,
            expert_of_slot,
            of_layer.slots_of_expert,
            of_layer.num_copies,
            axis_name=AXIS,
        )
        sent = jax_ep.dispatch(x, slots, num_experts=2 * E, axis_name=AXIS)
        own = expert_of_slot.reshape(N, -1)[lax.axis_index(AXIS)]
        scale = jnp.repeat(own + 1.0, sent.group_sizes, total_repeat_length=sent.tokens.shape[0])
        return jax_ep.combine(sent.tokens * scale[:, None], sent.handle, weights)

    want = X * np.sum(WEIGHTS * (IDX + 1), axis=-1, keepdims=True)
    close(on_ranks(there_and_back, X, IDX, WEIGHTS), want)


@exercises("checkpoints", "nnx")
def published_models() -> None:
    config, tensors = mixtral()
    with tempfile.TemporaryDirectory() as folder:
        publish(Path(folder), config, tensors)
        layer = jax_ep.checkpoints.load_moe(folder, 1, mesh=expert_mesh(N))
        jax_ep.checkpoints.save_moe(layer, folder, 1)
        got, params = jax_ep.checkpoints.load_moe_params(folder, 1)
    assert got.num_experts == config["num_local_experts"] and isinstance(layer, jax_ep.nnx.MoE)
    close(layer.wo.get_value(), params.wo)
    assert config["model_type"] in jax_ep.checkpoints.architectures()


@exercises("workspace_bytes")
def memory() -> None:
    """The workspace of "xla" must hold the gathered tokens of all ranks."""
    model = dict(num_tokens=T, hidden=H, num_experts=E, top_k=K, num_ranks=N)
    held = jax_ep.workspace_bytes("dispatch", "xla", **model, dtype="float32")
    assert held.get("gathered tokens", 0) == (N * T * H * 4 if N > 1 else 0)


@exercises("Format", "QuantizedArray", "formats", "quantize")
def quantized_numbers() -> None:
    """Float8 rows, float8 matrices and MXFP4 must be encoded and decoded the same on all ranks."""
    kinds = jax_ep.formats.FLOAT8_ROWS, jax_ep.formats.FLOAT8_MATRICES, jax_ep.formats.MXFP4
    x = RNG.standard_normal((N, 128, 128)).astype(np.float32)

    def there_and_back(x: Any) -> Any:
        arrays = [jax_ep.quantize(x, kind) for kind in kinds]
        assert all(isinstance(array, jax_ep.QuantizedArray) for array in arrays)
        assert all(isinstance(array.format, jax_ep.Format) for array in arrays)
        return arrays, [array.dequantize() for array in arrays]

    for array, numbers, kind in zip(*on_ranks(there_and_back, x), kinds, strict=True):
        expected = kind.decode(kind.encode(x), np.float32)
        assert_bitwise_equal(numbers, expected)
        assert_bitwise_equal(array.dequantize(), expected)


@exercises("quantize_experts")
def experts_quantized_once() -> None:
    """Each rank must quantize its own experts, for the products and for their gradients."""
    shapes = {"gate": (128, E), "wi_0": (E, 128, 128), "wi_1": (E, 128, 128), "wo": (E, 128, 128)}
    arrays = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    config = jax_ep.MoEConfig(
        num_experts=E, num_experts_per_token=K, mesh=expert_mesh(N), matmul_dtype=jnp.float8_e4m3fn
    )
    quantized = jax_ep.quantize_experts(jax_ep.MoEParams(**arrays), config)
    for name in ("wi_0", "wi_1", "wo"):
        both = getattr(quantized, name)
        expected = jax_ep.quantize(jnp.asarray(arrays[name]), jax_ep.formats.FLOAT8_MATRICES)
        assert_bitwise_equal(both.matrices.values, expected.values)
        assert_bitwise_equal(both.transposed.values, np.swapaxes(expected.values, 1, 2))


@exercises("init_lora", "merge_lora")
def low_rank_adapters() -> None:
    """A layer must compute the same with adapters as with the matrices that they merge into."""
    shapes = {"gate": (H, E), "wi_0": (E, H, 32), "wi_1": (E, H, 32), "wo": (E, 32, H)}
    arrays = {n: RNG.standard_normal(s).astype(np.float32) / 4 for n, s in shapes.items()}
    config = jax_ep.MoEConfig(num_experts=E, num_experts_per_token=K, lora_scale=0.5)
    plain = jax.tree.map(jnp.asarray, jax_ep.MoEParams(**arrays))
    params = jax_ep.init_lora(plain, 4, jax.random.key(0))
    params = params._replace(wo_lora_b=jnp.ones_like(params.wo_lora_b))
    x = RNG.standard_normal((8 * N, H)).astype(np.float32)
    with jax.set_mesh(expert_mesh(N)):
        got, _ = jax_ep.moe_layer(params, x, config)
        want, _ = jax_ep.moe_layer(jax_ep.merge_lora(params, 0.5), x, config)
        before, _ = jax_ep.moe_layer(plain, x, config)
    close(got, want)
    assert np.abs(got - before).max() > 0.1


@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_ranks(name, monkeypatch):
    names, check = CHECKS[name]
    functions = [name for name in names if inspect.isfunction(getattr(jax_ep, name))]
    called = set()

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            called.add(name)
            return function(*args, **options)

        return call

    for function in functions:
        monkeypatch.setattr(jax_ep, function, noted(function, getattr(jax_ep, function)))
    with jax.default_matmul_precision("highest"):
        check()
    assert called == set(functions)


def test_every_public_name_has_a_check():
    assert {name for names, _ in CHECKS.values() for name in names} == set(jax_ep.__all__)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there are as many ranks as GPUs")
def test_there_are_eight_ranks():
    assert N == 8


def _one_rank(x, topk_idx, weights, *experts, function=jax_ep.routed_experts, **options):
    sent = jax_ep.dispatch(x, topk_idx, num_experts=8, axis_name=())
    return function(sent, *experts, weights, **options)


ON_EXPLICIT_AXES = {
    "grouped_matmul": lambda a: jax_ep.grouped_matmul(a["x"], a["wi"], a["sizes"]),
    "by XLA": lambda a: jax_ep.grouped_matmul(a["x"], a["wi"], a["sizes"], implementation="xla"),
    "expert_mlp": lambda a: jax_ep.expert_mlp(a["x"], a["wi"], a["wi"], a["wo"], a["sizes"]),
    "an mlp by XLA": lambda a: jax_ep.expert_mlp(
        a["x"], a["wi"], None, a["wo"], a["sizes"], wo_bias=a["wo_bias"], implementation="xla"
    ),
    "routed_experts": lambda a: _one_rank(
        a["x"], a["topk_idx"], a["weights"], a["wi"], a["wi"], a["wo"]
    ),
    "weights on input": lambda a: _one_rank(
        a["x"], a["topk_idx"], a["weights"], a["wi"], a["wi"], a["wo"], weights_on="input"
    ),
    "top_k_routing": lambda a: jax_ep.top_k_routing(a["logits"], 2, bias=a["bias"]).topk_weights,
    "choose_slots": lambda a: placement.choose_slots(
        a["topk_idx"], *(a[name] for name in ("of_slot", "of_expert", "copies")), axis_name=()
    ).astype(jnp.float32),
}


def _explicit_operands() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = dict(
        x=(16, 8), wi=(8, 8, 16), wo=(8, 16, 8), wo_bias=(8, 8), logits=(16, 8), bias=(8,)
    )
    normal = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    held = placement.Placement.of(np.arange(16)[None] % 8, num_experts=8, num_ranks=1)[0]
    return normal | dict(
        sizes=jnp.full(8, 2, jnp.int32),
        topk_idx=jnp.asarray(rng.integers(0, 8, (16, 2)), jnp.int32),
        weights=jnp.asarray(rng.uniform(size=(16, 2)), jnp.float32),
        of_slot=jnp.asarray(held.expert_of_slot),
        of_expert=jnp.asarray(held.slots_of_expert),
        copies=jnp.asarray(held.num_copies),
    )


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("name", ON_EXPLICIT_AXES)
def test_one_rank_of_an_explicit_mesh(name, wrap):
    """On an explicit mesh, functions of one rank must accept replicated operands."""

    def both(operands):
        floats = {k: v for k, v in operands.items() if v.dtype == jnp.float32}
        out, vjp = jax.vjp(lambda f: ON_EXPLICIT_AXES[name](operands | f), floats)
        return out, vjp(jnp.ones_like(out))

    operands = _explicit_operands()
    want = jax.jit(both)(operands)
    with jax.set_mesh(mesh((2, 2), ("data", "expert"), AxisType.Explicit)):
        got = wrap(lambda operands: both(operands))(operands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "name, sharded",
    [
        ("grouped_matmul", "x"),
        ("by XLA", "wi"),
        ("grouped_matmul", "sizes"),
        ("expert_mlp", "x"),
        ("expert_mlp", "wo"),
        ("an mlp by XLA", "wo_bias"),
        ("routed_experts", "wi"),
        ("top_k_routing", "logits"),
        ("top_k_routing", "bias"),
        ("choose_slots", "topk_idx"),
        ("choose_slots", "copies"),
    ],
)
def test_operands_sharded_over_explicit_axes_are_named(name, sharded):
    operands = _explicit_operands()
    with jax.set_mesh(mesh((4,), ("expert",), AxisType.Explicit)):
        array = operands[sharded]
        first = () if sharded != "logits" else (None,)
        operands[sharded] = jax.device_put(array, jax.P(*first, "expert"))
        for wrap in (jax.jit, lambda f: f):
            with pytest.raises(ValueError, match="must not be sharded .* inside a jax.shard_map"):
                wrap(ON_EXPLICIT_AXES[name])(operands)
