"""Tests the MoE blocks against those of the `transformers` package, loaded from its files.

`save_pretrained` saves a tiny random model of each kind, and its MoE block is loaded. The block
must give the same output and the same gradients of x and of every parameter, on eight ranks.
Torch's gradients are saved like a model, so that loading them gives the layer's shapes.
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
from support.meshes import expert_mesh, mesh
from support.published import E, F, H, K, contents, files_of, publish

import jax_ep
from jax_ep import checkpoints, formats
from jax_ep.checkpoints.block import open_block
from jax_ep.models import generation, published
from jax_ep.models.config import DecoderConfig
from jax_ep.models.decoder import Decoder, Params

WHY = (
    "compares with PyTorch and transformers, which are not installed: pip install '.[transformers]'"
)
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

LAYER = 1
pytestmark = pytest.mark.usefixtures("exact_matmuls")


class Variant(NamedTuple):
    """A kind of model in `transformers`.

    Attributes:
        config: arguments of the configuration, or of that of a multimodal model's decoder.
        block: returns the MoE block, a function of x, of a decoder layer.
        kind: the end of the name of the model's class, or the name of a class of another model.
        decoder: the attributes that lead to the decoder of a multimodal model.
        more: further arguments of a multimodal model's configuration.
        run: computes the block in JAX if the layer is only a part of it: a function of the layer,
            which is a function of x, of the block's other tensors, and of x.
    """

    name: str  # the model's class names before "Config" and `kind`
    config: dict[str, Any]
    block: Callable[[Any], Callable[[Any], Any]] = lambda layer: layer.mlp
    kind: str = "ForCausalLM"
    decoder: str = ""
    more: dict[str, Any] = {}
    run: Callable[[Any, dict[str, Any], Any], Any] = lambda layer, others, x: layer(x)

    def model_class(self) -> Any:
        return getattr(transformers, self.name + self.kind, None) or getattr(
            transformers, self.kind
        )

    def config_class(self) -> Any:
        whole = getattr(transformers, self.name + "Config")
        return whole if self.decoder else getattr(transformers, self.name + "TextConfig", whole)

    def model(self) -> tuple[Any, Any]:
        """Makes the model, and returns it and its decoder. Other parts are left out."""
        if not self.decoder:
            model = self.model_class()(self.config_class()(**self.config))
            return model, model.transformer if self.name == "Dbrx" else model.model
        with torch.device("meta"):
            model = self.model_class()(self.config_class()(text_config=self.config, **self.more))
        module = model
        for name in self.decoder.split("."):
            for other, _ in list(module.named_children()):
                if other not in (name, "lm_head"):
                    setattr(module, other, torch.nn.Identity())
            module = getattr(module, name)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.zero_()
        return model, module


def variant(name: str, *configs: dict[str, Any], **arguments: Any) -> Variant:
    """Makes a `Variant`; arguments that are none of its attributes belong to the configuration."""
    fields = {key: arguments.pop(key) for key in Variant._fields if key in arguments}
    config: dict[str, Any] = {}
    for each in (*configs, arguments):
        config |= each
    return Variant(name, config, **fields)


def feed_forward(layer):
    return layer.feed_forward


def granite_with_shared(layer):
    return lambda x: layer.block_sparse_moe(x) + layer.shared_mlp(x)


def without_norm(layer):
    """Returns A.X-K1's block without the norm of its output, which the block does not store."""
    layer.mlp.post_mlp_layernorm = torch.nn.Identity()
    return layer.mlp


TOKENS = np.arange(64).reshape(16, 4) % 16


def chosen_by_token(layer):
    return lambda x: layer.mlp(x, input_ids=torch.tensor(TOKENS))


def gemma(layer):
    def block(x):
        x = x.reshape(-1, H)
        _, weights, chosen = layer.router(x)
        return layer.experts(x, chosen, weights)

    return block


DOCS = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def documented(first_line, **names):
    """Returns the caller's part of a block: docs/checkpoints.md's program from `first_line` on."""
    lines = DOCS[DOCS.index(f"\n{first_line}") :]
    program = lines.partition("\n```")[0].partition("\n\n")[0]

    def run(layer, others, x):
        given = dict(layer=lambda *args, **call: (layer(*args, **call), None), others=others, x=x)
        scope = {"jax": jax, "jnp": jnp} | given | names
        exec(program, scope)
        return scope["y"]

    return run


