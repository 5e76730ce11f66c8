"""Tests of parameters split over further axes (FSDP): gathered, with gradients scattered."""

from __future__ import annotations

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.dense_moe import E, F, H, K, assert_close, make_x, random_params, weight_shapes
from support.flax_layers import LAYERS
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams, linen, moe_layer
from jax_ep.moe.params import LOGICAL_AXES
from jax_ep.placement import Placement, to_experts, to_slots

pytestmark = pytest.mark.usefixtures("exact_matmuls")

PARTS: dict = dict(shared_dim=8, use_shared_gate=True, use_mlp_bias=True)
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)
BF16 = dataclasses.replace(CONFIG, dtype=jnp.bfloat16, fsdp_axes={"embed": "fsdp"})
AXES = ("fsdp", "expert")


def shardings(params: MoEParams, devices, axes) -> MoEParams:
    """Returns shardings in which a logical axis has the mesh axes that `axes` gives it.

    Mesh axes of a parameter split only the first dimension that they are given to.
    """

    def spec(name: str) -> P:
        used, parts = set(), []
        for logical in LOGICAL_AXES[name]:
            named = axes.get(logical) or ()
            own = {named} if isinstance(named, str) else {*named}
            parts.append(None if own & used else named or None)
            used |= own
        return P(*parts)

    return MoEParams.of(**{
        name: NamedSharding(devices, spec(name))
        for name, array in params._asdict().items()
        if array is not None
    })  # fmt: skip


def loss(params, x, placement=None, *, config):
    out, metrics = moe_layer(params, x, config, placement=placement)
    total = jnp.sum(jnp.sin(out.astype(jnp.float32))) + metrics.load_balance_loss
    return total, (out, metrics)


def step_of(config, wrap=lambda function: function):
    function = wrap(functools.partial(loss, config=config))
    return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))


@functools.cache
def unsharded():
    return jax.device_get(step_of(CONFIG)(random_params(**PARTS), make_x()))


THREE = (2, 2, 2)
WITH_TENSOR = (*AXES, "tensor")
TENSOR: dict = {"tensor_axis": "tensor"}
CASES: dict = {
    "embed": ((4, 2), AXES, {"embed": "fsdp"}, {}),
    "mlp": ((2, 4), AXES, {"mlp": "fsdp"}, {}),
    "experts": ((2, 4), AXES, {"exp": "fsdp"}, {}),
    "experts, and H of others": ((2, 4), AXES, {"exp": "fsdp", "embed": "fsdp"}, {}),
    "two axes, and copies": (THREE, ("data", *AXES), {"embed": ["fsdp", "data"]}, {}),
    "with a tensor axis": (THREE, WITH_TENSOR, {"mlp": "fsdp"}, TENSOR),
    "split tokens": (THREE, WITH_TENSOR, {"embed": "fsdp"}, TENSOR | {"batch_axes": WITH_TENSOR}),
}


@pytest.mark.parametrize("shape, axes, fsdp_axes, fields", quick(CASES, "with a tensor axis"))
def test_results_are_those_without_a_mesh(shape, axes, fsdp_axes, fields):
    config = dataclasses.replace(CONFIG, fsdp_axes=fsdp_axes, **fields)
    devices = mesh(shape, axes)
    params = random_params(**PARTS)
    base = {"exp": ("expert",), "mlp": ("tensor",) if "tensor" in axes else ()}
    split = base | {k: (*base.get(k, ()), *config.further_axes()[k]) for k in fsdp_axes}
    where = shardings(params, devices, split)
    with jax.set_mesh(devices):
        got = step_of(config)(jax.device_put(params, where), make_x())
    assert_close(got, unsharded(), rtol=1e-4, atol=1e-5)


def collectives(text: str, kind: str) -> list[str]:
    """Returns the sorted result types of all collectives of a kind in a StableHLO text."""
    found = re.findall(rf'"stablehlo\.{kind}"\(.*? : \(tensor[^)]*\) -> (\S+)', text, re.DOTALL)
    return sorted(found)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["kept", "remat"])
