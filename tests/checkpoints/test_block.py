"""Tests of finding one layer's MoE block in a checkpoint: layouts, bytes read, and errors."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.published import E, F, H, config_of, deepseek_v3, mixtral, numbers, publish

from jax_ep.checkpoints.architectures import PARAMETER_AXES, architectures
from jax_ep.checkpoints.block import open_block, plan_block
from jax_ep.checkpoints.safetensors import Directory, adding
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams

WHOLE = slice(None)
GATE, UP, DOWN = numbers(1, E, F, H), numbers(2, E, F, H), numbers(3, E, H, F)
ROUTER = numbers(0, E, H)
SWAP = (0, 2, 1)
LAYOUTS = {
    "a tensor for each expert": (
        "qwen3_moe",
        {
            f"mlp.experts.{e}.{name}.weight": stacked[e]
            for e in range(E)
            for name, stacked in (("gate_proj", GATE), ("up_proj", UP), ("down_proj", DOWN))
        },
    ),
    "stacked, gate before up": (
        "qwen3_moe",
        {"mlp.experts.gate_up_proj": np.concatenate([GATE, UP], 1), "mlp.experts.down_proj": DOWN},
    ),
    "stacked and transposed": (
        "qwen3_vl_moe_text",
        {
            "mlp.experts.gate_up_proj": np.concatenate([GATE, UP], 1).transpose(SWAP),
            "mlp.experts.down_proj": DOWN.transpose(SWAP),
        },
    ),
    "stacked, as transformers saves what is published transposed": (
        "qwen3_vl_moe_text",
        {"mlp.experts.gate_up_proj": np.concatenate([GATE, UP], 1), "mlp.experts.down_proj": DOWN},
    ),
}
WANT = {"wi_0": GATE.transpose(SWAP), "wi_1": UP.transpose(SWAP), "wo": DOWN.transpose(SWAP)}


def open_layout(folder, name, root="model."):
    model_type, tensors = LAYOUTS[name]
    tensors = {"mlp.gate.weight": ROUTER} | tensors
    tensors = {f"{root}layers.3.{name}": array.copy("C") for name, array in tensors.items()}
    tensors[f"{root}layers.3.self_attn.q_proj.weight"] = np.zeros((2, 2), np.float32)
    return open_block(publish(folder, config_of(model_type), tensors), 3)


def read(block, param, *index, dtype=np.float32):
    whole = jax.ShapeDtypeStruct(block.shape(param), np.dtype(dtype))
    like = jax.eval_shape(lambda array: array[index], whole)
    return block.read(param, index, like, lambda num_bytes: None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_and_no_bytes_outside_of_the_slice(tmp_path, layout, monkeypatch):
    sizes, read_of_directory = [], Directory.read

    def counting_read(*args):
        out = read_of_directory(*args)
        sizes.append(out.nbytes)
        return out

    monkeypatch.setattr(Directory, "read", counting_read)
    block = open_layout(tmp_path, layout)
    assert block.params() == ("gate", "wi_0", "wi_1", "wo")
    np.testing.assert_array_equal(read(block, "gate", WHOLE, WHOLE), ROUTER.T)
    experts, part = slice(2, 4), slice(6, 12)
    for param, want in WANT.items():
        assert block.shape(param) == want.shape and block.dtype(param) == np.float32
        np.testing.assert_array_equal(read(block, param, WHOLE, WHOLE, WHOLE), want)
        index = (experts, part, WHOLE) if param == "wo" else (experts, WHOLE, part)
        sizes.clear()
        got = read(block, param, *index)
        np.testing.assert_array_equal(got, want[index])
        assert sum(sizes) == got.nbytes == 2 * H * 6 * 4


def test_large_matrices_are_copied_piece_by_piece(tmp_path):
    config, tensors = mixtral(e=2, h=300, f=530)
    config["num_experts_per_tok"] = 1
    block = open_block(publish(tmp_path, config, tensors), 1)
    names = "model.layers.1.block_sparse_moe.experts.1.{}.weight"
    want = tensors[names.format("w3")].T.astype(jnp.bfloat16)
    got = read(block, "wi_1", slice(1, 2), WHOLE, WHOLE, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got[0], want)
    got = read(block, "wo", slice(1, 2), slice(10, 510), WHOLE)
    np.testing.assert_array_equal(got[0], tensors[names.format("w2")].T[10:510])


def test_the_dtype_of_a_parameter_has_the_numbers_of_all_experts(tmp_path):
    config, tensors = mixtral()
    first = next(name for name in tensors if "experts.0.w1" in name)
    tensors[first] = tensors[first].astype(jnp.bfloat16)
    block = open_block(publish(tmp_path, config, tensors), 1)
    assert block.dtype("wi_0") == np.float32


def refused(tmp_path, config, tensors, layer=1):
    with pytest.raises(ValueError) as error:
        open_block(publish(tmp_path / "model", config, tensors), layer)
    return str(error.value)


MODULE = "model.layers.1.mlp.experts.5.up_proj."
# What is changed in a DeepSeek-V3's config.json and tensors (None: is missing), and the error.
ERRORS = [
    ({"model_type": "gpt2"}, {}, "model_type of .* one of .*mixtral.* but is 'gpt2'"),
    ({"hidden_act": "snake"}, {}, "hidden_act of .* one of silu, swish.* but is 'snake'"),
    ({"num_experts_per_tok": None}, {}, "config.json must have num_experts_per_tok"),
    ({"scoring_func": "softmax"}, {}, "scoring_func must be 'sigmoid' or .* is 'softmax'"),
    ({"n_shared_experts": "two"}, {}, r"n_shared_experts\|num_shared.*moe_inter.*\['two', 12\]"),
    ({"moe_intermediate_size": 6}, {}, r"experts.0.gate_proj.weight .*\(6, 16\).*\(12, 16\)"),
    ({"n_routed_experts": E - 1}, {}, r"mlp.gate.weight .*\(7, 16\)"),
    ({}, {MODULE + "weight": None}, rf"must hold {MODULE}weight of shape \(12, 16\).* does not"),
    ({}, {MODULE + "weight": numbers(0, H, F)}, rf"{MODULE}weight .*\(12, 16\).* has \(16, 12\)"),
    ({}, {MODULE + "zero": ROUTER}, rf"holds {MODULE}zero, which DeepSeek-V3.*\(1 such tensors\)"),
    ({}, {f"module.{name}": ROUTER for name in deepseek_v3()[1]}, "must have one MoE block, but"),
]
# The same of its "quantization_config".
QUANTIZATION_ERRORS = [
    ({"quant_method": "gptq"}, "quant_method among fp8, mxfp4, mxfp8, .* but has 'gptq'"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size of .* two positive"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size of .* positive"),
]
ERRORS += [({"quantization_config": keys}, {}, said) for keys, said in QUANTIZATION_ERRORS]


@pytest.mark.parametrize("keys, changes, message", ERRORS)
def test_what_does_not_fit_the_model_is_named(tmp_path, keys, changes, message):
    config, tensors = deepseek_v3()
    config = {key: value for key, value in (config | keys).items() if value is not None}
    tensors = {name: array for name, array in (tensors | changes).items() if array is not None}
    assert re.search(message, refused(tmp_path, config, tensors))


def test_unknown_tensors_outside_of_the_block_do_not_matter(tmp_path):
    config, tensors = deepseek_v3()
    others = dict.fromkeys(("model.layers.2.mlp.experts.5.zero", "model.norm.weight"), ROUTER)
    others |= {f"mtp.{name}": ROUTER for name in ("layers.0.mlp.gate.weight", "mlp.gate.weight")}
    assert open_block(publish(tmp_path, config, tensors | others), 1).prefix == "model.layers.1."
    assert "mtp.layers.0" in refused(tmp_path, config, tensors | others, layer=0)


def test_a_missing_or_damaged_config_is_named(tmp_path):
    folder = publish(tmp_path, *mixtral())
    for damaged in ("{", "[]", '"text"'):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"config.json must be a JSON object"):
            open_block(folder, 1)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="must hold config.json"):
        open_block(folder, 1)


def test_a_value_for_each_layer(tmp_path):
    """A value in config.json may be a list, of which each layer takes its own entry."""
    config = config_of("hunyuan_v1_moe")
    config["moe_topk"] = [1, 5]
    assert plan_block(publish(tmp_path, config), 1).fields["num_experts_per_token"] == 5
    config["moe_topk"] = [1]
    with pytest.raises(ValueError, match="moe_topk.* must have an entry for layer 1, but has 1"):
        plan_block(publish(tmp_path, config), 1)


DEEPSEEK_GATE = "mlp.gate.weight"


def renamed(tensors, before, after):
    return {name.replace(before, after, 1): array for name, array in tensors.items()}


@pytest.mark.parametrize("root", [
    "base_model.model.model.", "module.model.", "model._orig_mod.", "_forward_module.model.",
    "module._orig_mod.model.language_model.", "backbone.", "model._fsdp_wrapped_module.",
])  # fmt: skip
@pytest.mark.parametrize("wrapper", ["", "_checkpoint_wrapped_module."])
def test_names_of_wrapped_modules_are_found(tmp_path, root, wrapper):
    config, tensors = deepseek_v3()
    named = renamed(renamed(tensors, "model.", root), "layers.1.", "layers.1." + wrapper)
    # Another decoder in the file has a layer of the same number.
    named |= {f"mtp.layers.1.{DEEPSEEK_GATE}": ROUTER}
    block = open_block(publish(tmp_path, config, named), 1)
    assert block.prefix == f"{root}layers.1.{wrapper}"
    np.testing.assert_array_equal(
        read(block, "gate", WHOLE, WHOLE), tensors["model.layers.1." + DEEPSEEK_GATE].T
    )


@pytest.mark.parametrize("name", [
    "mtp.mlp.gate.weight", "mlp.gate.weight", "model.layers.one.mlp.gate.weight",
    "base_model.model.model.layers.1.mlp.gate.base_layer.weight",
    "transformer.h.1.mlp.experts.0.up_proj.weight",
])  # fmt: skip
@pytest.mark.parametrize("other_layer", [None, 3])
def test_other_names_are_listed(tmp_path, name, other_layer):
    config, tensors = deepseek_v3()
    named, layers = {name: ROUTER}, "no layer has one"
    if other_layer is not None:
        named |= renamed(tensors, "layers.1.", f"layers.{other_layer}.")
        layers = rf"layers \[{other_layer}\] have one"
    said = refused(tmp_path, config, named)
    assert re.search(f"a tensor model.layers.1.mlp.gate.weight.*{layers}", said)
    assert name in said or (other_layer and not name.endswith(DEEPSEEK_GATE))


# How the names in published files of model.safetensors.index.json at huggingface.co begin, by
# model_type, and whether the decoder is a part of a multimodal model.
PREFIXES = {
    ("qwen3_moe", False): "model.layers.1.",
    ("qwen3_moe", True): "language_model.model.layers.1.",
    ("qwen3_vl_moe_text", True): "model.language_model.layers.1.",
    ("llama4_text", True): "language_model.model.layers.1.",
    ("nemotron_h", False): "backbone.layers.1.",
    ("deepseek_v4", False): "layers.1.",
    ("dbrx", False): "transformer.blocks.1.",
    ("gemma4_text", True): "model.language_model.layers.1.",
    ("mistral_large4_text", True): "layers.1.",
    ("qwen3_omni_moe_talker_text", True): "talker.model.layers.1.",
}


@pytest.mark.parametrize("model_type", architectures())
@pytest.mark.parametrize("is_part", [False, True])
def test_names_of_a_new_block_are_as_published(tmp_path, model_type, is_part):
    config = config_of(model_type)
    if is_part:
        config = {"model_type": "of several media", "text_config": config}
    block = plan_block(publish(tmp_path, config), 1)
    assert block.prefix == PREFIXES.get((model_type, is_part), block.prefix)
    assert MoEConfig(**block.fields).num_experts == E and set(block.params()) >= {"wi_0", "wo"}
    assert set(block.params()) <= set(MoEParams._fields) == set(PARAMETER_AXES)
    dtypes = dict.fromkeys(block.params(), np.dtype(np.float32))
    others = dict.fromkeys(block.others(), np.zeros(1, np.float32))
    with adding(block.directory, "new.safetensors", block.new_tensors(dtypes, others)):
        pass
    assert open_block(tmp_path, 1).prefix == block.prefix
    assert plan_block(tmp_path, 1) is None and plan_block(tmp_path, 2).like == block.prefix


@pytest.mark.parametrize("neighbour, root", [
    ("{}layers.0.mlp.gate.weight", "base_model.model.model."),
    # This neighbouring layer has no experts.
    ("{}layers.0.mlp.gate_proj.weight", "model.language_model."),
    ("{}layers.1.self_attn.q_proj.weight", "module.language_model.model."),
])  # fmt: skip
def test_names_of_a_new_block_follow_its_neighbours(tmp_path, neighbour, root):
    config, block = deepseek_v3(layer=0)
    x = numbers(0, 2, config["hidden_size"])
    others = ("mtp.layers.1.mlp.gate.weight", "vision_tower.layers.1.norm.weight", "visual.norm")
    tensors = dict.fromkeys((*others, neighbour.format(root)), x)
    if neighbour.endswith("mlp.gate.weight"):
        tensors |= {name.replace("model.", root): array for name, array in block.items()}
    folder = publish(tmp_path, config, tensors, {"lm_head.weight": x})
    assert plan_block(folder, 1).prefix == f"{root}layers.1."


def test_the_layout_of_a_new_block_is_that_of_its_neighbours(tmp_path):
    for name in LAYOUTS:
        open_layout(tmp_path, name, "_orig_mod.model.")
        block = plan_block(tmp_path, 4)
        stored = block.new_tensors(dict.fromkeys(block.params(), np.dtype(np.float16)))
        there = [n for n in block.directory.files if "mlp" in n]
        assert sorted(stored) == sorted(n.replace("layers.3.", "layers.4.") for n in there)
        assert {dtype for dtype, _ in stored.values()} == {np.dtype(np.float16)}


def new_tensors(folder, config):
    """Returns the dtypes of a new block's tensors by name; the parameters are bfloat16."""
    block = plan_block(publish(folder, config, {}, {}), 1)
    stored = block.new_tensors(dict.fromkeys(block.params(), np.dtype(jnp.bfloat16)))
    return {name.removeprefix(block.prefix): str(dtype) for name, (dtype, _) in stored.items()}


