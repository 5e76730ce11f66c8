"""Tests of loading a layer's MoE block from a checkpoint, running it, and saving it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.dense_moe import dense
from support.meshes import expert_mesh, mesh
from support.published import (
    E,
    F,
    H,
    assert_same,
    config_of,
    contents,
    deepseek_v3,
    files_of,
    float8_model,
    gpt_oss_in_mxfp4,
    mixtral,
    numbers,
    publish,
)
from support.selection import quick

import jax_ep
from jax_ep import checkpoints
from jax_ep.checkpoints.block import plan_block
from jax_ep.checkpoints.safetensors import INDEX, Directory
from jax_ep.formats import MXFP4
from jax_ep.placement import Placement, balance, redistribute

X = numbers(7, 16, 4, H) * 4
FLOAT8 = jnp.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("exact_matmuls")

# Maps the last words of published names to parameters of the layer.
PARAMS = dict(gate="gate", e_score_correction_bias="bias")
PARAMS |= dict(gate_proj="wi_0", up_proj="wi_1", down_proj="wo", w1="wi_0", w3="wi_1", w2="wo")


def wanted(tensors):
    """Returns the output of a block for X, computed in float64 from the published tensors."""
    params, experts = {}, {"wi_0": [], "wi_1": [], "wo": []}
    for name, array in tensors.items():
        *module, last = name.removesuffix(".weight").split(".")
        if "experts" in module:
            experts[PARAMS[last]].append(array.T)
        else:
            shared = "shared_" if "shared_experts" in module else ""
            params[shared + PARAMS[last]] = array.T
    params |= {name: np.stack(each) for name, each in experts.items()}
    router = dict(normalize_epsilon=0.0)
    if "bias" in params:
        router |= dict(score="sigmoid", num_groups=4, groups_kept=2, scale=2.5)
    return dense(jax_ep.MoEParams.of(**params), X, **router)[0]


@pytest.mark.parametrize("model", quick([mixtral, deepseek_v3], mixtral))
def test_the_loaded_layer_computes_what_the_model_does(tmp_path, model):
    config, tensors = model()
    publish(tmp_path, config, tensors)
    on = expert_mesh(8)
    layer = checkpoints.load_moe(tmp_path, 1, mesh=on)
    assert isinstance(layer, jax_ep.nnx.MoE)
    assert {s.data.shape[0] for s in layer.wi_0.get_value().addressable_shards} == {E // 8}
    with jax.set_mesh(on):
        out, metrics = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(X))
    want = wanted(tensors)
    assert np.abs(want).mean() > 0.1
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert metrics.num_dropped == 0


def test_a_layer_that_is_a_part_of_its_block(tmp_path):
    """A JetMoE's block also has a bias, which the layer lacks."""
    tensors = {
        "router.layer.weight": numbers(0, E, H),
        "input_linear.weight": numbers(1, E, 2 * F, H),
        "output_linear.weight": numbers(2, E, H, F),
        "bias": numbers(3, H),
    }
    tensors = {f"model.layers.1.mlp.{name}": array for name, array in tensors.items()}
    folder = publish(tmp_path / "published", config_of("jetmoe"), tensors)
    with pytest.raises(ValueError, match=r"partial must be True .*model.layers.1.mlp.bias: jax_ep"):
        checkpoints.load_moe(folder, 1)
    layer = checkpoints.load_moe(folder, 1, partial=True)
    others = checkpoints.load_others(folder, 1)
    assert_same(others, {"mlp.bias": tensors["model.layers.1.mlp.bias"]})

    new = publish(tmp_path / "new", config_of("jetmoe"))
    for given in ({}, {"others": {"bias": others["mlp.bias"]}}):
        with pytest.raises(ValueError, match=r"others must be the tensors mlp.bias .*but are"):
            checkpoints.save_moe(layer, new, 1, **given)
    checkpoints.save_moe(layer, new, 1, others=others)
    checkpoints.save_moe(layer, folder, 1, others={"mlp.bias": jnp.asarray(others["mlp.bias"]) + 1})
    checkpoints.save_moe(layer, folder, 1)
    saved = [checkpoints.load_others(where, 1)["mlp.bias"] for where in (new, folder)]
    np.testing.assert_array_equal(saved, [others["mlp.bias"], others["mlp.bias"] + 1])


