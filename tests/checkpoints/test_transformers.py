"""Tests the MoE blocks against those of the `transformers` package, loaded from its files.

`save_pretrained` saves a tiny random model of each kind, and its MoE block is loaded. The block
must give the same output and the same gradients of x and of every parameter, on one rank and on
several. Torch's gradients are saved like a model, so that loading them gives the layer's shapes.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.examples import example
from support.meshes import expert_mesh, mesh
from support.published import E, F, H, K, publish
from support.selection import quick

import jax_ep
from jax_ep import checkpoints, formats
from jax_ep.checkpoints.safetensors import Directory

WHY = (
    "compares with PyTorch and transformers, which are not installed: pip install '.[transformers]'"
)
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

LAYER = 1
MESHES = {"one rank": (1,), "two ranks": (2,), "eight ranks": (8,), "4 x 2": (4, 2)}


class Variant(NamedTuple):
    """A kind of model in `transformers`.

    Attributes:
        name: the model's class names before "Config" and "ForCausalLM".
        config: arguments of the configuration.
        block: returns the MoE block, a function of x, of a decoder layer.
    """

    name: str
    config: dict[str, Any]
    block: Callable[[Any], Callable[[Any], Any]] = lambda layer: layer.mlp


def feed_forward(layer):
    return layer.feed_forward


def granite_with_shared(layer):
    return lambda x: layer.block_sparse_moe(x) + layer.shared_mlp(x)


SMALL = dict(
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=16,
    pad_token_id=0,
    num_experts_per_tok=K,
)
LOCAL = SMALL | dict(num_local_experts=E)
EXPERTS = SMALL | dict(num_experts=E)
OWN_WIDTH = EXPERTS | dict(moe_intermediate_size=F, intermediate_size=20)
ROUTED = SMALL | dict(n_routed_experts=E, moe_intermediate_size=F, intermediate_size=20)
GROUPS = ROUTED | dict(n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5)
ONE_GROUP = GROUPS | dict(n_group=1, topk_group=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
LINEAR = dict(
    layer_types=["full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    head_dim=8,
)
ROTARY = dict(rope_type="default", rope_theta=1000.0)
INDEXER = dict(index_n_heads=2, index_head_dim=8)

VARIANTS = {
    "Mixtral": Variant("Mixtral", LOCAL),
    "Phi-3.5-MoE": Variant(
        "Phimoe", LOCAL | dict(num_experts_per_tok=2, router_jitter_noise=0.2, head_dim=8)
    ),
    "MiniMax-Text-01": Variant("MiniMax", LOCAL),
    "MiniMax-M2": Variant("MiniMaxM2", LOCAL),
    "Qwen3-MoE": Variant("Qwen3Moe", OWN_WIDTH | dict(norm_topk_prob=True)),
    "Qwen3-MoE, not normalized": Variant("Qwen3Moe", OWN_WIDTH | dict(norm_topk_prob=False)),
    "Qwen2-MoE": Variant("Qwen2Moe", OWN_WIDTH | dict(shared_expert_intermediate_size=20)),
    "Qwen3-Next": Variant(
        "Qwen3Next", OWN_WIDTH | LINEAR | dict(shared_expert_intermediate_size=20)
    ),
    "Qwen3.5-MoE": Variant(
        "Qwen3_5Moe", OWN_WIDTH | LINEAR | dict(shared_expert_intermediate_size=20)
    ),
    "OLMoE": Variant("Olmoe", EXPERTS),
    "FlexOlmo": Variant("FlexOlmo", EXPERTS | dict(norm_topk_prob=True)),
    "DeepSeek-V2, greedy": Variant("DeepseekV2", ROUTED | LATENT | dict(routed_scaling_factor=2.0)),
    "DeepSeek-V2": Variant(
        "DeepseekV2", GROUPS | LATENT | dict(topk_method="group_limited_greedy")
    ),
    "DeepSeek-V3": Variant("DeepseekV3", GROUPS | LATENT | dict(first_k_dense_replace=1)),
    "DeepSeek-V3.2": Variant(
        "DeepseekV32", GROUPS | LATENT | INDEXER | dict(first_k_dense_replace=1)
    ),
    "GLM-4.5": Variant("Glm4Moe", ONE_GROUP),
    "GLM-4.7-Flash": Variant("Glm4MoeLite", ONE_GROUP | LATENT),
    "GLM-5": Variant("GlmMoeDsa", ONE_GROUP | LATENT | INDEXER | dict(first_k_dense_replace=1)),
    "dots.llm1": Variant("Dots1", ONE_GROUP | dict(first_k_dense_replace=1)),
    "Solar Open": Variant("SolarOpen", ONE_GROUP),
    "MiMo-V2-Flash": Variant("MiMoV2Flash", ONE_GROUP | dict(n_shared_experts=None, head_dim=8)),
    "DeepSeek-V4": Variant(
        "DeepseekV4",
        ROUTED
        | dict(
            mlp_layer_types=["moe"] * 2,
            layer_types=["sliding_attention"] * 2,
            head_dim=8,
            q_lora_rank=8,
            o_lora_rank=8,
            o_groups=2,
            swiglu_limit=0.5,
        ),
    ),
    "Nemotron-H": Variant(
        "NemotronH",
        GROUPS
        | dict(layers_block_type=["moe"] * 2, moe_shared_expert_intermediate_size=20, head_dim=8),
        lambda layer: layer.mixer,
    ),
    "Hunyuan 3": Variant("HYV3", OWN_WIDTH | dict(num_shared_experts=2, head_dim=8)),
    "AFMoE": Variant("Afmoe", OWN_WIDTH | dict(num_dense_layers=1, route_scale=2.0, head_dim=8)),
    "Aria": Variant("AriaText", SMALL | dict(moe_num_experts=E, moe_topk=K)),
    "EXAONE-MoE": Variant(
        "ExaoneMoe", OWN_WIDTH | dict(num_shared_experts=2, routed_scaling_factor=2.5)
    ),
    "Granite MoE": Variant("GraniteMoe", LOCAL, lambda layer: layer.block_sparse_moe),
    "Granite MoE, shared": Variant(
        "GraniteMoeShared", LOCAL | dict(shared_intermediate_size=20), granite_with_shared
    ),
    "Granite 4.0": Variant(
        "GraniteMoeHybrid",
        LOCAL
        | dict(shared_intermediate_size=20, layer_types=["full_attention"] * 2, mamba_n_heads=2),
        granite_with_shared,
    ),
    "GPT-OSS": Variant("GptOss", LOCAL | dict(head_dim=8)),
    "Llama 4": Variant("Llama4", LOCAL | dict(num_experts_per_tok=1, head_dim=8), feed_forward),
    "Llama 4, three experts": Variant("Llama4", LOCAL | dict(head_dim=8), feed_forward),
    "ERNIE 4.5": Variant(
        "Ernie4_5_Moe",
        SMALL | dict(moe_num_experts=E, moe_k=K, moe_intermediate_size=F, intermediate_size=20),
    ),
    "Hunyuan-A13B": Variant("HunYuanMoEV1", EXPERTS | dict(moe_topk=K, head_dim=8)),
    "LFM2-MoE": Variant(
        "Lfm2Moe", OWN_WIDTH | dict(num_dense_layers=1, layer_types=["conv", "conv"]), feed_forward
    ),
    "LFM2-MoE, no bias": Variant(
        "Lfm2Moe",
        OWN_WIDTH | dict(num_dense_layers=1, layer_types=["conv", "conv"], use_expert_bias=False),
        feed_forward,
    ),
    "LongCat-Flash": Variant(
        "LongcatFlash",
        {name: value for name, value in SMALL.items() if name != "num_hidden_layers"}
        | LATENT
        | dict(num_layers=2, n_routed_experts=E, zero_expert_num=4, expert_ffn_hidden_size=F)
        | dict(routed_scaling_factor=2.0),
    ),
    "Jamba": Variant(
        "Jamba", EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1), feed_forward
    ),
}


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("float32"):
        yield


class Expected(NamedTuple):
    """What Torch computes with a model's MoE block, to compare with.

    Attributes:
        folder: the saved model.
        gradients: the gradients of the model's parameters, saved like a model.
        x: the input of the block.
        cotangent: the cotangent of the output.
        out: the output.
        dx: the gradient of x.
    """

    folder: Any
    gradients: Any
    x: np.ndarray
    cotangent: np.ndarray
    out: np.ndarray
    dx: np.ndarray


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Callable[[str], Expected]:
    """Returns a function that makes a variant's `Expected`, once for all meshes."""

    @functools.cache
    def make(name: str) -> Expected:
        torch.manual_seed(0)
        variant = VARIANTS[name]
        for kind in ("Config", "TextConfig"):
            if hasattr(transformers, variant.name + kind):
                config = getattr(transformers, variant.name + kind)(**variant.config)
        model = getattr(transformers, variant.name + "ForCausalLM")(config).float().eval()
        layer = model.model.layers[LAYER]
        for tensor in (*layer.parameters(), *layer.buffers()):
            # Weights keep the scale of x, logits differ clearly, and biases are large enough to
            # matter.
            scale = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
            tensor.data.normal_(std=scale)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)

        x = torch.randn(16, 4, H).requires_grad_()
        # 8 is the square root of the number of tokens, which makes gradients of size 1.
        cotangent = torch.randn(16, 4, H) / 8
        out = variant.block(layer)(x)
        out = (out[0] if isinstance(out, tuple) else out).reshape(x.shape)
        out.backward(cotangent)
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
        gradients = tmp_path_factory.mktemp("gradients")
        model.save_pretrained(gradients)
        arrays = (tensor.detach().numpy() for tensor in (x, cotangent, out, x.grad))
        return Expected(folder, gradients, *arrays)

    return make


