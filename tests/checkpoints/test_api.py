"""Tests of loading a layer's MoE block from a checkpoint, running it, and saving it."""

from __future__ import annotations

import functools
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
from support.processes import outputs_of_processes
from support.published import (
    E,
    F,
    H,
    K,
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

import jax_ep
from jax_ep import checkpoints
from jax_ep.checkpoints.safetensors import INDEX, Directory
from jax_ep.placement import Placement, balance, redistribute

X = numbers(7, 16, 4, H) * 4


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Sets exact float32 matmuls, since GPUs round float32 operands to fewer bits by default."""
    with jax.default_matmul_precision("float32"):
        yield


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


@pytest.mark.parametrize("model", [mixtral, deepseek_v3])
def test_the_loaded_layer_computes_what_the_model_does(tmp_path, model):
    config, tensors = model()
    publish(tmp_path, config, tensors)
    layer = checkpoints.load_moe(tmp_path, 1, mesh=expert_mesh(8))
    assert isinstance(layer, jax_ep.nnx.MoE)
    assert {s.data.shape[0] for s in layer.wi_0.get_value().addressable_shards} == {E // 8}
    out, metrics = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(X))
    want = wanted(tensors)
    assert np.abs(want).mean() > 0.1
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert metrics.num_dropped == 0


def jetmoe():
    """Returns a JetMoE's config.json, and one MoE block's tensors, of which the layer lacks one."""
    tensors = {
        "router.layer.weight": numbers(0, E, H),
        "input_linear.weight": numbers(1, E, 2 * F, H),
        "output_linear.weight": numbers(2, E, H, F),
        "bias": numbers(3, H),
    }
    tensors = {f"model.layers.1.mlp.{name}": array for name, array in tensors.items()}
    return config_of("jetmoe"), tensors


def test_a_layer_that_is_a_part_of_its_block(tmp_path):
    config, tensors = jetmoe()
    folder = publish(tmp_path / "published", config, tensors)
    with pytest.raises(ValueError, match=r"partial must be True .*model.layers.1.mlp.bias: jax_ep"):
        checkpoints.load_moe(folder, 1)
    layer = checkpoints.load_moe(folder, 1, partial=True)
    others = checkpoints.load_others(folder, 1)
    assert list(others) == ["mlp.bias"]
    np.testing.assert_array_equal(others["mlp.bias"], tensors["model.layers.1.mlp.bias"])

    new = publish(tmp_path / "new", config)
    with pytest.raises(ValueError, match=r"others must be the tensors mlp.bias .*are \(none\)"):
        checkpoints.save_moe(layer, new, 1)
    checkpoints.save_moe(layer, new, 1, others=others)
    checkpoints.save_moe(layer, folder, 1, others={"mlp.bias": jnp.asarray(others["mlp.bias"]) + 1})
    checkpoints.save_moe(layer, folder, 1)
    saved = [checkpoints.load_others(where, 1)["mlp.bias"] for where in (new, folder)]
    np.testing.assert_array_equal(saved, [others["mlp.bias"], others["mlp.bias"] + 1])
    with pytest.raises(ValueError, match=r"others must be the tensors mlp.bias .*but are bias"):
        checkpoints.save_moe(layer, folder, 1, others={"bias": others["mlp.bias"]})


@pytest.mark.parametrize("decoder", ["thinker", "talker"])
def test_one_of_two_decoders(tmp_path, decoder):
    """Qwen3-Omni's files hold two decoders; config.json says which one is meant."""
    outer = {"thinker_config": {"text_config": config_of("qwen3_omni_moe_text")}}
    if decoder == "talker":
        outer = {"text_config": config_of("qwen3_omni_moe_talker_text")}
    tensors = {}
    for i, name in enumerate(("thinker", "talker")):
        block = f"{name}.model.layers.1.mlp."
        tensors |= {
            block + "gate.weight": numbers(i, E, H),
            block + "experts.gate_up_proj": numbers(2 + i, E, 2 * F, H),
            block + "experts.down_proj": numbers(4 + i, E, H, F),
        }
    block = "talker.model.layers.1.mlp."
    width = 2 * F
    for name, shape in dict(gate_proj=(width, H), up_proj=(width, H), down_proj=(H, width)).items():
        tensors[f"{block}shared_expert.{name}.weight"] = numbers(6, *shape)
    tensors[block + "shared_expert_gate.weight"] = numbers(7, 1, H)
    folder = publish(tmp_path / "published", outer, tensors)
    _, params = checkpoints.load_moe_params(folder, 1)
    want = tensors[f"{decoder}.model.layers.1.mlp.gate.weight"]
    np.testing.assert_array_equal(np.asarray(params.gate).T, want)


# ------------------------------------------------------------------------ loading onto a mesh


def test_configuration_and_parameters(tmp_path):
    config, tensors = deepseek_v3()
    # Each tensor gets a file of its own.
    publish(tmp_path, config, *({name: a} for name, a in tensors.items()))
    got, params = checkpoints.load_moe_params(tmp_path, 1, capacity_factor=1.5)
    assert got == jax_ep.MoEConfig(
        num_experts=E,
        num_experts_per_token=K,
        score="sigmoid",
        num_groups=4,
        groups_kept=2,
        normalize_epsilon=1e-20,
        scale=2.5,
        capacity_factor=1.5,
    )
    prefix = "model.layers.1.mlp."
    np.testing.assert_array_equal(params.gate, tensors[prefix + "gate.weight"].T)
    name = prefix + "gate.e_score_correction_bias"
    np.testing.assert_array_equal(params.bias, tensors[name])
    for e in range(E):
        name = f"{prefix}experts.{e}.down_proj.weight"
        np.testing.assert_array_equal(params.wo[e], tensors[name].T)
    name = prefix + "shared_experts.gate_proj.weight"
    np.testing.assert_array_equal(params.shared_wi_0, tensors[name].T)
    assert params.shared_wi_0.shape == (H, 2 * F)


def test_a_router_computes_in_the_dtype_that_the_models_own_does(tmp_path):
    config, tensors = mixtral(dtype=jnp.bfloat16)
    publish(tmp_path, config, tensors)
    assert checkpoints.load_moe_params(tmp_path, 1)[0].router_dtype is None
    config, tensors = deepseek_v3(dtype=jnp.bfloat16)
    publish(tmp_path, config, tensors)
    assert checkpoints.load_moe_params(tmp_path, 1)[0].router_dtype == jnp.float32


@pytest.mark.parametrize("stored, asked, got", [
    (jnp.bfloat16, None, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32, jnp.float32),
    (np.float32, jnp.bfloat16, jnp.bfloat16),
])  # fmt: skip
def test_dtypes(tmp_path, stored, asked, got):
    config, tensors = deepseek_v3(dtype=stored)
    _, params = checkpoints.load_moe_params(
        publish(tmp_path, config, tensors), 1, param_dtype=asked
    )
    dtypes = {name: a.dtype for name, a in params._asdict().items() if a is not None}
    assert dtypes.pop("bias") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(got)}
    want = tensors["model.layers.1.mlp.experts.3.up_proj.weight"].astype(got).T
    np.testing.assert_array_equal(params.wi_1[3], want)