@pytest.mark.parametrize("decoder", ["thinker", "talker"])
def test_one_of_two_decoders(tmp_path, decoder):
    """Qwen3-Omni's files hold two decoders; config.json says which one is meant."""
    configs = {
        "thinker": {"thinker_config": {"text_config": config_of("qwen3_omni_moe_text")}},
        "talker": {"text_config": config_of("qwen3_omni_moe_talker_text")},
    }
    tensors = {}
    for value, (name, config) in enumerate(configs.items()):
        block = plan_block(publish(tmp_path, config), 1)
        new = block.new_tensors(dict.fromkeys(block.params(), np.dtype(np.float32)))
        for key, (dtype, shape) in new.items():
            tensors[f"{name}.model.layers.1.{key.removeprefix(block.prefix)}"] = np.full(
                shape, value, dtype
            )
    _, params = checkpoints.load_moe_params(publish(tmp_path, configs[decoder], tensors), 1)
    assert np.all(params.gate == list(configs).index(decoder))


def test_storage_and_compute_have_dtypes_of_their_own(tmp_path):
    """`param_dtype` and `dtype` must mean what they mean for the Flax layers.

    The router computes in the dtype that the model's own does, and selection biases are float32.
    """
    publish(tmp_path, *mixtral(dtype=jnp.bfloat16))
    assert checkpoints.load_moe_params(tmp_path, 1)[0].router_dtype is None
    publish(tmp_path, *deepseek_v3(dtype=jnp.bfloat16))
    config, params = checkpoints.load_moe_params(tmp_path, 1, param_dtype=jnp.bfloat16)
    assert config.router_dtype == params.bias.dtype == jnp.float32
    x = jnp.asarray(X, jnp.bfloat16)
    for options, stored, computed in (
        ({}, jnp.bfloat16, jnp.bfloat16),
        (dict(dtype=jnp.float32), jnp.bfloat16, jnp.float32),
        (dict(param_dtype=jnp.float32), jnp.float32, jnp.float32),
        (dict(param_dtype=jnp.float32, dtype=jnp.bfloat16), jnp.float32, jnp.bfloat16),
    ):
        layer = checkpoints.load_moe(tmp_path, 1, **options)
        assert layer.wo.get_value().dtype == layer.gate.kernel.get_value().dtype == stored
        assert layer.config.dtype == options.get("dtype")
        assert jax.eval_shape(layer, x)[0].dtype == computed
    before = files_of(tmp_path)
    checkpoints.save_moe(layer, tmp_path, 1)
    assert files_of(tmp_path) == before


SPLITS = {
    "fsdp splits experts, and H of other parameters": (
        ((2, 4), ("fsdp", "expert")),
        {"fsdp_axes": {"exp": "fsdp", "embed": "fsdp"}},
        {
            "wi_0": P(("expert", "fsdp")),
            "wo": P(("expert", "fsdp")),
            "gate": P("fsdp"),
            "shared_wo": P(None, "fsdp"),
        },
    ),
    "tensor splits the hidden columns of experts": (
        ((4, 2), ("expert", "tensor")),
        {"tensor_axis": "tensor"},
        {
            "wi_0": P("expert", None, "tensor"),
            "wo": P("expert", "tensor"),
            "shared_wi_1": P(None, "tensor"),
            "shared_wo": P("tensor"),
            "gate": P(),
        },
    ),
    "data holds copies": (((2, 4), ("data", "expert")), {}, {"wo": P("expert"), "gate": P()}),
}