def run_gemma(layer, others, x):
    # The test's block norms for its router what it gives the experts.
    return documented("# Gemma 4", h=x, rms_norm_eps=1e-6)(layer, others, x)


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
# The decoder of a multimodal model.
PART = dict(kind="ForConditionalGeneration", decoder="model.language_model")
OWN_WIDTH = EXPERTS | dict(moe_intermediate_size=F, intermediate_size=20)
ROUTED = SMALL | dict(n_routed_experts=E, moe_intermediate_size=F, intermediate_size=20)
GROUPS = ROUTED | dict(n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5)
ONE_GROUP = GROUPS | dict(n_group=1, topk_group=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
NUMBERED = GROUPS | LATENT | dict(num_experts=E, q_lora_rank=None)
GEMMA = OWN_WIDTH | dict(top_k_experts=K, head_dim=8)
COHERE = EXPERTS | dict(num_shared_experts=2, head_dim=8)
COHERE_SUM = dict(shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid")
SPARSE = dict(mlp_layer_types=["sparse"] * 2)
FULL = dict(layer_types=["full_attention"] * 2)
STEP = ROUTED | SPARSE | FULL | dict(share_expert_dim=20, head_dim=8, moe_router_scaling_factor=2.5)
WITH_SHARED = OWN_WIDTH | dict(shared_expert_intermediate_size=20)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2)
LINEAR |= FULL | dict(linear_key_head_dim=8, linear_value_head_dim=8, head_dim=8)
ROTARY = dict(rope_type="default", rope_theta=1000.0)
MULTIMODAL_ROTARY = dict(rope_parameters=ROTARY | dict(mrope_section=[2, 1, 1]))
INDEXED = GROUPS | LATENT | dict(index_n_heads=2, index_head_dim=8)
HUNYUAN_4 = INDEXED | dict(swiglu_limit=0.5)
DEEPSEEK_V4 = dict(layer_types=["sliding_attention"] * 2, head_dim=8, q_lora_rank=8, o_lora_rank=8)
DEEPSEEK_V4 |= ROUTED | dict(o_groups=2, swiglu_limit=0.5)
NEMOTRON = dict(layers_block_type=["moe"] * 2, moe_shared_expert_intermediate_size=20, head_dim=8)
NEMOTRON |= GROUPS
INKLING = dict(n_shared_experts=2, head_dim=8, route_scale=2.0)
LFM2 = OWN_WIDTH | dict(num_dense_layers=1, layer_types=["conv", "conv"])

VARIANTS = {
    "Mixtral": variant("Mixtral", LOCAL),
    "Phi-3.5-MoE": variant(
        "Phimoe", LOCAL, num_experts_per_tok=2, router_jitter_noise=0.2, head_dim=8
    ),
    "MiniMax-Text-01": variant("MiniMax", LOCAL),
    "MiniMax-M2": variant("MiniMaxM2", LOCAL),
    "Qwen3-MoE": variant("Qwen3Moe", OWN_WIDTH, norm_topk_prob=True),
    "Qwen3-MoE, not normalized": variant("Qwen3Moe", OWN_WIDTH, norm_topk_prob=False),
    "Mellum": variant("Mellum", OWN_WIDTH, head_dim=8),
    "GLM-4.5V": variant("Glm4vMoe", ONE_GROUP, MULTIMODAL_ROTARY, head_dim=8, **PART),
    "Qwen2-MoE": variant("Qwen2Moe", WITH_SHARED),
    "Qwen3-Next": variant("Qwen3Next", WITH_SHARED, LINEAR),
    "Qwen3.5-MoE": variant("Qwen3_5Moe", WITH_SHARED, LINEAR),
    "Qwen3-VL-MoE": variant("Qwen3VLMoe", OWN_WIDTH, MULTIMODAL_ROTARY, head_dim=8, **PART),
    "OLMoE": variant("Olmoe", EXPERTS),
    "FlexOlmo": variant("FlexOlmo", EXPERTS, norm_topk_prob=True),
    "DeepSeek-V2, greedy": variant("DeepseekV2", ROUTED, LATENT, routed_scaling_factor=2.0),
    "DeepSeek-V2": variant("DeepseekV2", GROUPS, LATENT, topk_method="group_limited_greedy"),
    "DeepSeek-V3": variant("DeepseekV3", GROUPS, LATENT, first_k_dense_replace=1),
    "Sarvam-105B": variant(
        "SarvamMLA", GROUPS, LATENT, first_k_dense_replace=1, kind="DeepseekV3ForCausalLM"
    ),
    "Sarvam-30B": variant("SarvamMoE", ONE_GROUP, head_dim=8, kind="Glm4MoeForCausalLM"),
    "A.X-K1": variant("AXK1", GROUPS, LATENT, block=without_norm),
    "A.X-K2": variant("AXK2", INDEXED),
    "A.X-K2, no groups": variant("AXK2", INDEXED, n_group=None, topk_group=None),
    "Beam": variant(
        "Beam", OWN_WIDTH, SPARSE, n_group=4, topk_group=2, head_dim=8, routed_scaling_factor=2.5
    ),
    "Bailing Hybrid": variant("BailingHybrid", NUMBERED, first_k_dense_replace=1, head_dim=8),
    "Kimi Linear": variant("KimiLinear", NUMBERED, linear_head_dim=8, linear_num_heads=2),
    "Dots 3 Note": variant(
        "Dots3Note",
        INDEXED,
        dict(shared_experts_intermediate_size=20, head_dim=16),
        **PART,
        more=dict(vision_config=dict(adapter_out_dim=H), audio_config=dict(adapter_out_dim=H)),
    ),
    "GLM-5-Next": variant(
        "Glm5Next",
        INDEXED | SPARSE | dict(qk_rope_head_dim=0, index_topk=16, index_kpool=4),
        dict(linear_head_dim=8, linear_num_heads=2, swiglu_limit=0.5),
        **PART,
    ),
    "Mistral Small 4": variant("Mistral4", GROUPS, LATENT, first_k_dense_replace=1),
    "Mistral Large 4": variant("MistralLarge4", INDEXED, **PART),
    "Lara Mini": variant("LaraMini", WITH_SHARED, LINEAR),
    "Flint": variant("Flint", WITH_SHARED, mlp_only_layers=[], head_dim=8),
    "Kolibri 1": variant("Kolibri1", WITH_SHARED, head_dim=8),
    "Qwen4 Experimental": variant(
        "Qwen4Exp", WITH_SHARED, LINEAR, layer_types=["linear_attention"] * 2
    ),
    "Qwen3-Omni, thinker": variant("Qwen3OmniMoeThinker", OWN_WIDTH, **PART),
    "Qwen3-Omni, talker": variant(
        "Qwen3OmniMoeTalker",
        WITH_SHARED,
        kind="ForConditionalGeneration",
        decoder="model",
        more=dict(spatial_merge_size=2),
    ),
    "MiniMax-M3": variant(
        "MiniMaxM3VL",
        LOCAL,
        dict(shared_intermediate_size=20, swiglu_limit=0.5, head_dim=8, rotary_dim=8),
        kind="MiniMaxM3SparseForConditionalGeneration",
        decoder="model.language_model",
    ),
    "Hunyuan 4": variant("HYV4", HUNYUAN_4),
    "Hunyuan 4, multimodal": variant("HYV4VL", HUNYUAN_4, MULTIMODAL_ROTARY, **PART),
    "Laguna": variant("Laguna", WITH_SHARED, head_dim=8, moe_routed_scaling_factor=2.5),
    "Laguna, softcapped": variant(
        "Laguna", WITH_SHARED, head_dim=8, moe_router_logit_softcapping=0.7
    ),
    "Cohere2-MoE, average": variant("Cohere2Moe", COHERE),
    "Cohere2-MoE, sum": variant("Cohere2Moe", COHERE, COHERE_SUM),
    "Cohere2-MoE, no shared experts": variant("Cohere2Moe", COHERE, num_shared_experts=0),
    "Step-3.7": variant("Step3p7", STEP, **PART),
    "Step-3.7, clamped": variant(
        "Step3p7", STEP, swiglu_limits=[0.0, 0.5], swiglu_limits_shared=[0.0, 0.8], **PART
    ),
    "Step-3.7, routed experts clamped": variant("Step3p7", STEP, swiglu_limits=[0.0, 0.5], **PART),
    "DBRX": variant(
        "Dbrx",
        dict(d_model=H, n_heads=2, n_layers=2, vocab_size=16),
        dict(ffn_config=dict(ffn_hidden_size=F, moe_num_experts=E, moe_top_k=K)),
        dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1000.0)),
        block=lambda layer: layer.ffn,
    ),
    "Granite MoE, sliding windows": variant(
        "GraniteMoeSWA", LOCAL, shared_intermediate_size=20, block=granite_with_shared
    ),
    "DeepSeek-OCR 2": variant("DeepseekOcr2", ROUTED, SPARSE, **PART),
    "Unlimited OCR": variant(
        "UnlimitedOcr",
        ROUTED | SPARSE | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2),
        dict(routed_scaling_factor=16.0),
        **PART,
    ),
    "OpenAI Privacy Filter": variant(
        "OpenAIPrivacyFilter", LOCAL, head_dim=8, kind="ForTokenClassification"
    ),
    "DeepSeek-V3.2": variant("DeepseekV32", INDEXED, first_k_dense_replace=1),
    "GLM-4.5": variant("Glm4Moe", ONE_GROUP),
    "GLM-4.7-Flash": variant("Glm4MoeLite", ONE_GROUP, LATENT),
    "GLM-5": variant("GlmMoeDsa", INDEXED, ONE_GROUP, first_k_dense_replace=1),
    "dots.llm1": variant("Dots1", ONE_GROUP, first_k_dense_replace=1),
    "Solar Open": variant("SolarOpen", ONE_GROUP),
    "MiMo-V2-Flash": variant("MiMoV2Flash", ONE_GROUP, n_shared_experts=None, head_dim=8),
    "DeepSeek-V4": variant("DeepseekV4", DEEPSEEK_V4, mlp_layer_types=["moe"] * 2),
    "DeepSeek-V4, chosen by token": variant(
        "DeepseekV4",
        DEEPSEEK_V4 | dict(mlp_layer_types=["hash_moe"] * 2),
        block=chosen_by_token,
        run=documented("# DeepSeek-V4", tokens=TOKENS),
    ),
    "Nemotron-H, latent experts": variant(
        "NemotronH",
        NEMOTRON,
        moe_latent_size=8,
        block=lambda layer: layer.mixer,
        run=documented("# Nemotron-H"),
    ),
    "Gemma 4": variant(
        "Gemma4",
        GEMMA,
        dict(enable_moe_block=True, hidden_size_per_layer_input=0),
        block=gemma,
        run=run_gemma,
    ),
    "DiffusionGemma": variant(
        "DiffusionGemma",
        GEMMA,
        block=gemma,
        kind="ForBlockDiffusion",
        decoder="model.decoder",
        run=run_gemma,
    ),
    "JetMoE": variant("JetMoe", LOCAL, kv_channels=8, run=documented("# JetMoE.")),
    "Inkling": variant(
        "Inkling",
        ROUTED,
        SPARSE,
        INKLING,
        run=documented("logits =", num_experts=E, k=K, route_scale=2.0),
        **PART,
    ),
    "Nemotron-H": variant("NemotronH", NEMOTRON, block=lambda layer: layer.mixer),
    "Hunyuan 3": variant("HYV3", OWN_WIDTH, num_shared_experts=2, head_dim=8),
    "AFMoE": variant("Afmoe", OWN_WIDTH, num_dense_layers=1, route_scale=2.0, head_dim=8),
    "Aria": variant("AriaText", SMALL, moe_num_experts=E, moe_topk=K),
    "EXAONE-MoE": variant("ExaoneMoe", OWN_WIDTH, num_shared_experts=2, routed_scaling_factor=2.5),
    "Granite MoE": variant("GraniteMoe", LOCAL, block=lambda layer: layer.block_sparse_moe),
    "Granite MoE, shared": variant(
        "GraniteMoeShared", LOCAL, shared_intermediate_size=20, block=granite_with_shared
    ),
    "Granite 4.0": variant(
        "GraniteMoeHybrid",
        LOCAL,
        dict(shared_intermediate_size=20, layer_types=["full_attention"] * 2, mamba_n_heads=2),
        block=granite_with_shared,
    ),
    "GPT-OSS": variant("GptOss", LOCAL, head_dim=8),
    "Llama 4": variant("Llama4", LOCAL, num_experts_per_tok=1, head_dim=8, block=feed_forward),
    "Llama 4, three experts": variant("Llama4", LOCAL, head_dim=8, block=feed_forward),
    "ERNIE 4.5": variant(
        "Ernie4_5_Moe",
        SMALL,
        dict(moe_num_experts=E, moe_k=K, moe_intermediate_size=F, intermediate_size=20),
    ),
    "Hunyuan-A13B": variant("HunYuanMoEV1", EXPERTS, moe_topk=K, head_dim=8),
    "LFM2-MoE": variant("Lfm2Moe", LFM2, block=feed_forward),
    "LFM2-MoE, no bias": variant("Lfm2Moe", LFM2, use_expert_bias=False, block=feed_forward),
    "LongCat-Flash": variant(
        "LongcatFlash",
        {name: value for name, value in SMALL.items() if name != "num_hidden_layers"},
        LATENT,
        dict(num_layers=2, n_routed_experts=E, zero_expert_num=4, expert_ffn_hidden_size=F),
        dict(routed_scaling_factor=2.0),
    ),
    "Jamba": variant(
        "Jamba", EXPERTS, attn_layer_period=2, attn_layer_offset=1, block=feed_forward
    ),
}