@functools.partial(jax.jit, static_argnames="config")
def output_and_gradients(params, x, cotangent, config):
    """Returns the block's output, and the gradients of sum(output * cotangent)."""

    def product(params, x):
        out, _ = jax_ep.moe_layer(params, x, config)
        return jnp.sum(out * cotangent), out

    (_, out), grads = jax.value_and_grad(product, (0, 1), has_aux=True)(params, x)
    return out, *grads


@pytest.mark.parametrize("shape", quick(MESHES, "4 x 2", unpack=False))
@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_every_gradient(expected, name, shape):
    want = expected(name)
    axes = ("expert", "tensor")[: len(shape)]
    split = {"tensor_axis": "tensor"} if "tensor" in axes else {}
    config, params = checkpoints.load_moe_params(
        want.folder, LAYER, mesh=mesh(shape, axes), **split
    )
    _, dparams_want = checkpoints.load_moe_params(want.gradients, LAYER)
    got = output_and_gradients(params, want.x, want.cotangent, config)
    out, dparams, dx = jax.tree.map(np.asarray, got)
    assert np.abs(want.out).mean() > 0.1
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(out, want.out, err_msg="output")
    close(dx, want.dx, err_msg="gradient of x")
    for param, gradient in dparams._asdict().items():
        if param != "bias" and gradient is not None:
            assert np.abs(gradient).mean() > 1e-3
            close(gradient, getattr(dparams_want, param), err_msg=f"gradient of {param}")