@pytest.mark.parametrize("case", SPLITS)
def test_parameters_are_split_over_the_meshs_axes(tmp_path, case):
    """Each byte must be read once, even if several devices hold it."""
    (shape, names), options, specs = SPLITS[case]
    _, tensors = deepseek_v3()
    publish(tmp_path, *deepseek_v3())
    before = files_of(tmp_path)
    whole = checkpoints.load_moe_params(tmp_path, 1)[1]
    on, seen = mesh(shape, names), []
    _, params = checkpoints.load_moe_params(
        tmp_path, 1, mesh=on, progress=lambda *counts: seen.append(counts), **options
    )
    for name, spec in specs.items():
        array = getattr(params, name)
        assert array.sharding.is_equivalent_to(NamedSharding(on, spec), array.ndim), name
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    total = sum(a.nbytes for a in tensors.values())
    assert seen[-1] == (total, total) and [s for s, _ in seen] == sorted(s for s, _ in seen)
    checkpoints.save_moe(params, tmp_path, 1)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("rules", [None, [("exp", "expert"), ("embed", None), ("mlp", None)]])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_layer_is_loaded_onto_the_ambient_mesh(tmp_path, kind, rules):
    config, tensors = deepseek_v3()
    publish(tmp_path, config, tensors)
    ambient = mesh((8,), ("expert",), kind)
    with jax.set_mesh(ambient), nnx.logical_axis_rules(rules or ()):
        layer = checkpoints.load_moe(tmp_path, 1)
        out = jax.eval_shape(layer, jnp.asarray(X))[0]
    assert out.shape == X.shape
    wo = layer.wo.get_value()
    assert wo.sharding.is_equivalent_to(NamedSharding(ambient, P("expert")), 3)
    with jax.set_mesh(ambient):
        slots = checkpoints.load_moe(tmp_path, 1, num_slots=16)
    assert slots.wo.get_value().shape[0] == 16


@pytest.mark.slow
@pytest.mark.parametrize("num_slots, shape", [(9, (3,)), (6, (2,)), (14, (1,)), (8, (4, 2))])
def test_experts_are_loaded_into_slots(tmp_path, num_slots, shape):
    """A layer must be loaded into slots, and saved from them, for any multiple of the ranks.

    There may be fewer slots per rank than experts, or more, which then hold copies.
    """
    config, tensors = mixtral(e=6)
    publish(tmp_path, config, tensors)
    before = files_of(tmp_path)
    on = mesh(shape, ("expert", "tensor")[: len(shape)])
    split = {"tensor_axis": "tensor"} if len(shape) > 1 else {}
    layer = checkpoints.load_moe(tmp_path, 1, mesh=on, num_slots=num_slots, **split)
    placement = Placement.in_order(num_experts=6, num_slots=num_slots, num_ranks=shape[0])[0]
    new = balance(np.arange(6.0)[None], num_slots=num_slots, num_ranks=shape[0])[0]
    run = nnx.jit(lambda layer, x, placement: layer(x, placement=placement)[0])
    for at in (placement, new):
        with jax.set_mesh(on):
            out = run(layer, X, at)
        np.testing.assert_allclose(out, wanted(tensors), rtol=1e-4, atol=1e-5)
        checkpoints.save_moe(layer, tmp_path, 1, placement=at)
        assert files_of(tmp_path) == before
        graph, state = nnx.split(layer)
        layer = nnx.merge(graph, redistribute(state, at, new, mesh=on))


LOADING_ERRORS: dict[str, tuple[dict, type[Exception], str]] = {
    "param_dtype": (dict(param_dtype=jnp.int8), TypeError, "param_dtype must be a floating dtype"),
    "8 bits": (dict(param_dtype=FLOAT8), TypeError, "param_dtype must be .* 16 bits .* quantized="),
    "dtype": (dict(dtype=FLOAT8), TypeError, "^dtype must be a .* 16 or 32 bits"),
    "ranks": (dict(mesh=(3,)), ValueError, "the 3 ranks along expert_axis .* has 8"),
    "mesh": (dict(mesh=AbstractMesh((2,), ("expert",))), TypeError, "mesh must be a jax.sharding"),
    "width": (dict(mesh=(1, 8), tensor_axis="tensor"), ValueError, "width of wi_0 .* the 8 ranks"),
    "experts": (dict(num_experts=4), ValueError, "num_experts must be 8, as in the stored block"),
    "choices": (dict(num_experts_per_token=9), ValueError, "num_experts_per_token must be"),
    "identity": (dict(identity_experts=2), ValueError, "identity_experts must be 0, as in the"),
    "wire": (dict(wire_dtype=FLOAT8), ValueError, "wire_dtype=.* blocks of 128 values, but x has"),
    "axis": (dict(expert_axis="exprt"), ValueError, "expert_axis .*exprt.* must name axes"),
    "router": (dict(router=lambda x, logits: logits), TypeError, "router"),
    "slots": (dict(num_slots=5), ValueError, "num_slots must be at least num_experts=8"),
}