def test_bfloat16_is_gathered_and_gradients_are_scattered(wrap):
    """The lowered program shows the dtypes, since XLA for CPUs moves bfloat16 as float32."""
    devices = mesh((2, 4), AXES)
    params = random_params(shared_dim=8)
    where = shardings(params, devices, {"exp": "expert", "embed": "fsdp"})
    of_tokens = NamedSharding(devices, P(AXES))
    with jax.set_mesh(devices):
        step = jax.jit(
            jax.value_and_grad(wrap(functools.partial(loss, config=BF16)), (0, 1), has_aux=True),
            out_shardings=(None, (where, of_tokens)),
        )
        lowered = step.lower(jax.device_put(params, where), jax.device_put(make_x(), of_tokens))
    text, passes = lowered.as_text(), 1 if wrap is not jax.checkpoint else 2
    own = E // 4
    gathered = [f"tensor<{own}x{H}x{F}xbf16>"] * 2 + [f"tensor<{own}x{F}x{H}xbf16>"]
    gathered += [f"tensor<{H}x8xbf16>"] * 2 + [f"tensor<8x{H}xbf16>"]
    weights = [t for t in collectives(text, "all_gather") if f"{H}" in t and "bf16" in t]
    assert weights == sorted(gathered * passes)
    half = H // 2
    scattered = [f"tensor<{own}x{half}x{F}xf32>"] * 2 + [f"tensor<{own}x{F}x{half}xf32>"]
    scattered += [f"tensor<{half}x8xf32>"] * 2 + [f"tensor<8x{half}xf32>"]
    # The gate's gradient is scattered, too.
    scattered += [f"tensor<{half}x{E}xf32>"]
    assert collectives(text, "reduce_scatter") == sorted(scattered)

    # Outside the layer's shard_map, XLA must add no collective of parameters or tokens.
    hlo = lowered.compile().as_text() or ""
    moved = re.findall(r"= (\S+|\(.*?\)) (all-\S+|reduce-scatter|collective-permute)\(", hlo)
    assert not [kind for _, kind in moved if kind == "collective-permute"]
    whole = (f"[{own},{H},{F}]", f"[{own},{F},{H}]", f"[{own},{half},{F}]")
    reduced = [result for result, kind in moved if kind == "all-reduce"]
    assert not [result for result in reduced if any(shape in result for shape in whole)]
    of_experts = [r for r, kind in moved if kind == "all-gather" and any(s in r for s in whole)]
    # XLA for CPUs may merge gathers that remat repeats.
    assert 3 <= len(of_experts) <= 3 * passes


def test_shards_of_whole_experts_are_gathered_along_their_first_dimension():
    """No shard of experts must be transposed; parameters without experts are split along H."""
    devices = mesh((2, 4), AXES)
    params = random_params(shared_dim=8)
    config = dataclasses.replace(BF16, fsdp_axes={"exp": "fsdp", "embed": "fsdp"})
    where = shardings(params, devices, {"exp": AXES[::-1], "embed": "fsdp"})
    with jax.set_mesh(devices):
        text = step_of(config).lower(jax.device_put(params, where), make_x()).as_text()
    # Maps the result type of each collective of bfloat16 or float32 weights to its dimension.
    dims: dict[str, set[str]] = {}
    for kind, dim, result in re.findall(
        r'"stablehlo\.(all_gather|reduce_scatter)"\(.*?(?:all_gather|scatter)_dim\w* = (\d)'
        r".*? : \(tensor[^)]*\) -> (\S+)",
        text,
        re.DOTALL,
    ):
        dims.setdefault(f"{kind} {result}", set()).add(dim)
    own = E // 4
    for of_experts in (f"{H}x{F}", f"{F}x{H}"):
        assert dims[f"all_gather tensor<{own}x{of_experts}xbf16>"] == {"0"}
        assert dims[f"reduce_scatter tensor<{own // 2}x{of_experts}xf32>"] == {"0"}
    assert dims[f"all_gather tensor<{H}x8xbf16>"] == {"0"}
    assert dims[f"all_gather tensor<8x{H}xbf16>"] == {"1"}