@pytest.mark.parametrize("name", VARIANTS)
def test_loaded_and_saved_is_the_same_byte_for_byte(expected, name):
    folder = expected(name).folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    layer = checkpoints.load_moe(folder, LAYER)
    checkpoints.save_moe(layer, folder, LAYER)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# transformers gives the identity experts of LongCat-Flash matrices, which are not published.
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "LongCat-Flash"])
def test_a_block_in_a_new_directory_is_read_by_transformers(expected, tmp_path, name):
    """A block saved with only config.json must be found by transformers, every weight equal."""
    folder = expected(name).folder
    shutil.copy(folder / "config.json", tmp_path)
    checkpoints.save_moe(checkpoints.load_moe(folder, LAYER), tmp_path, LAYER)
    kind = getattr(transformers, VARIANTS[name].name + "ForCausalLM")
    model, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    want = kind.from_pretrained(folder).state_dict()
    assert not info["unexpected_keys"]
    new = set(want) - set(info["missing_keys"])
    new = {key for key in new if f".{LAYER}." in key}
    assert any("expert" in key or "input_linear" in key for key in new)
    assert any("gate" in key or "router" in key for key in new)
    for key in new:
        torch.testing.assert_close(model.state_dict()[key], want[key], rtol=0, atol=0)


# -------------------------------------------------------------- a whole model, run by the example

DECODED = dict(head_dim=16, num_attention_heads=4, vocab_size=64)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=8.0, original_max_position_embeddings=16)
# GPT-OSS has attention sinks, biases on all projections, and here a window below the prompt length.
WHOLE = {
    "Qwen3-MoE": Variant(
        "Qwen3Moe", OWN_WIDTH | DECODED | dict(norm_topk_prob=True, rope_parameters=ROTARY)
    ),
    "Qwen3-MoE, tied": Variant(
        "Qwen3Moe",
        OWN_WIDTH | DECODED | dict(tie_word_embeddings=True, rope_parameters=YARN),
    ),
    "GPT-OSS": Variant(
        "GptOss",
        LOCAL
        | DECODED
        | dict(sliding_window=5, max_position_embeddings=128)
        | dict(rope_parameters=YARN | dict(truncate=False)),
    ),
}


def whole_model(name: str, folder: Path, **sizes: int) -> Any:
    """Makes and saves a model whose random norms, biases and matrices all affect the logits."""
    torch.manual_seed(1)
    config = getattr(transformers, WHOLE[name].name + "Config")(**(WHOLE[name].config | sizes))
    model = getattr(transformers, WHOLE[name].name + "ForCausalLM")(config).float().eval()
    for key, parameter in model.named_parameters():
        if "norm" in key:
            parameter.data.uniform_(0.5, 1.5)
        elif parameter.ndim > 1 and "bias" not in key:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("batch, stack", [(8, False), (3, True)])