class Expected(NamedTuple):
    """What Torch computes with a model's MoE block, to compare with."""

    folder: Any
    gradients: Any  # a folder with the gradients of the model's parameters, saved like a model
    x: np.ndarray
    cotangent: np.ndarray
    out: np.ndarray
    dx: np.ndarray


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Callable[[str], Expected]:
    """Returns a function that makes a variant's `Expected`, once for all tests."""

    @functools.cache
    def make(name: str) -> Expected:
        torch.manual_seed(0)
        variant = VARIANTS[name]
        model, decoder = variant.model()
        model.float().eval()
        layer = (decoder.blocks if variant.name == "Dbrx" else decoder.layers)[LAYER]
        for name_of_tensor, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if not tensor.is_floating_point():
                tensor.data = torch.stack([torch.randperm(E)[:K] for _ in tensor])
                continue
            # Weights keep the scale of x, logits differ clearly, and biases are large enough to
            # matter.
            scale = 1.0 if "scale" in name_of_tensor else 0.3
            tensor.data.normal_(std=tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else scale)
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


@functools.partial(jax.jit, static_argnames=("config", "run"))
def output_and_gradients(params, others, x, cotangent, config, run):
    """Returns the block's output, and the gradients of sum(output * cotangent)."""

    def product(params, others, x):
        out = run(lambda x, **kw: jax_ep.moe_layer(params, x, config, **kw)[0], others, x)
        return jnp.sum(out * cotangent), out

    (_, out), grads = jax.value_and_grad(product, (0, 1, 2), has_aux=True, allow_int=True)(
        params, others, x
    )
    return out, *grads