def test_copies_of_parts_are_summed_after_they_are_scattered():
    """The all-reduce over "data" must move only parts of the gradients."""
    devices = mesh((2, 2, 2), ("data", *AXES))
    params = random_params()
    with jax.set_mesh(devices):
        text = step_of(BF16).lower(params, make_x()).as_text()
    reduced = collectives(text, "all_reduce")
    assert reduced.count(f"tensor<{E // 2}x{H // 2}x{F}xf32>") == 2
    assert not [kind for kind in reduced if f"{E // 2}x{H}x{F}" in kind]


def test_a_scan_gathers_one_layer_at_a_time():
    devices, layers = mesh((2, 4), AXES), 3
    stack = jax.tree.map(lambda a: jnp.stack([a] * layers), random_params())

    def total(stack, x):
        def block(x, params):
            return x + moe_layer(params, x, BF16)[0].astype(x.dtype), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, stack)[0])

    axes = {name: P(None, *spec.spec) for name, spec in _specs(stack, devices).items()}
    where = MoEParams.of(**{name: NamedSharding(devices, spec) for name, spec in axes.items()})
    with jax.set_mesh(devices):
        step = jax.jit(jax.grad(total), in_shardings=(where, None), out_shardings=where)
        lowered = step.lower(stack, make_x())
    whole = f"tensor<{E // 4}x{H}x{F}xbf16>"
    # wi_0 and wi_1 are gathered twice, in the forward and the backward pass.
    assert collectives(lowered.as_text(), "all_gather").count(whole) == 4
    results = re.findall(r"= (\S+) all-gather\(", lowered.compile().as_text() or "")
    assert results and not [r for r in results if re.search(rf"\[{layers},.*{F}", r)]


def _specs(params, devices):
    given = shardings(params, devices, {"exp": "expert", "embed": "fsdp"})
    return {name: spec for name, spec in given._asdict().items() if spec is not None}