@pytest.mark.parametrize("case", LOADING_ERRORS)
def test_what_no_call_of_the_layer_accepts_is_not_loaded(tmp_path, case):
    options, error, said = LOADING_ERRORS[case]
    publish(tmp_path, *mixtral())
    on = options.get("mesh", (2,))
    if isinstance(on, tuple):
        on = mesh(on, ("expert", "tensor")[: len(on)])
    for load in (checkpoints.load_moe, checkpoints.load_moe_params):
        with pytest.raises(error, match=said):
            load(tmp_path, 1, **(options | {"mesh": on}))


def test_what_does_not_fit_the_block_is_not_saved(tmp_path):
    publish(tmp_path, *mixtral(e=6))
    before = files_of(tmp_path)
    layer = checkpoints.load_moe(tmp_path, 1)
    of_slots = checkpoints.load_moe(tmp_path, 1, num_slots=6)
    params = checkpoints.load_moe_params(tmp_path, 1)[1]
    more = checkpoints.load_moe_params(tmp_path, 1, num_slots=9)[1]
    wrong = Placement.in_order(num_experts=6, num_slots=8, num_ranks=2)[0]
    for saved, number, placement, said in (
        (layer, -1, None, "layer must be .* but is -1"),
        (layer, 1.5, None, "layer must be .* but is 1.5"),
        (layer, True, None, "layer must be .* but is True"),
        (of_slots, 1, None, r"placement must say which expert each slot holds \(num_slots=6\)"),
        (of_slots, 1, wrong, "placement must be of this layer, with 6 slots and 6"),
        (layer, 1, wrong, "layer_or_params must have the shapes .*8, 16, 12.*6, 16, 12"),
        (more, 1, None, "if they have a matrix for each slot, give placement"),
        (more, 1, wrong, "layer_or_params must have the shapes .*8, 16, 12.*9, 16, 12"),
        (params._replace(wo=params.wo[:, :6]), 1, None, "must have the shapes of the block"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            checkpoints.save_moe(saved, tmp_path, number, placement=placement)
    assert files_of(tmp_path) == before


def test_loading_needs_little_more_memory_than_it_keeps(tmp_path):
    config, tensors = mixtral(e=8, h=768, f=1024, dtype=jnp.bfloat16)
    publish(tmp_path, config, tensors)
    kept = sum(a.nbytes for a in tensors.values())
    del tensors

    def resident(what: str) -> int:
        (line,) = (s for s in open("/proc/self/status") if s.startswith(what))
        return int(line.split()[1]) * 1024

    # The first load imports modules and starts threads, which take memory.
    checkpoints.load_moe_params(tmp_path, 1)
    with open("/proc/self/clear_refs", "w") as file:
        # Writing 5 resets the peak of resident memory, VmHWM.
        file.write("5")
    before = resident("VmRSS")
    params = checkpoints.load_moe_params(tmp_path, 1)[1]
    assert sum(a.nbytes for a in jax.tree.leaves(params)) == kept > 36e6
    assert resident("VmHWM") - before < 1.2 * kept


def test_gpt_oss_is_loaded_and_saved_in_mxfp4(tmp_path):
    """GPT-OSS's matrices are [E, out, in], with alternating rows of gate and up."""
    config, published = gpt_oss_in_mxfp4(swiglu_limit=5.0)
    publish(tmp_path, config, published)
    tensors = {name.removeprefix("model.layers.1.mlp."): array for name, array in published.items()}
    before = files_of(tmp_path)

    def decoded(name):
        blocks = tensors[f"experts.{name}_blocks"]
        scales = tensors[f"experts.{name}_scales"].view(jnp.float8_e8m0fnu)
        values = blocks.reshape(*scales.shape[:2], -1)
        return MXFP4.decode((values, scales), jnp.bfloat16).swapaxes(1, 2)

    got, params = checkpoints.load_moe_params(tmp_path, 1, mesh=expert_mesh(4))
    assert (got.clamp, got.normalize) == (5.0, True)
    biases = tensors["experts.gate_up_proj_bias"]
    for name, want in {
        "wi_0": decoded("gate_up_proj")[..., ::2],
        "wi_1": decoded("gate_up_proj")[..., 1::2],
        "wo": decoded("down_proj"),
        "wi_0_bias": biases[:, ::2],
        "wi_1_bias": biases[:, 1::2],
        "gate_bias": tensors["router.bias"],
    }.items():
        np.testing.assert_array_equal(getattr(params, name), want, err_msg=name)
    checkpoints.save_moe(params, tmp_path, 1)
    assert files_of(tmp_path) == before


def total_size(folder):
    """Returns the index's total_size, and the bytes of all tensors in the files."""
    index = json.loads((folder / INDEX).read_text())
    directory = Directory(folder)
    assert set(index["weight_map"]) == set(directory.files)
    total = sum(directory.entry(name).num_bytes for name in directory.files)
    return index["metadata"]["total_size"], total


def test_a_block_is_added_to_a_model_and_replaced(tmp_path):
    """An MoE block saved into a model must get names like those of the layers already there.

    The index's total_size must count the block's bytes once, even if it is saved twice.
    """
    config, tensors = deepseek_v3()
    tensors = {name.replace("model.", "module.model.", 1): a for name, a in tensors.items()}
    folder = publish(tmp_path / "model", config, tensors, {"lm_head.weight": numbers(0, 9, H)})
    layer = checkpoints.load_moe(folder, 1, mesh=expert_mesh(4))
    one = publish(tmp_path / "one", config, tensors)
    with pytest.raises(ValueError, match="must have an index, .* has model.safetensors"):
        checkpoints.save_moe(layer, one, 2)
    for number in (4, 2, 4):
        checkpoints.save_moe(layer, folder, number)
        said, total = total_size(folder)
        assert said == total > 0
        got = contents(folder)
        for name, want in tensors.items():
            np.testing.assert_array_equal(got[name.replace("layers.1.", f"layers.{number}.")], want)
    assert len(got) == 3 * len(tensors) + 1


OTHER_MODELS = {
    "wider matrices": lambda: mixtral(f=2 * F)[1],
    "another hidden size": lambda: {"model.embed_tokens.weight": numbers(0, 9, 2 * H)},
    "another router": lambda: deepseek_v3()[1],
    "unlike layers": lambda: mixtral(layer=3, e=2 * E)[1],
    "half a block": lambda: {
        name: a for name, a in mixtral()[1].items() if not name.endswith("gate.weight")
    },
    "more in a block": lambda: (
        mixtral()[1] | {"model.layers.1.block_sparse_moe.norm.weight": np.ones(H, np.float32)}
    ),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_another_model_is_not_overwritten_unasked(tmp_path, other):
    """A block must not be written where the tensors are not those that config.json describes.

    With overwrite=True the directory must have the block afterwards, and all other layers' tensors.
    """
    config, tensors = mixtral()
    params = checkpoints.load_moe_params(publish(tmp_path / "own", config, tensors), 1)[1]
    outside = {"lm_head.weight": numbers(1, 9, H)}
    folder = publish(tmp_path / "other", config, OTHER_MODELS[other](), outside)
    before = files_of(folder)
    with pytest.raises(ValueError, match="give overwrite=True"):
        checkpoints.save_moe(params, folder, 1)
    assert files_of(folder) == before
    kept = {name for name in Directory(folder).files if ".1.block_sparse_moe." not in name}
    checkpoints.save_moe(params, folder, 1, overwrite=True)
    saved = checkpoints.load_moe_params(folder, 1)[1]
    jax.tree.map(np.testing.assert_array_equal, saved, params)
    written = set(Directory(folder).files)
    assert kept <= written
    assert {name.removeprefix("base_model.model.") for name in written - kept} == set(tensors)
    assert total_size(folder)[0] == total_size(folder)[1]
    after = files_of(folder)
    assert all(after[name] == data for name, data in before.items() if name != INDEX)


def test_a_layer_of_other_options_is_not_written_unasked(tmp_path):
    publish(tmp_path, *mixtral())
    before = files_of(tmp_path)
    layer = checkpoints.load_moe(tmp_path, 1, capacity_factor=2.0)
    checkpoints.save_moe(layer, tmp_path, 1)
    layer = checkpoints.load_moe(tmp_path, 1, num_experts_per_token=1)
    layer.wo.set_value(2 * layer.wo.get_value())
    said = "num_experts_per_token of layer_or_params must be 3, as config.json .* give overwrite"
    with pytest.raises(ValueError, match=said):
        checkpoints.save_moe(layer, tmp_path, 1)
    assert files_of(tmp_path) == before
    checkpoints.save_moe(layer, tmp_path, 1, overwrite=True)
    wo = checkpoints.load_moe_params(tmp_path, 1)[1].wo
    np.testing.assert_array_equal(wo, layer.wo.get_value())


@pytest.mark.parametrize("method", [None, "mxfp4"])
def test_gpt_oss_is_saved_into_a_new_directory(tmp_path, method):
    config, tensors = gpt_oss_in_mxfp4()
    _, params = checkpoints.load_moe_params(publish(tmp_path / "old", config, tensors), 1)
    wo = params.wo * jnp.linspace(1, 2, params.wo.shape[-1])
    params = params._replace(wo=wo.astype(jnp.bfloat16))
    config["quantization_config"] = method and {"quant_method": method}
    new = publish(tmp_path / "new", config)
    checkpoints.save_moe(params, new, 1)
    assert len(set(total_size(new))) == 1
    assert (set(contents(new)) == set(tensors)) == (method is not None)
    if method is not None:
        wo = jax_ep.quantize(np.asarray(params.wo.swapaxes(1, 2)), MXFP4)
        params = params._replace(wo=wo.dequantize().swapaxes(1, 2))
    loaded = checkpoints.load_moe_params(new, 1)[1]
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_float8_scales_are_what_config_json_says(tmp_path, scale_fmt, is_new):
    """New float8 scales must be powers of two if config.json's scale_fmt is "ue8m0", and only then.

    If the directory has the MoE block already, only the blocks of 8 x 8 numbers that have changed
    must get new scales.
    """
    config, tensors = float8_model(block=8)
    config["quantization_config"]["scale_fmt"] = scale_fmt
    folder = publish(tmp_path / "model", config, tensors)
    params = checkpoints.load_moe_params(folder, 1, param_dtype=jnp.float32)[1]
    params = params._replace(wi_1=params.wi_1 * 1.37)
    if is_new:
        folder = publish(tmp_path / "new", config)
    checkpoints.save_moe(params, folder, 1)
    stored = contents(folder)
    assert set(stored) == set(tensors)
    assert all(stored[name].dtype == array.dtype for name, array in tensors.items())
    for name, scales in stored.items():
        if name.endswith("_scale_inv") and (is_new or ".experts." in name and "up_proj" in name):
            exact = np.array_equal(np.exp2(np.round(np.log2(scales))), scales)
            assert exact == (scale_fmt == "ue8m0")
    saved = checkpoints.load_moe_params(folder, 1, param_dtype=jnp.float32)[1]
    for got, want in zip(jax.tree.leaves(saved), jax.tree.leaves(params), strict=True):
        # e4m3 has 4 significant bits, so rounding errs by at most 2^-4 of a number; the absolute
        # tolerance is for subnormal numbers.
        np.testing.assert_allclose(got, want, rtol=2**-4, atol=np.abs(want).max() * 2**-9)