# That a layer gives the same on all meshes is tested in tests/moe.
@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_every_gradient(expected, name):
    want = expected(name)
    on = mesh((4, 2), ("expert", "tensor"))
    config, params = checkpoints.load_moe_params(
        want.folder, LAYER, mesh=on, partial=True, tensor_axis="tensor"
    )
    _, dparams_want = checkpoints.load_moe_params(want.gradients, LAYER, partial=True)
    others = checkpoints.load_others(want.folder, LAYER)
    run = VARIANTS[name].run
    with jax.set_mesh(on):
        got = output_and_gradients(params, others, want.x, want.cotangent, config, run)
    out, dparams, dothers, dx = jax.tree.map(np.asarray, got)
    assert np.abs(want.out).mean() > 0.1
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(out, want.out, err_msg="output")
    close(dx, want.dx, err_msg="gradient of x")
    for param, gradient in dparams._asdict().items():
        if param != "bias" and gradient is not None:
            assert np.abs(gradient).mean() > 1e-3
            close(gradient, getattr(dparams_want, param), err_msg=f"gradient of {param}")
    for tensor, gradient in checkpoints.load_others(want.gradients, LAYER).items():
        if tensor not in ("ffn.gate.tid2eid", "mlp.gate.bias"):
            assert np.abs(dothers[tensor]).mean() > 1e-3
            close(dothers[tensor], gradient, err_msg=f"gradient of {tensor}")