def test_a_new_block_is_quantized_where_config_json_says_so(tmp_path):
    float8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    float8["modules_to_not_convert"] = ["lm_head", "shared_experts", "model.layers.1.mlp.experts.3"]
    float8 = {"quantization_config": float8}
    stored = new_tensors(tmp_path, deepseek_v3()[0] | float8)
    assert stored["mlp.experts.2.up_proj.weight"] == "float8_e4m3fn"
    for name in ("mlp.experts.3.up_proj", "mlp.shared_experts.up_proj", "mlp.gate"):
        assert stored[name + ".weight"] == "bfloat16"
        assert name + ".weight_scale_inv" not in stored
    assert stored["mlp.gate.e_score_correction_bias"] == "bfloat16"

    # Experts that are one tensor are several tensors in float8.
    config = config_of("qwen3_5_moe_text")
    assert "mlp.experts.gate_up_proj" in new_tensors(tmp_path, config)
    stored = new_tensors(tmp_path, config | float8)
    assert stored["mlp.experts.0.gate_proj.weight"] == "float8_e4m3fn"
    assert stored["mlp.shared_expert_gate.weight"] == "bfloat16"

    mxfp4 = {"hidden_size": 16, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(
        ValueError, match="gate_up_proj_blocks must have whole blocks of rows of 32"
    ):
        new_tensors(tmp_path, config_of("gpt_oss") | mxfp4)