@pytest.mark.parametrize("name", WHOLE)
def test_the_example_decodes_as_transformers_does(tmp_path, name, batch, stack):
    """The example's decoder must give the logits and greedy tokens of transformers.

    Prompts have several lengths, prefill is chunked, and both decoding loops are tested.
    """
    decoder, program = example("decoder"), example("decode_qwen3_moe")
    model = whole_model(name, tmp_path)
    length, steps = 13, 7
    prompts = [row[i % 4 :] for i, row in enumerate(torch.randint(64, (batch, length)).tolist())]
    tokens, mask = decoder.padded(prompts)
    want = model.generate(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask).long(),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=-1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sequences = want.sequences[:, length:].tolist()
    config, loaded = decoder.load_model(tmp_path, expert_mesh(8), np.float32, stack=stack)
    config, sampling = config._replace(stop_tokens=()), decoder.Sampling()
    cache = decoder.empty_cache(config, loaded, batch, 15 + steps, np.float32)
    logits, cache = decoder.prefill(config, loaded, tokens, mask, cache, 5)
    state = decoder.begin(config, sampling, logits, cache, steps)
    all_logits = [logits]
    for _ in range(steps - 1):
        state, logits, _ = decoder.step(config, sampling, loaded, state)
        all_logits.append(logits)
    for got, logits in zip(all_logits, want.logits, strict=True):
        np.testing.assert_allclose(got, logits.numpy(), rtol=1e-4, atol=1e-4)
    assert np.std(all_logits[0]) > 0.3 and len(np.unique(sequences)) > 3
    assert np.asarray(state.tokens).tolist() == sequences
    found, *_ = program.generate(config, loaded, prompts, steps, chunk=5)
    assert found == sequences


def quantized(folder: Path, into: Path, method: str) -> None:
    """Writes a copy of a checkpoint, quantized as published ones are.

    "fp8" quantizes all matrices of the layers to float8, "mxfp4" those of the experts.
    """
    files, tensors = Directory(folder), {}
    for name in files.files:
        values = files.read(name, (slice(None),) * len(files.entry(name).shape))
        if method == "fp8" and "_proj.weight" in name:
            format = formats.Float8.of(np.dtype(jnp.float8_e4m3fn), (128, 128), np.float32)
            rows, columns = values.shape
            padding = [(0, -rows % 128), (0, -columns % 128)]
            numbers, scales = format.encode(np.pad(values, padding))
            tensors[name] = numbers[:rows, :columns]
            tensors[name + "_scale_inv"] = scales
        elif method == "mxfp4" and name.endswith("_proj") and "experts" in name:
            numbers, scales = formats.MXFP4.encode(values.swapaxes(1, 2))
            tensors[name + "_blocks"] = numbers.reshape(*scales.shape, 16)
            tensors[name + "_scales"] = scales.view(np.uint8)
        else:
            tensors[name] = values.astype(jnp.bfloat16)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    said = {"quant_method": method}
    if method == "fp8":
        said |= {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    publish(into, config | {"quantization_config": said}, tensors)


@pytest.mark.parametrize("name, method", [("Qwen3-MoE", "fp8"), ("GPT-OSS", "mxfp4")])
def test_quantized_directories_give_the_logits_of_transformers_dequantized(tmp_path, name, method):
    decoder = example("decoder")
    sizes = dict(hidden_size=64, intermediate_size=32)
    if method == "fp8":
        # The size is such that gate and up have whole blocks of 128 rows each: transformers
        # quantizes them separately, though it stores them as one matrix.
        sizes |= dict(moe_intermediate_size=256)
    whole_model(name, tmp_path / "plain", **sizes)
    quantized(tmp_path / "plain", tmp_path / "quantized", method)
    kind = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}[method]
    model = getattr(transformers, WHOLE[name].name + "ForCausalLM").from_pretrained(
        tmp_path / "quantized", quantization_config=getattr(transformers, kind)(dequantize=True)
    )
    tokens = torch.randint(64, (4, 11))
    with torch.no_grad():
        want = model.float()(tokens).logits[:, -1].numpy()
        plain = type(model).from_pretrained(tmp_path / "plain").float()(tokens)
    config, loaded = decoder.load_model(tmp_path / "quantized", expert_mesh(1), np.float32)
    cache = decoder.empty_cache(config, loaded, 4, 11, np.float32)
    mask = np.ones((4, 11), np.bool_)
    got, _ = decoder.prefill(config, loaded, tokens.numpy(), mask, cache, 11)
    largest = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-6 * largest)
    # The unquantized weights give other logits, so the quantized ones were read.
    assert np.abs(plain.logits[:, -1].numpy() - want).max() > 2**-6 * largest