@pytest.mark.slow
def test_slots_with_copies():
    devices = mesh((2, 4), AXES)
    params, x = random_params(), make_x()
    for fsdp_axes in ({"embed": "fsdp"}, {"exp": "fsdp"}):
        config = dataclasses.replace(CONFIG, num_slots=16, fsdp_axes=fsdp_axes)
        placement = Placement.in_order(num_experts=E, num_slots=16, num_ranks=4)[0]
        slots = to_slots(params, placement)
        with jax.set_mesh(devices):
            (_, (out, metrics)), (dslots, dx) = step_of(config)(slots, x, placement)
        dparams = to_experts(dslots, placement)
        want = jax.device_get(step_of(CONFIG)(params, x))
        assert_close((out, dparams, dx), (want[0][1][0], *want[1]), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(metrics.expert_counts, want[0][1][1].expert_counts)
        again = to_slots(dparams, placement)
        # Copies of an expert must have equal gradients.
        np.testing.assert_array_equal(again.wi_0, dslots.wi_0)


@pytest.mark.slow
def test_float8_values_are_gathered_and_the_bits_are_the_same():
    devices = mesh((2, 2), AXES)
    params, x = random_params(256, 128), make_x(1, hidden=256)
    quantizing = dataclasses.replace(
        CONFIG, dtype=jnp.bfloat16, matmul_dtype=jnp.float8_e4m3fn, fsdp_axes={}
    )
    gathering = dataclasses.replace(quantizing, fsdp_axes={"embed": "fsdp"})
    with jax.set_mesh(devices):
        want = step_of(quantizing)(params, x)
        got = step_of(gathering)(params, x)
        text = step_of(gathering).lower(params, x).as_text()
    assert_close(got[0], want[0], rtol=0, atol=0)
    # The two programs sum the ranks' gradients in different dtypes, bfloat16 and float32.
    assert_close(got[1], want[1], rtol=2e-2, atol=2e-2)
    own, values = E // 2, "f8E4M3FN"
    gathered = [kind for kind in collectives(text, "all_gather") if kind.count("x") == 3]
    assert [kind for kind in gathered if "128" in kind] == [
        f"tensor<{own}x128x256x{values}>",
        *[f"tensor<{own}x256x128x{values}>"] * 2,
    ]
    assert f"tensor<{E // 2}x128x128xf32>" in collectives(text, "reduce_scatter")


@pytest.mark.slow
@pytest.mark.parametrize("hidden, split", [(256, True), (128, False)])
def test_experts_quantized_beforehand(hidden, split):
    """Quantized experts must be split over "fsdp" if the parts are whole blocks of 128 x 128."""
    devices = mesh((2, 2), AXES)
    params, x = random_params(hidden, 128), make_x(1, hidden=hidden)
    config = dataclasses.replace(BF16, matmul_dtype=jnp.float8_e4m3fn)
    with jax.set_mesh(devices):
        want = jax.jit(functools.partial(moe_layer, config=config))(params, x)[0]
        quantized = jax.jit(lambda p: jax_ep.quantize_experts(p, config))(params)
        spec = quantized.wi_0.matrices.values.sharding.spec
        layer = jax.jit(lambda p, q, x: moe_layer(p, x, config, quantized_experts=q)[0])
        np.testing.assert_array_equal(layer(params, quantized, x), want)
    assert ("fsdp" in spec) == split


RULES = (("embed", "fsdp"), ("exp", "expert"), ("mlp", None))


def gathers(text: str) -> bool:
    return f"tensor<{E // 4}x{H}x{F}xbf16>" in collectives(text, "all_gather")


def test_linen_layer_follows_the_rules_in_force():
    layer = linen.MoE(E, K, F, dtype=jnp.bfloat16)
    x = make_x()
    with jax.set_mesh(mesh((2, 4), AXES)):
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        whole_experts = [("exp", ("expert", "fsdp")), ("embed", "fsdp")]
        for rules, found in ((RULES, True), (RULES[1:], False), (whole_experts, True)):
            with nn.logical_axis_rules(rules):
                assert gathers(jax.jit(layer.apply).lower(params, x).as_text()) == found
        off = layer.clone(fsdp_axes={})
        with nn.logical_axis_rules(RULES):
            assert not gathers(jax.jit(off.apply).lower(params, x).as_text())


def test_rules_may_split_parameters_without_experts_over_all_ranks():
    """The gate must then be gathered over both axes, and its gradient be scattered."""
    layer = linen.MoE(E, K, F, num_shared_experts=1)
    rules = [("exp", ("expert", "fsdp")), ("embed", ("fsdp", "expert"))]
    x = make_x()
    boxed = layer.init(jax.random.key(0), x)
    specs, params = nn.get_partition_spec(boxed), nn.unbox(boxed)

    def total(params):
        return jnp.sum(jnp.sin(layer.apply(params, x)[0]))

    want = jax.grad(total)(params)
    with jax.set_mesh(devices := mesh((2, 4), AXES)), nn.logical_axis_rules(rules):
        where = nn.logical_to_mesh_sharding(specs, devices, rules)
        step = jax.jit(jax.grad(total), out_shardings=where)
        placed = jax.device_put(params, where)
        text = step.lower(placed).as_text()
        got = step(placed)
    assert placed["params"]["gate"]["kernel"].sharding.shard_shape((H, E)) == (H // 8, E)
    assert f"tensor<{H}x{E}xf32>" in collectives(text, "all_gather")
    assert f"tensor<{H // 8}x{E}xf32>" in collectives(text, "reduce_scatter")
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_linen_layer_in_a_scan_with_remat():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y, _ = linen.MoE(E, K, F, dtype=jnp.bfloat16, fsdp_axes={"embed": "fsdp"})(x)
            return x + y.astype(x.dtype), None

    stack = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
    )()
    with jax.set_mesh(mesh((2, 4), AXES)):
        params = jax.eval_shape(stack.init, jax.random.key(0), make_x(), None)
        step = jax.grad(lambda params, x: jnp.sum(stack.apply(params, x, None)[0]))
        assert gathers(jax.jit(step).lower(nn.unbox(params), make_x()).as_text())


def nnx_layer(**options):
    sizes: dict = dict(num_experts=E, num_experts_per_token=K, dtype=jnp.bfloat16)
    return jax_ep.nnx.MoE(H, F, **sizes | options, rngs=nnx.Rngs(0))


def text_of(layer) -> str:
    """Returns the lowered program of an NNX layer."""
    graph, state = nnx.split(layer)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0]).lower(state, make_x()).as_text()