def test_storage_and_compute_have_dtypes_of_their_own(tmp_path):
    """`param_dtype` and `dtype` must mean what they mean for the Flax layers."""
    config, tensors = mixtral(dtype=jnp.bfloat16)
    publish(tmp_path, config, tensors)
    wide = dict(param_dtype=jnp.float32, dtype=jnp.bfloat16)
    for options, stored, computed in (
        (wide, jnp.float32, jnp.bfloat16),
        (dict(dtype=jnp.float32), jnp.bfloat16, jnp.float32),
        (dict(param_dtype=jnp.float32), jnp.float32, jnp.float32),
        ({}, jnp.bfloat16, jnp.bfloat16),
    ):
        layer = checkpoints.load_moe(tmp_path, 1, **options)
        assert layer.wo.get_value().dtype == stored
        assert layer.config.dtype == options.get("dtype")
        assert layer(jnp.asarray(X, jnp.bfloat16))[0].dtype == computed
    layer = checkpoints.load_moe(tmp_path, 1, **wide)
    narrow = checkpoints.load_moe(tmp_path, 1)
    x = jnp.asarray(X, jnp.bfloat16)
    np.testing.assert_array_equal(layer(x)[0], narrow(x)[0])
    checkpoints.save_moe(layer, tmp_path, 1)
    again = checkpoints.load_moe(tmp_path, 1)
    np.testing.assert_array_equal(again.wo.get_value(), narrow.wo.get_value())


