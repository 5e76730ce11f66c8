"""Tests of loading and saving whole models, in one process and in two."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.meshes import expert_mesh, mesh
from support.processes import outputs_of_processes
from support.published import (
    assert_same,
    contents,
    deepseek_v3,
    gpt_oss_in_mxfp4,
    mixtral,
    numbers,
    publish,
)

from jax_ep import checkpoints, formats
from jax_ep.checkpoints.model import _owners
from jax_ep.checkpoints.safetensors import INDEX, read_header

H = 16
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
    split = NamedSharding(on_mesh, P("expert"))
    model = checkpoints.load_model(
        tmp_path,
        mesh=on_mesh,
        param_dtype=jnp.float32,
        sharding=lambda name, shape: NamedSharding(
            on_mesh, P("expert" if len(shape) > 1 else None)
        ),
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


def test_quantized_experts_are_kept_and_other_float8_weights_dequantized(tmp_path):
    config, tensors = deepseek_v3()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    matrix = numbers(0, H, H)
    block = formats.Float8.of(np.dtype(jnp.float8_e4m3fn), (8, 8), np.float32)
    values, scales = block.encode(matrix)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors |= {name: values, f"{name}_scale_inv": scales}
    publish(tmp_path, config, tensors)
    model = checkpoints.load_model(tmp_path, param_dtype=jnp.float32)
    assert list(model.weights) == [name]
    np.testing.assert_array_equal(
        model.weights[name], block.decode((values, scales), np.dtype(np.float32))
    )


@pytest.mark.parametrize("num_ranks", [1, 4])
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
        progress=lambda *c: seen.append(c),
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


def test_a_dtype_converts_all_numbers_but_selection_biases(tmp_path):
    config, tensors = deepseek_v3()
    publish(tmp_path / "one", config, tensors)
    model = checkpoints.load_model(tmp_path / "one", param_dtype=jnp.float32)
    checkpoints.save_model(tmp_path / "two", config, model.moe, {}, dtype=jnp.float16)
    got = contents(tmp_path / "two")
    biases = {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert biases
    assert_same(
        got,
        {n: t.astype(np.float32 if n in biases else np.float16) for n, t in tensors.items()},
    )


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


def test_a_model_takes_the_place_of_another_only_if_asked(tmp_path):
    config, tensors = whole_mixtral()
    publish(tmp_path, config, {"a": numbers(0, 4)}, tensors)
    model = checkpoints.load_model(tmp_path)
    save = (tmp_path, config, model.moe, {n: model.weights[n] for n in OUTSIDE})
    with pytest.raises(ValueError, match="must hold no model, but does; overwrite=True"):
        checkpoints.save_model(*save)
    assert "a" in contents(tmp_path)
    checkpoints.save_model(*save, overwrite=True)
    assert_same(contents(tmp_path), tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json", "model-00001-of-00001.safetensors", INDEX,
    ]  # fmt: skip


def test_a_block_of_other_sizes_is_refused(tmp_path):
    config, tensors = whole_mixtral()
    publish(tmp_path / "one", config, tensors)
    model = checkpoints.load_model(tmp_path / "one")
    config["num_local_experts"] = 4
    with pytest.raises(ValueError, match=r"moe\[0\] must have the shapes of the block"):
        checkpoints.save_model(tmp_path / "two", config, model.moe, {})
    assert not (tmp_path / "two").exists()


PROCESS = """if True:
    import sys, json
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    from jax_ep import checkpoints
    from jax_ep.checkpoints.safetensors import INDEX

    folder, into, axes = sys.argv[3], sys.argv[4], sys.argv[5].split(",")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = checkpoints.load_model(
        folder,
        mesh=mesh,
        tensor_axis="tensor",
        sharding=lambda name, shape: NamedSharding(mesh, P(None, axes) if len(shape) > 1 else P()),
    )
    checkpoints.save_model(into, model.config, model.moe, model.weights, max_file_bytes=3000)
    own = {e for s in model.moe[0].wi_0.addressable_shards for e in range(*s.index[0].indices(8))}
    print(json.dumps(sorted(own)))
"""


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="starts processes on CPUs")
@pytest.mark.parametrize("axes", ["expert,tensor", "tensor,expert"])
def test_two_processes_write_their_own_experts(tmp_path, axes):
    """Each process must write its own experts; what no process has whole must be gathered.

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
        assert [json.loads(out.splitlines()[-1]) for out in printed] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert experts[0].isdisjoint(experts[1])


def test_a_mesh_of_one_process_has_one_owner():
    split = NamedSharding(mesh((2,), ("expert",)), P("expert"))
    assert _owners(split, (4, 3), True) == [0] * 4
    assert _owners(split, (4, 3), False) == [0]
    assert _owners(NamedSharding(split.mesh, P()), (), False) == [0]
