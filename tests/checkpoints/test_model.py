"""Tests of loading and saving whole models, in one process and in two."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.meshes import expert_mesh
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
    gpt_oss_in_mxfp4,
    mixtral,
    numbers,
    publish,
)
from support.selection import quick

import jax_ep
from jax_ep import checkpoints
from jax_ep.checkpoints.safetensors import INDEX, read_header

OUTSIDE = {
    "model.embed_tokens.weight": (32, H),
    "model.layers.0.self_attn.q_proj.weight": (H, H),
    "model.layers.1.self_attn.q_proj.weight": (H, H),
    "model.norm.weight": (H,),
}


def whole_mixtral(dtype=jnp.bfloat16) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns config.json and the tensors of a Mixtral of two layers, without all of attention."""
    config, tensors = mixtral(0, dtype)
    tensors |= mixtral(1, dtype)[1]
    weights = enumerate(OUTSIDE.items())
    tensors |= {name: numbers(i, *shape, dtype=dtype) for i, (name, shape) in weights}
    return config | {"num_hidden_layers": 2}, tensors


@pytest.mark.needs_devices(4)
def test_a_model_is_loaded_as_its_blocks_and_all_other_weights(tmp_path):
    config, tensors = whole_mixtral()
    publish(tmp_path, config, tensors)
    seen: list[tuple[int, int]] = []
    on_mesh = expert_mesh(4)
    split, whole = NamedSharding(on_mesh, P("expert")), NamedSharding(on_mesh, P())
    model = checkpoints.load_model(
        tmp_path,
        mesh=on_mesh,
        param_dtype=jnp.float32,
        sharding=lambda name, shape: split if len(shape) > 1 else whole,
        progress=lambda *counts: seen.append(counts),
    )
    assert model.config == config and list(model.moe) == [0, 1]
    for layer in (0, 1):
        want_config, want = checkpoints.load_moe_params(
            tmp_path, layer, mesh=on_mesh, param_dtype=jnp.float32
        )
        assert model.moe_configs[layer] == want_config
        jax.tree.map(np.testing.assert_array_equal, model.moe[layer], want)
        assert model.moe[layer].wi_0.sharding == want.wi_0.sharding
    assert_same(
        jax.tree.map(np.asarray, model.weights),
        {name: tensors[name].astype(np.float32) for name in OUTSIDE},
    )
    assert model.weights["model.embed_tokens.weight"].sharding == split
    loaded, total = zip(*seen, strict=True)
    assert loaded[-1] == max(loaded) == total[0] and set(total) == {total[0]}