@pytest.mark.parametrize("name", VARIANTS)
def test_loaded_and_saved_is_the_same_byte_for_byte(expected, name):
    folder = expected(name).folder
    before = files_of(folder)
    layer = checkpoints.load_moe(folder, LAYER, partial=True)
    checkpoints.save_moe(layer, folder, LAYER, others=checkpoints.load_others(folder, LAYER))
    assert files_of(folder) == before


# transformers gives the identity experts of LongCat-Flash matrices, which are not published. A new
# directory does not tell that a layer of DeepSeek-V4 chooses experts by the token's id, nor that
# transformers saves Hunyuan 4's shared experts under other names than it loads, the experts of
# Qwen3-Omni's talker in one tensor, where published ones have one for each, and those of
# Qwen3-VL-MoE transposed.
NOT_NEW = (
    *("LongCat-Flash", "DeepSeek-V4, chosen by token"),
    *("Hunyuan 4, multimodal", "Qwen3-Omni, talker", "Qwen3-VL-MoE"),
)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in NOT_NEW])
def test_a_block_in_a_new_directory_is_read_by_transformers(expected, tmp_path, name):
    """A block saved with only config.json must be found by transformers, every weight equal."""
    folder = expected(name).folder
    shutil.copy(folder / "config.json", tmp_path)
    layer = checkpoints.load_moe(folder, LAYER, partial=True)
    checkpoints.save_moe(layer, tmp_path, LAYER, others=checkpoints.load_others(folder, LAYER))
    if VARIANTS[name].decoder:
        # transformers would make the parts that the folder lacks, such as a large vision tower. The
        # names are compared without the root, which a part alone lacks.
        stored, published = open_block(tmp_path, LAYER), open_block(folder, LAYER)
        names = [[n.removeprefix(b.prefix) for n in b.stored()] for b in (stored, published)]
        assert names[0] == names[1]
        got, want = contents(tmp_path), contents(folder)
        for key in names[0]:
            np.testing.assert_array_equal(got[stored.prefix + key], want[published.prefix + key])
        return
    kind = VARIANTS[name].model_class()
    config = VARIANTS[name].config_class().from_pretrained(folder)
    model, info = kind.from_pretrained(tmp_path, config=config, output_loading_info=True)
    want = kind.from_pretrained(folder, config=config).state_dict()
    assert not info["unexpected_keys"]
    new = set(want) - set(info["missing_keys"])
    new = {key for key in new if f".{LAYER}." in key}
    assert any("expert" in key or "input_linear" in key for key in new)
    assert any("gate" in key or "router" in key for key in new)
    for key in new:
        torch.testing.assert_close(model.state_dict()[key], want[key], rtol=0, atol=0)