def test_experts_are_spread_over_the_meshs_axis(tmp_path):
    publish(tmp_path, *mixtral())
    whole = checkpoints.load_moe_params(tmp_path, 1)[1]
    data_expert = mesh((2, 4), ("data", "expert"))
    seen = []
    got, params = checkpoints.load_moe_params(
        tmp_path, 1, mesh=data_expert, progress=lambda *counts: seen.append(counts)
    )
    assert got.mesh is data_expert
    assert params.wo.sharding.is_equivalent_to(NamedSharding(data_expert, P("expert")), 3)
    assert params.gate.sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    # Each byte is read once, even if several devices hold it. The bytes are those of 8 experts with
    # three matrices each, and of the gate.
    total = E * 3 * H * F * 4 + E * H * 4
    assert seen[-1] == (total, total) and [s for s, _ in seen] == sorted(s for s, _ in seen)

    two = mesh((2, 4), ("host", "rank"))
    _, params = checkpoints.load_moe_params(tmp_path, 1, mesh=two, expert_axis=("host", "rank"))
    assert params.wo.sharding.shard_shape(params.wo.shape)[0] == 1
    with jax.set_mesh(expert_mesh(2)):
        got, params = checkpoints.load_moe_params(tmp_path, 1)
    assert got.mesh is None and params.wi_0.sharding.shard_shape((E, H, F))[0] == 4


@pytest.mark.parametrize("rules", [None, [("exp", "expert"), ("embed", None), ("mlp", None)]])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_layer_is_loaded_onto_the_ambient_mesh(tmp_path, kind, rules):
    """A layer must load onto the ambient mesh, with and without Flax's logical axis rules."""
    config, tensors = deepseek_v3()
    publish(tmp_path, config, tensors)
    ambient = mesh((8,), ("expert",), kind)
    with jax.set_mesh(ambient), nnx.logical_axis_rules(rules or ()):
        layer = checkpoints.load_moe(tmp_path, 1)
        out = jax.eval_shape(layer, jnp.asarray(X))[0]
    assert layer.config.mesh is None and out.shape == X.shape
    wo = layer.wo.get_value()
    assert wo.sharding.is_equivalent_to(NamedSharding(ambient, P("expert")), 3)


def test_fsdp_splits_experts_and_h_of_other_parameters(tmp_path):
    publish(tmp_path, *deepseek_v3())
    whole = checkpoints.load_moe_params(tmp_path, 1)[1]
    devices = mesh((2, 4), ("fsdp", "expert"))
    axes = {"exp": "fsdp", "embed": "fsdp"}
    _, params = checkpoints.load_moe_params(tmp_path, 1, mesh=devices, fsdp_axes=axes)
    for name, spec in {
        "wi_0": P(("expert", "fsdp")),
        "wo": P(("expert", "fsdp")),
        "gate": P("fsdp"),
        "shared_wo": P(None, "fsdp"),
    }.items():
        array = getattr(params, name)
        assert array.sharding.is_equivalent_to(NamedSharding(devices, spec), array.ndim), name
    jax.tree.map(np.testing.assert_array_equal, params, whole)