def test_some_layers_of_a_model_are_loaded(tmp_path):
    publish(tmp_path, *whole_mixtral())
    model = checkpoints.load_model(tmp_path, layers=[1])
    assert list(model.moe) == [1]
    assert sorted(model.weights) == sorted(n for n in OUTSIDE if "layers.0" not in n)
    assert model.weights["model.norm.weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
def test_what_is_saved_is_what_was_published(tmp_path, num_ranks):
    config, tensors = whole_mixtral()
    publish(tmp_path / "one", config, tensors)
    model = checkpoints.load_model(tmp_path / "one", mesh=expert_mesh(num_ranks))
    into = tmp_path / "two" / "three"
    seen: list[tuple[int, int]] = []
    checkpoints.save_model(
        into,
        config,
        model.moe,
        model.weights,
        max_file_bytes=4000,
        progress=lambda *counts: seen.append(counts),
    )
    assert_same(contents(into), tensors)
    assert json.loads((into / "config.json").read_text()) == config
    index = json.loads((into / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 3
    assert sorted(p.name for p in into.iterdir()) == sorted([*files, "config.json", INDEX])
    for file in files:
        sizes = [entry.num_bytes for entry in read_header(into / file).values()]
        assert sum(sizes) <= 4000 or len(sizes) == 1
    assert seen[-1] == (index["metadata"]["total_size"],) * 2

    with pytest.raises(ValueError, match="must hold no model, but does; overwrite=True"):
        checkpoints.save_model(into, config, model.moe, model.weights)
    assert_same(contents(into), tensors)
    for name in ("config.json", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
        (other := tmp_path / name).mkdir()
        (other / name).write_text("{}")
        with pytest.raises(ValueError, match="must hold no model, but does; overwrite=True"):
            checkpoints.save_model(other, config, model.moe, model.weights)
        assert [each.name for each in other.iterdir()] == [name]
    checkpoints.save_model(into, config, model.moe, model.weights, overwrite=True)
    assert_same(contents(into), tensors)
    assert {p.name for p in into.iterdir()} == {
        "config.json", "model-00001-of-00001.safetensors", INDEX,
    }  # fmt: skip

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", interrupted)
        checkpoints.save_model(into, config, model.moe, model.weights, overwrite=True)
    with pytest.raises(FileNotFoundError, match="but has neither"):
        checkpoints.load_model(into)
    # Three files are moved: the tensors, the index and config.json.
    for num_moved in range(3):
        publish(old := tmp_path / f"interrupted after {num_moved}", config, tensors)
        moves = [os.rename] * num_moved
        with pytest.MonkeyPatch.context() as patch, pytest.raises(IndexError, match="pop from"):
            patch.setattr("os.replace", lambda *paths, moves=moves: moves.pop()(*paths))
            checkpoints.save_model(old, config, model.moe, model.weights, overwrite=True)
        with pytest.raises(FileNotFoundError, match=r"must hold config.json"):
            checkpoints.load_model(old)
    with pytest.raises(ValueError, match=r"moe\[0\] must have the shapes of the block in .*four, "):
        other = config | {"num_local_experts": 4}
        checkpoints.save_model(tmp_path / "four", other, model.moe, {})
    adapted = [jax_ep.init_lora(model.moe[0], 2, jax.random.key(0))]
    with pytest.raises(ValueError, match=r"moe\[0\] must have no adapters.* jax_ep.merge_lora"):
        checkpoints.save_model(tmp_path / "four", config, adapted, {})
    assert not (tmp_path / "four").exists()


def gemma_4() -> tuple[dict, dict[str, np.ndarray]]:
    """Returns config.json, and two MoE blocks with a scale that the layer does not hold."""
    shapes = {
        "router.proj.weight": (E, H),
        "router.per_expert_scale": (E,),
        "router.scale": (H,),
        "experts.gate_up_proj": (E, 2 * F, H),
        "experts.down_proj": (E, H, F),
    }
    names = [(f"model.layers.{i}.{name}", shapes[name]) for i in (0, 1) for name in shapes]
    tensors = {name: numbers(i, *shape) for i, (name, shape) in enumerate(names)}
    return config_of("gemma4_text"), tensors


def deepseek_v4() -> tuple[dict, dict[str, np.ndarray]]:
    """Returns config.json and two MoE blocks, of which the first has a table of experts."""
    tensors = {}
    for name, array in deepseek_v3(0)[1].items():
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(old, new)
        name = name.replace("model.layers.0.mlp", "ffn").replace("e_score_correction_", "")
        if "shared" in name:
            array = array[:F] if array.shape[0] > H else array[:, :F]
        tensors |= {f"layers.{layer}.{name}": array for layer in (0, 1)}
    del tensors["layers.0.ffn.gate.bias"]
    tensors["layers.0.ffn.gate.tid2eid"] = np.arange(32 * K, dtype=np.int32).reshape(32, K) % E
    return config_of("deepseek_v4"), tensors


@pytest.mark.parametrize(
    "published, others, without_others",
    [
        (
            gemma_4,
            [f"model.layers.{layer}.router.scale" for layer in (0, 1)],
            r"weights must hold model.layers.0.router.scale of the MoE block moe\[0\]",
        ),
        (deepseek_v4, ["layers.0.ffn.gate.tid2eid"], r"moe\[0\] must have .* 'bias': \(8,\)"),
    ],
    ids=["Gemma 4", "DeepSeek-V4"],
)
def test_tensors_that_the_layers_do_not_hold_are_weights(
    tmp_path, published, others, without_others
):
    config, tensors = published()
    publish(tmp_path / "one", config, tensors)
    with pytest.raises(ValueError, match=f"partial must be True for layer 0 .*{others[0]}"):
        checkpoints.load_model(tmp_path / "one")
    model = checkpoints.load_model(tmp_path / "one", partial=True)
    assert_same(jax.tree.map(np.asarray, model.weights), {name: tensors[name] for name in others})
    checkpoints.save_model(tmp_path / "two", config, model.moe, model.weights)
    assert_same(contents(tmp_path / "two"), tensors)
    with pytest.raises(ValueError, match=without_others):
        checkpoints.save_model(tmp_path / "three", config, model.moe, {})


def test_a_dtype_converts_all_numbers_but_selection_biases(tmp_path):
    config, tensors = deepseek_v3()
    publish(tmp_path / "one", config, tensors)
    model = checkpoints.load_model(tmp_path / "one", param_dtype=jnp.float32)
    checkpoints.save_model(tmp_path / "two", config, model.moe, {}, dtype=jnp.float16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    want = {name: array.astype(np.float16) for name, array in tensors.items()}
    assert_same(contents(tmp_path / "two"), want | {bias: tensors[bias]})


def test_a_quantized_model_is_saved_as_numbers(tmp_path):
    config, tensors = gpt_oss_in_mxfp4()
    publish(tmp_path / "one", config, tensors)
    model = checkpoints.load_model(tmp_path / "one", quantized="keep")
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    checkpoints.save_model(tmp_path / "two", plain, model.moe, model.weights)
    want = checkpoints.load_model(tmp_path / "one")
    got = checkpoints.load_model(tmp_path / "two")
    jax.tree.map(np.testing.assert_array_equal, got.moe, want.moe)
    with pytest.raises(ValueError, match="config must have no quantization_config"):
        checkpoints.save_model(tmp_path / "three", config, model.moe, {})


PROCESS = """if True:
    import sys, json
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    from jax_ep import checkpoints
    from jax_ep.checkpoints.safetensors import Directory

    def experts_of(read):
        numbers = {name.split(".experts.")[1][0] for name in read if "experts" in name}
        return "".join(sorted(numbers))

    read, take = set(), Directory.read
    Directory.read = lambda self, name, index: read.add(name) or take(self, name, index)
    folder, into, axes = sys.argv[3], sys.argv[4], sys.argv[5].split(",")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = checkpoints.load_model(
        folder,
        mesh=mesh,
        tensor_axis="tensor",
        sharding=lambda name, shape: NamedSharding(mesh, P(None, axes) if len(shape) > 1 else P()),
    )
    checkpoints.save_model(into, model.config, model.moe, model.weights, max_file_bytes=3000)
    held = [experts_of(read)]
    try:
        checkpoints.save_moe(model.moe[0], folder, 0)
    except ValueError as error:
        print(error)
    read.clear()
    checkpoints.load_moe_params(folder, 0, mesh=mesh, num_slots=12)
    print(json.dumps([*held, experts_of(read)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="starts processes on CPUs")
@pytest.mark.parametrize("axes", ["expert,tensor", "tensor,expert"])
def test_two_processes_read_and_write_their_own_experts(tmp_path, axes):
    """Each process must read and write its own experts; what none has whole must be gathered.

    Of the axes, the first is between the processes.
    """
    config, tensors = whole_mixtral()
    publish(tmp_path / "one", config, tensors)
    into = tmp_path / "two"
    printed = outputs_of_processes(PROCESS, str(tmp_path / "one"), str(into), axes)
    assert_same(contents(into), tensors)
    assert not list(into.glob(".writing*"))
    files = json.loads((into / INDEX).read_text())["weight_map"]
    experts = [
        {files[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"] for e in part}
        for part in (range(4), range(4, 8))
    ]
    if axes == "expert,tensor":
        held = [json.loads(out.splitlines()[-1]) for out in printed]
        assert held == [["0123", "012345"], ["4567", "012367"]]
        assert all("wi_0 must be on devices of this process to be saved" in out for out in printed)
        assert experts[0].isdisjoint(experts[1])
