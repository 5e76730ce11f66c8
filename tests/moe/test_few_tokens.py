"""Tests that the routed experts of a few tokens on one rank need no dispatch."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.dense_moe import E, random_params
from support.kernels import KERNELS_RUN, needs_kernels
from support.meshes import cuda_mesh, expert_mesh
from support.selection import quick

from jax_ep import MoEConfig, moe_layer
from jax_ep.formats import FLOAT8_MATRICES, MXFP4, QuantizedArray, Transposed, quantize
from jax_ep.moe import few_tokens
from jax_ep.moe.expert_matmuls import Experts
from jax_ep.moe.expert_mlp import expert_mlp
from jax_ep.moe.routed_experts import RoutedTokens
from jax_ep.placement.weights import ROUTED_WEIGHTS
from pallas_kernels.matmul.chosen_groups import chosen_groups

H, F, K = 128, 256, 3
NAMES = ("wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias")
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)
FLOAT8 = jnp.float8_e4m3fn


def make_params(biases=False, dtype=jnp.bfloat16):
    params = random_params(H, F, 0.1, use_mlp_bias=biases)
    return jax.tree.map(lambda w: w.astype(dtype), params)._replace(gate=params.gate)


def make_x(num_tokens, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(num_tokens, H)), jnp.bfloat16)


def choices(num_tokens, seed=2):
    """Returns [T, K] int32 expert ids; some repeat, and some are no expert's."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, E + 1, size=(num_tokens, K)).astype(np.int32)


@pytest.mark.parametrize("num_tokens", [2, 16])
@pytest.mark.parametrize("num_groups", [2, E])
def test_each_chosen_group_is_read_once(num_tokens, num_groups):
    given = choices(num_tokens)
    groups, rows = jax.jit(functools.partial(chosen_groups, num_groups=num_groups))(given)
    table, exists = np.asarray(groups.table), (given >= 0) & (given < num_groups)
    assert np.all(np.asarray(rows)[~exists] == -1)
    np.testing.assert_array_equal(table[: table[-1, 0], 0], np.unique(given[exists]))


def stored(params, format):
    matrices = {name: getattr(params, name) for name in NAMES[:3]}
    return params._replace(**{name: quantize(w, format) for name, w in matrices.items()})


def numbers_of(params):
    """Returns the parameters with matrices that were quantized to float8, as float32."""
    matrices = {name: getattr(params, name) for name in NAMES[:3]}
    for name, each in matrices.items():
        if not isinstance(each, QuantizedArray):
            matrices[name] = quantize(each, FLOAT8_MATRICES)
    return params._replace(
        **{name: each.dequantize(jnp.float32) for name, each in matrices.items()}
    )


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def without_dispatch(params, x, topk_idx, weights, config, implementation=None):
    """Computes the output of the routed experts by `few_tokens.output`, on any platform."""
    experts = Experts(**{name: getattr(params, name) for name in ROUTED_WEIGHTS})
    routed = RoutedTokens(x, topk_idx, weights, distinct=False)
    return few_tokens.output(experts, routed, config, implementation)


def expected(params, x, topk_idx, weights, config):
    """Computes the output by one call of `expert_mlp`, with one row, for each (token, choice)."""
    options = {} if config.matmul_dtype is None else {"matmul_dtype": config.matmul_dtype}
    if options and len(x) <= few_tokens.MOST_UNQUANTIZED_TOKENS:
        # Only the matrices are quantized, and their numbers are not rounded to bfloat16.
        params, x, options = numbers_of(params), x.astype(jnp.float32), {}
    out = np.zeros(x.shape, np.float32)
    for token, choice in np.argwhere((topk_idx >= 0) & (topk_idx < E)):
        sizes = np.zeros(E, np.int32)
        sizes[topk_idx[token, choice]] = 1
        weights_of = {name: getattr(params, name) for name in NAMES}
        y = expert_mlp(x[token : token + 1], group_sizes=sizes, **weights_of, **options)
        out[token] += np.asarray(y[0], np.float32) * weights[token, choice]
    return out


KINDS = ["biases", "float8", "stored", "stored_float8", "stored_mxfp4", "without_wi_1"]


@pytest.mark.parametrize("num_tokens", quick([1, 3, 16], 3))
@pytest.mark.parametrize("kind", quick(KINDS, "float8"))
def test_outputs_are_those_of_each_choice(num_tokens, kind):
    params, config = make_params(biases=kind in ("biases", "stored_mxfp4")), CONFIG
    if kind.endswith("float8"):
        config = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8)
    if kind.startswith("stored"):
        params = stored(params, Transposed.of(MXFP4) if "mxfp4" in kind else FLOAT8_MATRICES)
    if kind == "without_wi_1":
        params = params._replace(wi_1=None)
    x, topk_idx = make_x(num_tokens), choices(num_tokens)
    weights = np.random.default_rng(3).random(topk_idx.shape).astype(np.float32)
    got = without_dispatch(params, x, topk_idx, weights, config)
    want = expected(params, x, topk_idx, weights, config)
    # The output and each expert's output are rounded to bfloat16, by up to 2^-8 of themselves.
    largest = np.abs(want).max()
    assert largest > 0
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=2**-7 * largest)