def parts(param) -> tuple[int, ...]:
    """Returns into how many parts each dimension of a parameter of an NNX layer is split."""
    array = param.get_value()
    shard = array.sharding.shard_shape(array.shape)
    return tuple(a // b for a, b in zip(array.shape, shard, strict=True))


def test_nnx_layer_is_created_split_and_remembers_the_rules():
    with jax.set_mesh(mesh((2, 4), AXES)):
        with nnx.logical_axis_rules(RULES):
            by_rules = nnx_layer()
        for layer in (by_rules, nnx_layer(fsdp_axes={"embed": "fsdp"})):
            assert parts(layer.wi_0) == (4, 2, 1)
            assert gathers(text_of(layer))


OF_EXPERTS, OF_OTHERS = ("exp", ("expert", "fsdp")), ("embed", "fsdp")
ORDERED, BOTH = [OF_EXPERTS, OF_OTHERS], {"exp": "fsdp", "embed": "fsdp"}


@pytest.mark.parametrize(
    "rules, fsdp_axes",
    [
        ([OF_EXPERTS, OF_OTHERS], None),
        ([OF_EXPERTS, OF_OTHERS], BOTH),
        ([], BOTH),
        ([OF_OTHERS], BOTH),
    ],
    ids=["rules", "rules and fsdp_axes", "fsdp_axes", "both"],
)
def test_nnx_parameters_are_split_over_an_axis_once(rules, fsdp_axes):
    """Rules and `fsdp_axes` may give a mesh axis to several dimensions: the first is split."""
    devices = mesh((2, 4), AXES)
    with jax.set_mesh(devices), nnx.logical_axis_rules(rules):
        layer = nnx_layer(num_shared_experts=1, fsdp_axes=fsdp_axes)
        specs = jax.tree.leaves(nnx.get_partition_spec(nnx.state(layer)))
        assert specs and all(isinstance(spec, P) for spec in specs)
        for spec in specs:
            NamedSharding(devices, spec)  # raises an error if the spec repeats an axis
        assert parts(layer.wi_0) == parts(layer.wo) == (8, 1, 1)
        assert parts(layer.shared_wi_0) == (2, 1)
        assert gathers(text_of(layer))


@pytest.mark.parametrize(
    "rules, message",
    [
        (
            [("exp", ("fsdp", "expert")), OF_OTHERS],
            r"must come first.*Write \('expert', 'fsdp'\) in",
        ),
        ([OF_OTHERS, OF_EXPERTS], "no axis rule splits wi_0"),
    ],
    ids=["the expert axis of a rule", "the rule of experts"],
)
def test_what_must_come_first_is_told(rules, message):
    layer = linen.MoE(E, K, F, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh((2, 4), AXES)):
        params = jax.eval_shape(layer.init, jax.random.key(0), make_x())
        with nnx.logical_axis_rules(rules), pytest.warns(UserWarning, match=message):
            jax.eval_shape(layer.apply, params, make_x())


@pytest.mark.parametrize("framework", LAYERS)
def test_rules_that_contradict_fsdp_axes_are_refused(framework):
    """Otherwise the parameters, created by the rules, would be moved in each call."""
    options = dict(num_experts=E, num_experts_per_token=K)
    with jax.set_mesh(mesh((2, 4), AXES)), nnx.logical_axis_rules([("exp", "expert")]):
        (params, _), _ = LAYERS[framework](H, F, **options).abstract()
        layer = LAYERS[framework](H, F, **options, fsdp_axes={"exp": "fsdp"})
        message = r"agree with the axis rules, but splits 'exp' of wi_0 over .*, and the rules over"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(layer, params, make_x())


def test_nnx_rules_apply_in_their_order():
    """Parameters must be created as the call reads the rules: the first rule takes the axis."""
    rules = [("mlp", "fsdp"), ("embed", "fsdp"), ("exp", "expert")]
    with jax.set_mesh(mesh((2, 4), AXES)), nnx.logical_axis_rules(rules):
        layer = nnx_layer()
        assert parts(layer.wi_0) == (4, 1, 2) and parts(layer.wo) == (4, 2, 1)
        assert parts(layer.gate.kernel) == (2, 1)
        assert gathers(text_of(layer))


def test_without_an_expert_axis_nnx_experts_are_split_by_the_other_rules():
    with jax.set_mesh(mesh((2,), ("fsdp",))), nnx.logical_axis_rules(ORDERED), pytest.warns():
        layer = nnx_layer()
    assert parts(layer.wi_0) == (1, 2, 1)


def test_nnx_says_which_axes_do_not_divide_the_experts():
    message = """8 ranks along ('expert', 'fsdp'), over which "exp" is split, but is 12; or split"""
    with jax.set_mesh(mesh((2, 4), AXES)), pytest.raises(ValueError, match=re.escape(message)):
        nnx_layer(num_experts=12, fsdp_axes={"exp": "fsdp"})


def test_types_show_explicit_axes():
    devices = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)
    params = random_params(**PARTS)
    where = shardings(params, devices, {"exp": "expert", "mlp": "fsdp"})
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    with jax.set_mesh(devices):
        params = jax.device_put(params, where)
        step = step_of(config)
        assert gathers(step.lower(params, make_x()).as_text())
        grads = step(params, make_x())[1][0]
    assert grads.wi_0.sharding.spec == where.wi_0.spec