# ---------------------------------------------------------- a whole model, decoded and trained

DECODED = dict(head_dim=16, num_attention_heads=4, vocab_size=64)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=8.0, original_max_position_embeddings=16)
# GPT-OSS has attention sinks, biases on all projections, and here a window below the prompt length.
WHOLE = {
    "Qwen3-MoE": variant(
        "Qwen3Moe", OWN_WIDTH, DECODED, norm_topk_prob=True, rope_parameters=ROTARY
    ),
    "Qwen3-MoE, tied": variant(
        "Qwen3Moe", OWN_WIDTH, DECODED, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "GPT-OSS": variant(
        "GptOss",
        LOCAL | DECODED | dict(sliding_window=5, max_position_embeddings=128),
        rope_parameters=YARN | dict(truncate=False),
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


@pytest.mark.parametrize("batch", [8, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_a_model_decodes_as_transformers_does(tmp_path, name, batch):
    """The decoder must give the logits and greedy tokens of transformers.

    Prompts have several lengths, prefill is chunked, and both decoding loops are tested.
    """
    model = whole_model(name, tmp_path)
    length, steps = 13, 7
    prompts = [row[i % 4 :] for i, row in enumerate(torch.randint(64, (batch, length)).tolist())]
    tokens, mask = generation.padded(prompts)
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
    on_mesh = expert_mesh(8)
    with jax.set_mesh(on_mesh):
        config, loaded = published.load_decoder(tmp_path, on_mesh, np.float32)
        config, sampling = config.replace(stop_tokens=()), generation.Sampling()
        cache = generation.empty_cache(config, batch, 15 + steps, np.float32, on_mesh)
        logits, cache = generation.prefill(config, loaded, tokens, mask, cache, 5)
        state = generation.begin(config, sampling, logits, cache, steps)
        all_logits = [logits]
        for _ in range(steps - 1):
            state, logits, _ = generation.step(config, sampling, loaded, state)
            all_logits.append(logits)
    for got, logits in zip(all_logits, want.logits, strict=True):
        np.testing.assert_allclose(got, logits.numpy(), rtol=1e-4, atol=1e-4)
    assert np.std(all_logits[0]) > 0.3 and len(np.unique(sequences)) > 3
    assert np.asarray(state.tokens).tolist() == sequences
    found, *_ = generation.generate(config, loaded, prompts, steps, mesh=on_mesh, chunk=5)
    assert found == sequences


@pytest.mark.parametrize("name", WHOLE)
def test_the_trained_model_is_that_of_transformers_before_and_after_its_export(tmp_path, name):
    """Logits, and gradients of attention and embedding, must be those of transformers.

    transformers must load what is exported, with the same logits.
    """
    model = whole_model(name, tmp_path / "one")
    # The embedding of the padding token, 0, gets no gradient in transformers.
    tokens = torch.randint(1, 64, (4, 13))
    want = model(tokens[:, :-1], labels=None).logits
    loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    on_mesh = mesh((2, 2), ("data", "expert"))
    with jax.set_mesh(on_mesh):
        read = json.loads((tmp_path / "one" / "config.json").read_text())
        config = DecoderConfig.of(read)
        params = published.load_params(tmp_path / "one", config, on_mesh, jnp.float32)
        decoder = Decoder(config=config, dtype=jnp.float32)
        inputs, targets = np.array(tokens[:, :-1]), np.array(tokens[:, 1:])
        got, _ = jax.jit(decoder.logits)(params, inputs)
        np.testing.assert_allclose(got, want.detach(), rtol=1e-4, atol=1e-4)
        grad = jax.jit(jax.grad(lambda params: decoder.loss(params, inputs, targets)[0]))
        grads: Params = grad(params)
    gradients = {key: value.grad for key, value in model.named_parameters()}
    for key, value in grads.weights.items():
        np.testing.assert_allclose(value, gradients[key], rtol=1e-3, atol=1e-5, err_msg=key)
    published.save_params(tmp_path / "two", read, params)
    again, info = type(model).from_pretrained(tmp_path / "two", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(again(tokens[:, :-1]).logits, want, rtol=1e-5, atol=1e-5)


def quantized(folder: Path, into: Path, method: str) -> None:
    """Writes a copy of a checkpoint, quantized as published ones are by "fp8" or "mxfp4"."""
    tensors = {}
    for name, values in contents(folder).items():
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
    on_mesh, mask = expert_mesh(1), np.ones((4, 11), np.bool_)
    with jax.set_mesh(on_mesh):
        config, loaded = published.load_decoder(tmp_path / "quantized", on_mesh, np.float32)
        cache = generation.empty_cache(config, 4, 11, np.float32, on_mesh)
        got, _ = generation.prefill(config, loaded, tokens.numpy(), mask, cache, 11)
    largest = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-6 * largest)
    # The unquantized weights give other logits, so the quantized ones were read.
    assert np.abs(plain.logits[:, -1].numpy() - want).max() > 2**-6 * largest