def test_experts_are_split_over_a_tensor_axis_too(tmp_path):
    """A tensor axis of two ranks must split F, the experts' hidden columns.

    Each rank must then hold half of F of the matrices of its two experts and of the shared experts.
    """
    config, tensors = deepseek_v3()
    publish(tmp_path, config, tensors)
    whole = checkpoints.load_moe_params(tmp_path, 1)[1]
    both = mesh((4, 2), ("expert", "tensor"))
    seen = []
    layer = checkpoints.load_moe(
        tmp_path, 1, mesh=both, tensor_axis="tensor", progress=lambda *counts: seen.append(counts)
    )
    for name, part in {
        "wi_0": (2, H, F // 2),
        "wo": (2, F // 2, H),
        "shared_wi_1": (H, F),
        "shared_wo": (F, H),
    }.items():
        array = getattr(layer, name).get_value()
        assert array.sharding.shard_shape(array.shape) == part
        np.testing.assert_array_equal(array, getattr(whole, name))
    # Nothing may be read twice.
    total = sum(a.nbytes for a in tensors.values())
    assert seen[-1] == (total, total)
    out, _ = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(X))
    np.testing.assert_allclose(out, wanted(tensors), rtol=1e-4, atol=1e-5)
    checkpoints.save_moe(layer, tmp_path, 1)
    assert Directory(tmp_path).files.keys() == tensors.keys()

    with pytest.raises(
        ValueError, match="width of wi_0 .* multiple of the 8 ranks along tensor_ax"
    ):
        eight = mesh((1, 8), ("expert", "tensor"))
        checkpoints.load_moe(tmp_path, 1, mesh=eight, tensor_axis="tensor")


@pytest.mark.parametrize("num_slots, shape", [
    (9, (3,)), (8, (4,)), (6, (2,)), (14, (1,)), (16, (8,)), (8, (4, 2)),
])  # fmt: skip
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
    params = checkpoints.load_moe_params(tmp_path, 1, num_slots=num_slots)[1]
    np.testing.assert_array_equal(params.wo, layer.wo.get_value())
    sizes = dict(num_experts=6, num_slots=num_slots, num_ranks=shape[0])
    placement = Placement.in_order(**sizes)
    want = wanted(tensors)
    run = nnx.jit(lambda layer, x, placement: layer(x, placement=placement)[0])
    np.testing.assert_allclose(run(layer, X, placement[0]), want, rtol=1e-4, atol=1e-5)
    checkpoints.save_moe(layer, tmp_path, 1, placement=placement[0])
    assert files_of(tmp_path) == before

    new = balance(np.arange(6.0)[None], num_slots=num_slots, num_ranks=shape[0])[0]
    graph, state = nnx.split(layer)
    moved = redistribute(state, placement[0], new, mesh=on)
    layer = nnx.merge(graph, moved)
    np.testing.assert_allclose(run(layer, X, new), want, rtol=1e-4, atol=1e-5)
    checkpoints.save_moe(layer, tmp_path, 1, placement=new)
    assert files_of(tmp_path) == before
    checkpoints.save_moe(params, tmp_path, 1, placement=placement[0])
    assert files_of(tmp_path) == before


def test_slots_that_do_not_fit_are_refused(tmp_path):
    publish(tmp_path, *mixtral(e=6))
    load = functools.partial(checkpoints.load_moe, tmp_path, 1)
    with pytest.raises(ValueError, match="num_slots must be a multiple of the 3 ranks .* is 8"):
        load(num_slots=8, mesh=expert_mesh(3))
    with pytest.raises(ValueError, match="num_experts must be .* 4 ranks .* 6; num_slots=8 would"):
        load(mesh=expert_mesh(4))
    with pytest.raises(ValueError, match="num_slots must be at least num_experts=6"):
        load(num_slots=5)

    of_slots = load(num_slots=6)
    before = files_of(tmp_path)
    with pytest.raises(TypeError, match="placement must say which expert each of the num_slots=6"):
        checkpoints.save_moe(of_slots, tmp_path, 1)
    wrong = Placement.in_order(num_experts=6, num_slots=8, num_ranks=2)[0]
    with pytest.raises(ValueError, match="placement must be of this layer, with 6 slots and 6"):
        checkpoints.save_moe(of_slots, tmp_path, 1, placement=wrong)
    with pytest.raises(ValueError, match="placement must be None for a layer without num_slots"):
        checkpoints.save_moe(load(), tmp_path, 1, placement=wrong)
    params = checkpoints.load_moe_params(tmp_path, 1, num_slots=9)[1]
    with pytest.raises(ValueError, match="if they have a matrix for each slot, give placement"):
        checkpoints.save_moe(params, tmp_path, 1)
    with pytest.raises(
        ValueError, match="layer_or_params must have the shapes .*8, 16, 12.*9, 16, 12"
    ):
        checkpoints.save_moe(params, tmp_path, 1, placement=wrong)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("fields, said", [
    ({"identity_experts": 2}, "identity_experts must be 0, as in the stored block, but is 2"),
    ({"constant_experts": 1}, "constant_experts must be 0, as in the stored block, but is 1"),
    ({"wire_dtype": jnp.float8_e4m3fn}, "wire_dtype=.* blocks of 128 values, but x has 16"),
    ({"expert_axis": "exprt"}, "expert_axis .*exprt.* must name axes of the mesh"),
    ({"batch_axes": "data"}, "batch_axes must be among the mesh axes"),
    ({"tensor_axis": "expert"}, "tensor_axis must be another mesh axis"),
    ({"router": lambda x, logits: logits}, "router"),
])  # fmt: skip
def test_a_layer_that_no_call_accepts_is_not_loaded(tmp_path, fields, said):
    publish(tmp_path, *mixtral())
    for load in (checkpoints.load_moe, checkpoints.load_moe_params):
        with pytest.raises((TypeError, ValueError), match=said):
            load(tmp_path, 1, mesh=expert_mesh(2), **fields)


@pytest.mark.parametrize("num_slots, experts", [(None, "7"), (32, "4567")])
def test_a_device_reads_its_own_experts_and_no_others(tmp_path, monkeypatch, num_slots, experts):
    """A process must read only its own device's experts; here the last of eight processes does."""
    config, tensors = mixtral()
    publish(tmp_path, config, tensors)
    read = []
    take = Directory.read
    monkeypatch.setattr(
        Directory, "read", lambda self, name, index: read.append(name) or take(self, name, index)
    )
    last = jax.devices()[7]
    addressable = NamedSharding.addressable_devices_indices_map

    def of_the_last(self, shape):
        return {last: addressable(self, shape)[last]}

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", of_the_last)
    monkeypatch.setattr(
        jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: arrays
    )
    _, params = checkpoints.load_moe_params(tmp_path, 1, mesh=expert_mesh(8), num_slots=num_slots)
    block = "model.layers.1.block_sparse_moe."
    assert set(read) == {block + "gate.weight"} | {
        f"{block}experts.{e}.{name}.weight" for e in experts for name in ("w1", "w2", "w3")
    }
    (own,) = params.wi_0
    np.testing.assert_array_equal(own[-1], tensors[block + "experts.7.w1.weight"].T)


PROCESS = """
import sys
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax_ep import checkpoints, moe_layer
from jax_ep.checkpoints.safetensors import Directory
from jax_ep.placement import Placement

read, take = set(), Directory.read
Directory.read = lambda self, name, index: read.add(name) or take(self, name, index)
mesh = Mesh(jax.devices(), ("expert",))
x = np.load(sys.argv[3] + "/x.npy")
x = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("expert")), lambda i: x[i])
for slots in (None, 12):
    read.clear()
    config, params = checkpoints.load_moe_params(sys.argv[3], 1, mesh=mesh, num_slots=slots)
    placement = slots and Placement.in_order(num_experts=8, num_slots=slots, num_ranks=4)[0]
    run = jax.jit(
        lambda p, x: moe_layer(p, x, config, placement=placement)[0],
        out_shardings=NamedSharding(mesh, P()),
    )
    np.save(f"{sys.argv[3]}/{slots}-{sys.argv[2]}.npy", run(params, x))
    experts = {name.split(".experts.")[1][0] for name in read if ".experts." in name}
    print(slots, "slots hold", "".join(sorted(experts)))
try:
    checkpoints.save_moe(params, sys.argv[3], 1, placement=placement)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_reads_the_experts_of_its_devices(tmp_path):
    """Two processes with two devices each must compute the right output from their own experts."""
    config, tensors = mixtral()
    publish(tmp_path, config, tensors)
    np.save(tmp_path / "x.npy", X)
    printed = outputs_of_processes(PROCESS, str(tmp_path))
    want = wanted(tensors)
    for i, (own, of_slots) in enumerate((("0123", "012345"), ("4567", "012367"))):
        assert f"None slots hold {own}\n12 slots hold {of_slots}\n" in printed[i]
        assert "wi_0 must be on devices of this process to be saved" in printed[i]
        for slots in (None, 12):
            got = np.load(tmp_path / f"{slots}-{i}.npy")
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_loading_needs_little_more_memory_than_it_keeps(tmp_path):
    """Loading must need at most 1.2 times the memory of the parameters, at its peak."""
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


# ------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_loaded_and_saved_is_the_same_byte_for_byte(tmp_path, num_ranks, dtype):
    config, tensors = deepseek_v3()
    halves = list(tensors.items())
    others = {"model.layers.2.mlp.gate.weight": numbers(0, E, H)}
    publish(tmp_path, config, dict(halves[:9]), dict(halves[9:]) | others)
    before = files_of(tmp_path)
    layer = checkpoints.load_moe(tmp_path, 1, mesh=expert_mesh(num_ranks), param_dtype=dtype)
    checkpoints.save_moe(layer, tmp_path, 1)
    assert files_of(tmp_path) == before


def decoded(tensors, name):
    scales = tensors[name + "_scale_inv"].repeat(8, axis=0).repeat(8, axis=1)
    rows, columns = tensors[name].shape
    return tensors[name].astype(np.float32) * scales[:rows, :columns]


def test_float8_is_loaded_and_saved(tmp_path):
    config, tensors = float8_model(block=8)
    publish(tmp_path, config, tensors)
    before = files_of(tmp_path)
    name = "model.layers.1.mlp.experts.6.{}_proj.weight"

    _, params = checkpoints.load_moe_params(tmp_path, 1)
    assert params.wi_0.dtype == jnp.bfloat16 and params.gate.dtype == jnp.float32
    want = decoded(tensors, name.format("up")).T
    np.testing.assert_array_equal(params.wi_1[6], want.astype(jnp.bfloat16))
    checkpoints.save_moe(params, tmp_path, 1)
    assert files_of(tmp_path) == before

    _, params = checkpoints.load_moe_params(
        tmp_path, 1, param_dtype=jnp.float32, mesh=expert_mesh(2)
    )
    np.testing.assert_array_equal(params.wi_1[6], want)
    new = params.wo.at[6].multiply(1.5)
    checkpoints.save_moe(params._replace(wo=new), tmp_path, 1)
    saved = checkpoints.load_moe_params(tmp_path, 1, param_dtype=jnp.float32)[1]
    np.testing.assert_allclose(saved.wo, new, rtol=2**-4, atol=1e-3)
    jax.tree.map(np.testing.assert_array_equal, saved._replace(wo=params.wo), params)


def test_gpt_oss_is_loaded_and_saved_in_mxfp4(tmp_path):
    """GPT-OSS must be loaded from and saved to MXFP4, in the layout of the published files.

    Its matrices are [E, out, in] with alternating rows of gate and up, in blocks of 32 inputs.
    """
    config, published = gpt_oss_in_mxfp4(swiglu_limit=5.0)
    publish(tmp_path, config, published)
    tensors = {name.removeprefix("model.layers.1.mlp."): array for name, array in published.items()}
    before = files_of(tmp_path)

    def value(name, expert, row, column):
        """Decodes a number from its 4-bit code: sign, two exponent bits, one fraction bit."""
        block, place = divmod(column, 32)
        byte = int(tensors[f"experts.{name}_blocks"][expert, row, block, place // 2])
        code = byte >> 4 if place % 2 else byte & 15
        exponent, fraction = code >> 1 & 3, code & 1
        size = 2 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
        scale = 2.0 ** (int(tensors[f"experts.{name}_scales"][expert, row, block]) - 127)
        return (-size if code & 8 else size) * scale

    got, params = checkpoints.load_moe_params(tmp_path, 1, mesh=expert_mesh(4))
    assert (got.clamp, got.normalize, params.wi_0.dtype) == (5.0, True, jnp.bfloat16)
    arrays = jax.tree.map(np.asarray, params)
    h, f = params.wi_0.shape[1:]
    for e, i, j in np.random.default_rng(0).integers([E, h, f], size=(50, 3)):
        assert arrays.wi_0[e, i, j] == value("gate_up_proj", e, 2 * j, i)
        assert arrays.wi_1[e, i, j] == value("gate_up_proj", e, 2 * j + 1, i)
        assert arrays.wo[e, j, i] == value("down_proj", e, i, j)
    biases = tensors["experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(arrays.wi_0_bias, biases[:, ::2])
    np.testing.assert_array_equal(arrays.wi_1_bias, biases[:, 1::2])
    np.testing.assert_array_equal(arrays.gate_bias, tensors["router.bias"])
    checkpoints.save_moe(checkpoints.load_moe(tmp_path, 1, mesh=expert_mesh(8)), tmp_path, 1)
    assert files_of(tmp_path) == before


def test_blocks_are_saved_into_a_new_directory(tmp_path):
    """MoE blocks saved into a directory with config.json alone must get their published names.

    The tensors must have the same bytes as the files from which they were loaded.
    """
    config, tensors = deepseek_v3(dtype=jnp.bfloat16)
    second = {name.replace("layers.1.", "layers.2."): 2 * a for name, a in tensors.items()}
    old = publish(tmp_path / "old", config, tensors, second)
    new = publish(tmp_path / "new", config)
    for layer in (2, 1):
        checkpoints.save_moe(checkpoints.load_moe(old, layer, mesh=expert_mesh(8)), new, layer)
    assert_same(contents(new), tensors | second)
    assert len(set(total_size(new))) == 1
    one = publish(tmp_path / "one", config, tensors)
    before = files_of(one)
    with pytest.raises(ValueError, match="must have an index, .* has model.safetensors"):
        checkpoints.save_moe(checkpoints.load_moe(old, 2), one, 2)
    assert files_of(one) == before


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
    folder = publish(tmp_path, config, tensors, {"lm_head.weight": numbers(0, 9, H)})
    layer = checkpoints.load_moe(folder, 1, mesh=expert_mesh(4))
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
    "another last norm": lambda: {"base_model.model.model.norm.weight": np.ones(2 * H, np.float32)},
    "another router": lambda: deepseek_v3()[1],
    "another router elsewhere": lambda: deepseek_v3(layer=0)[1],
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
    assert {name: data for name, data in files_of(folder).items() if name in before} == {
        **before, INDEX: (folder / INDEX).read_bytes()
    }  # fmt: skip


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
    """GPT-OSS must be saved as MXFP4 if config.json says so, otherwise unquantized."""
    config, tensors = gpt_oss_in_mxfp4()
    _, params = checkpoints.load_moe_params(publish(tmp_path / "old", config, tensors), 1)
    wo = params.wo * jnp.linspace(1, 2, params.wo.shape[-1])
    params = params._replace(wo=wo.astype(jnp.bfloat16))
    config["quantization_config"] = method and {"quant_method": method}
    new = publish(tmp_path / "new", config)
    checkpoints.save_moe(params, new, 1)
    assert len(set(total_size(new))) == 1
    assert (set(contents(new)) == set(tensors)) == (method is not None)
    loaded = checkpoints.load_moe_params(new, 1)[1]
    if method is not None:
        # The error is at most a quarter of a block's largest number, which is 4 to 8 times the
        # block's scale. Rounding errs by at most one scale. A number of 8 scales is clipped to 6,
        # which is also an error of a quarter.
        largest = np.abs(np.asarray(params.wo, np.float32)).max()
        np.testing.assert_allclose(loaded.wo, params.wo, rtol=0, atol=largest / 4)
        assert np.corrcoef(np.ravel(loaded.wo), np.ravel(params.wo))[0, 1] > 0.98
        params = params._replace(wo=loaded.wo)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    # Saving values that were loaded from MXFP4 must not change them.
    second = publish(tmp_path / "second", config)
    checkpoints.save_moe(loaded, second, 1)
    assert_same(contents(second), contents(new))


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
    for name, old in tensors.items():
        got = stored[name]
        assert (got.dtype, got.shape) == (old.dtype, old.shape)
        if name.endswith("_scale_inv") and (is_new or "experts" in name and "up_proj" in name):
            is_changed = is_new or ".experts" in name
            exact = np.array_equal(np.exp2(np.round(np.log2(got))), got)
            assert exact == (scale_fmt == "ue8m0" and is_changed)
    saved = checkpoints.load_moe_params(folder, 1, param_dtype=jnp.float32)[1]
    for got, want in zip(jax.tree.leaves(saved), jax.tree.leaves(params), strict=True):
        # e4m3 has 4 significant bits, so rounding errs by at most 2^-4 of a number; the absolute
        # tolerance is for subnormal numbers.
        np.testing.assert_allclose(got, want, rtol=2**-4, atol=np.abs(want).max() * 2**-9)


@pytest.mark.parametrize("root", ["base_model.model.model.", "_orig_mod.model."])
def test_names_with_a_prefix_are_kept(tmp_path, root):
    config, tensors = mixtral()
    named = {name.replace("model.", root, 1): a for name, a in tensors.items()}
    others = {"mtp.layers.0.block_sparse_moe.gate.weight": numbers(0, E, H)}
    publish(tmp_path, config, named, others)
    before = files_of(tmp_path)
    layer = checkpoints.load_moe(tmp_path, 1)
    checkpoints.save_moe(layer, tmp_path, 1)
    assert files_of(tmp_path) == before
    layer.wo.set_value(2 * layer.wo.get_value())
    checkpoints.save_moe(layer, tmp_path, 1)
    doubled = {name: 2 * a if "w2" in name else a for name, a in (named | others).items()}
    assert_same(contents(tmp_path), doubled)


# ------------------------------------------------------------------------------------- errors


def test_errors_name_the_argument(tmp_path):
    publish(tmp_path, *mixtral())
    for options, error, said in (
        (dict(param_dtype=jnp.int8), TypeError, "param_dtype must be a floating dtype, but is"),
        (dict(param_dtype=jnp.float64), TypeError, "param_dtype must be a dtype .* float64 needs"),
        (
            dict(param_dtype=jnp.float8_e4m3fn),
            TypeError,
            "param_dtype must be a .* 16 bits .* quantized=jax_ep.form",
        ),
        (dict(dtype=jnp.float8_e4m3fn), TypeError, "^dtype must be a .* 16 bits or more"),
        (dict(wings=2), TypeError, "wings"),
        (dict(mesh=expert_mesh(3)), ValueError, "the 3 ranks along expert_axis .* has 8"),
        (
            dict(mesh=AbstractMesh((2,), ("expert",))),
            TypeError,
            "mesh must be a jax.sharding.Mesh of devices, but is",
        ),
        (dict(num_experts=4), ValueError, "num_experts must be 8, as in the stored block, but is"),
        (dict(num_experts_per_token=9), ValueError, "num_experts_per_token must be"),
    ):
        with pytest.raises(error, match=said):
            checkpoints.load_moe(tmp_path, 1, **options)
    params = checkpoints.load_moe_params(tmp_path, 1)[1]
    before = files_of(tmp_path)
    for layer in (-1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match=f"layer must be .* but is {layer}"):
            checkpoints.save_moe(params, tmp_path, layer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer_or_params must have the shapes of the block"):
        checkpoints.save_moe(params._replace(wo=params.wo[:, :6]), tmp_path, 1)
    assert files_of(tmp_path) == before