@pytest.mark.parametrize(
    "fsdp_axes, fields, match",
    [
        ({"embed": "rows"}, {}, r"fsdp_axes must name axes of the mesh .*'rows'"),
        ({"embed": "expert"}, {}, "other mesh axes than expert_axis"),
        ({"mlp": "fsdp"}, {"tensor_axis": "fsdp"}, "other mesh axes than tensor_axis"),
        ({"exp": ("fsdp", "data"), "embed": "fsdp"}, {}, "the same mesh axes, or different ones"),
        ({"vocab": "fsdp"}, {}, 'must map "exp", "embed" or "mlp", but maps \'vocab\''),
        ({"embed": "fsdp"}, {"batch_axes": "expert"}, "over which the tokens are spread"),
        ({"mlp": "fsdp"}, {}, r"'mlp' of wi_0 \(8, 16, 15\) has 15, and 2 ranks"),
        ({"exp": "fsdp"}, {"num_experts": 12}, "'exp' of wi_0 .* has 12, and 8 ranks"),
    ],
)
def test_axes_that_do_not_fit_are_refused(fsdp_axes, fields, match):
    config = dataclasses.replace(CONFIG, fsdp_axes=fsdp_axes, **fields)
    number = config.num_experts
    shapes = {"gate": (H, number)} | weight_shapes(number, H, 15)
    params = MoEParams.of(**{name: jnp.zeros(shape) for name, shape in shapes.items()})
    with jax.set_mesh(mesh((2, 4), AXES)), pytest.raises(ValueError, match=match):
        moe_layer(params, make_x(), config)


def test_a_value_that_is_no_mapping_is_refused():
    config = dataclasses.replace(CONFIG, fsdp_axes="fsdp")
    with pytest.raises(TypeError, match="fsdp_axes must be None or map logical axes"):
        moe_layer(random_params(), make_x(), config)


def test_in_the_callers_shard_map_the_caller_gathers():
    layer = jax.shard_map(
        lambda params, x: moe_layer(params, x, dataclasses.replace(BF16, batch_axes=AXES))[0],
        in_specs=(P(), P(AXES)),
        out_specs=P(AXES),
    )
    with jax.set_mesh(mesh((2, 4), AXES)), pytest.raises(ValueError, match="fsdp_axes must not"):
        layer(random_params(), make_x())