def on_mesh(config, mesh, check_vma=True):
    """Returns a jitted function (params, x) that calls the layer inside a `shard_map`."""

    def layer(params, x):
        return moe_layer(params, x, config)[0]

    axes = P(mesh.axis_names[0])
    return jax.jit(
        jax.shard_map(layer, mesh=mesh, in_specs=(P(), axes), out_specs=axes, check_vma=check_vma)
    )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_gradients_and_outputs_are_those_of_a_dispatch(num_tokens, check_vma):
    """The loss is linear in the output, which XLA may use for it before it is rounded."""
    params, x, mesh = make_params(), make_x(num_tokens), expert_mesh(1)
    probe = np.random.default_rng(4).standard_normal(x.shape).astype(np.float32)
    named = dataclasses.replace(CONFIG, implementation="xla")

    def results(config):
        layer = on_mesh(config, mesh, check_vma)

        def loss(params, x):
            out = layer(params, x)
            return jnp.sum(out.astype(jnp.float32) * probe), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    experts = Experts(params.wi_0, params.wi_1, params.wo)
    assert few_tokens.supports(x, experts, CONFIG, 1) == KERNELS_RUN
    jax.tree.map(np.testing.assert_array_equal, results(CONFIG), results(named))


@pytest.mark.slow
@pytest.mark.parametrize("matmul_dtype", [None, FLOAT8])
def test_stored_experts_leave_the_tokens_their_gradient(matmul_dtype):
    params, x, mesh = stored(make_params(), FLOAT8_MATRICES), make_x(8), expert_mesh(1)
    config = dataclasses.replace(CONFIG, matmul_dtype=matmul_dtype)

    def loss(gate, x, config):
        out = on_mesh(config, mesh)(params._replace(gate=gate), x)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    named = dataclasses.replace(config, implementation="xla")
    got, want = (jax.grad(loss, (0, 1))(params.gate, x, each) for each in (config, named))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def kernels(config, num_tokens, num_ranks=1, dtype=jnp.bfloat16):
    """Returns which of three kernels a layer lowers to for GPUs: a set of their names."""
    mesh = cuda_mesh((num_ranks,), ("expert",))
    params = jax.eval_shape(functools.partial(make_params, dtype=dtype))
    x = jax.ShapeDtypeStruct((num_tokens * num_ranks, H), dtype)
    text = on_mesh(config, mesh).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    names = ("ep_dispatch", "row_tiles", "grouped_matmul_gated")
    return {name for name in names if any(name in call for call in calls)}


SMALL = {"grouped_matmul_gated"}
LARGE = {"row_tiles", "grouped_matmul_gated"}


LAYERS = {
    "few": (16, {}, SMALL),
    "many": (17, {}, LARGE | {"ep_dispatch"}),
    "dropping": (16, {"capacity_factor": 1.0}, LARGE),
    "sent as float8": (16, {"wire_dtype": FLOAT8}, LARGE | {"ep_dispatch"}),
    "weighted inputs": (16, {"weights_on": "input"}, LARGE),
    "named exchange": (16, {"implementation": "pallas"}, LARGE | {"ep_dispatch"}),
    "named matmul": (16, {"matmul_implementation": "pallas"}, SMALL),
    "another matmul": (16, {"matmul_implementation": "xla"}, set()),
}


@needs_kernels
@pytest.mark.parametrize(("num_tokens", "options", "expected"), quick(LAYERS, "few", "many"))
def test_which_layers_need_no_dispatch(num_tokens, options, expected):
    assert kernels(dataclasses.replace(CONFIG, **options), num_tokens) == expected


@pytest.mark.slow
@needs_kernels
def test_several_ranks_dispatch():
    assert kernels(CONFIG, 8, num_ranks=2) == LARGE | {"ep_dispatch"}


@needs_kernels
def test_only_chosen_experts_are_dequantized():
    params = jax.eval_shape(lambda: stored(make_params(), FLOAT8_MATRICES))
    x = jax.ShapeDtypeStruct((1, H), jnp.bfloat16)
    layer = on_mesh(CONFIG, cuda_mesh((1,), ("expert",)))
    text = layer.trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{K}x{H}x{F}xbf16>" in text
    assert f"tensor<{E}x{H}x{F}xbf16>" not in text


@needs_kernels
@pytest.mark.parametrize("dtype", quick([jnp.float16, jnp.float32], jnp.float16))
def test_float8_experts_of_other_dtypes_quantize_their_tokens(dtype):
    config = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8, dtype=dtype)
    params = jax.eval_shape(lambda: stored(make_params(), Transposed.of(FLOAT8_MATRICES)))
    layer = on_mesh(config, cuda_mesh((1,), ("expert",)))
    lowered = layer.trace(params, jax.ShapeDtypeStruct((1, H), dtype))
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "grouped_matmul_float8_gated" in text and "weight_only" not in text


@needs_kernels
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="compares what GPUs compute")
@pytest.mark.parametrize(
    ("num_tokens", "float8"), [(1, False), (5, False), (16, False), (5, True), (16, True)]
)
def test_a_gpu_computes_the_bits_of_a_dispatch(num_tokens, float8):
    config = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8 if float8 else None)
    named = dataclasses.replace(config, implementation="xla")
    params, x, mesh = make_params(), make_x(num_tokens), expert_mesh(1)
    got, want = (np.asarray(on_mesh(each, mesh)(params, x)) for each in (config, named))
    np.testing.assert_array_equal(got, want)
