"""Lists published models in a table: their router options, and where each weight is stored.

Letters name the axes of a stored tensor: E is the number of experts, R of experts that the router
chooses among (free experts included), H the hidden size, F the hidden size of an expert, S that of
the shared experts together, and 1 an axis of one element. G with F is one axis of both wi_0 and
wi_1: "GF H" is [2 * F, H] with the rows of wi_0 before those of wi_1, and "H FG" is [H, 2 * F] with
columns of wi_0 and wi_1 in turn. `{e}` in a name stands for the number of an expert; each expert
then has its own tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ep.moe.params import PARAMETERS

# Maps each parameter of a layer to its axes, in the letters of this module's docstring.
PARAMETER_AXES = {name: parameter.dims for name, parameter in PARAMETERS.items()}


class Tensor(NamedTuple):
    """A stored tensor, and the parameters that it holds.

    Attributes:
        params: the names of the parameters in `jax_ep.MoEParams`; a tensor of two parameters has
            an axis with G.
        name: the name of the tensor after "layers.<layer>.".
        axes: the axes of the tensor, in the letters of this module's docstring.
        where: a key of config.json that must be true for the tensor to exist; "": it always exists.
    """

    params: tuple[str, ...]
    name: str
    axes: str
    where: str = ""


Tensors = tuple[Tensor, ...]


class OneOf(NamedTuple):
    """Alternative ways in which the same weights are published; a directory has one of them.

    If a directory has none of them yet, a block that is saved there takes the first that fits the
    quantization.
    """

    layouts: tuple[Tensors, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row of the table: how models of one architecture are published.

    Keys of config.json are written as they are there. "a|b" stands for the first key that is there,
    and "a*b" for the product of two values.

    Attributes:
        models: the names of the models.
        model_types: their `model_type` in config.json.
        sizes: maps the letter of an axis to the key of config.json with its size. An axis without a
            key has size 0, except R, which follows from E. Tensors with an axis of size 0 do not
            exist.
        fields: maps fields of `jax_ep.MoEConfig` to keys of config.json.
        fixed: the fields of `jax_ep.MoEConfig` that are equal in all these models.
        defaults: the values of keys that config.json may leave out or have as null.
        only: the supported values of some keys, if config.json has them. Other values mean a
            different computation.
        tensors: the tensors that hold the weights.
        unused: tensors of free experts that some files have and no model reads.
    """

    models: str
    model_types: tuple[str, ...]
    sizes: Mapping[str, str]
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    tensors: tuple[Tensor | OneOf, ...]
    unused: tuple[str, ...] = ()


def _router(name: str) -> Tensor:
    return Tensor(("gate",), name, "R H")


def _bias(name: str, where: str = "") -> Tensor:
    return Tensor(("bias",), name, "R", where)


def _each(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Lists the three tensors that each expert has."""
    return (
        Tensor(("wi_0",), f"{block}.{{e}}.{gate}.weight", "F H"),
        Tensor(("wi_1",), f"{block}.{{e}}.{up}.weight", "F H"),
        Tensor(("wo",), f"{block}.{{e}}.{down}.weight", "H F"),
    )


def _stacked(gate_up: str, down: str, axes: str = "E GF H", down_axes: str = "E H F"):
    """Lists the two tensors that hold the matrices of all experts."""
    return Tensor(("wi_0", "wi_1"), gate_up, axes), Tensor(("wo",), down, down_axes)


def _mlp(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Lists the tensors of the shared experts' three matrices."""
    return (
        Tensor(("shared_wi_0",), f"{block}.{gate}.weight", "S H"),
        Tensor(("shared_wi_1",), f"{block}.{up}.weight", "S H"),
        Tensor(("shared_wo",), f"{block}.{down}.weight", "H S"),
    )


_EXPERTS = OneOf(
    (_each("mlp.experts"), _stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
)
# Weights that are published stacked, or with a tensor for each expert if they are quantized.
_STACKED = OneOf(_EXPERTS.layouts[::-1])
_MIXTRAL = (
    _router("block_sparse_moe.gate.weight"),
    *_each("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_MIXTRAL_SIZES = {"E": "num_local_experts", "H": "hidden_size", "F": "intermediate_size"}
_GRANITE = (
    _router("block_sparse_moe.router.layer.weight"),
    *_stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)

# Fields of routers that compute logits in the model's dtype; others compute them in float32.
_OWN_DTYPE = {"router_dtype": None}

# Fields of routers that divide the weights by their sum; DeepSeek adds an epsilon to the sum.
_SUM = {"normalize": True, "normalize_epsilon": 0.0}
_SOFTMAX = {"score": "softmax"} | _SUM | _OWN_DTYPE
_DEEPSEEK = {"score": "sigmoid", "normalize_epsilon": 1e-20}

_QWEN_SIZES = {
    "E": "num_experts|num_local_experts",
    "H": "hidden_size",
    "F": "moe_intermediate_size",
}
_SHARED_BY_NUMBER = {"S": "num_shared_experts*moe_intermediate_size"}
_QWEN = (_router("mlp.gate.weight"), _EXPERTS)
_QWEN_SHARED = (
    *_mlp("mlp.shared_expert"),
    Tensor(("shared_gate",), "mlp.shared_expert_gate.weight", "1 H"),
)
_DEEPSEEK_SIZES = {
    "E": "n_routed_experts",
    "H": "hidden_size",
    "F": "moe_intermediate_size",
    "S": "n_shared_experts*moe_intermediate_size",
}
_DEEPSEEK_TENSORS = (_router("mlp.gate.weight"), _EXPERTS, *_mlp("mlp.shared_experts"))
_DEEPSEEK_DEFAULTS = {"n_shared_experts": 0}
_GROUPS = {
    "num_groups": "n_group",
    "groups_kept": "topk_group",
    "normalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
_DEEPSEEK_V2_ONLY = {"scoring_func": ("softmax",), "norm_topk_prob": (False,)}

_K = {"num_experts_per_token": "num_experts_per_tok", "activation": "hidden_act"}
_SILU = {"hidden_act": "silu"}


TABLE = (
    Architecture(
        models="Mixtral, MiniMax-Text-01",
        model_types=("mixtral", "minimax"),
        sizes=_MIXTRAL_SIZES,
        fields=_K,
        fixed=_SOFTMAX,
        tensors=_MIXTRAL,
    ),
    Architecture(
        models="Phi-3.5-MoE, its router at inference",
        model_types=("phimoe",),
        sizes=_MIXTRAL_SIZES,
        fields=_K | {"router": "router_jitter_noise"},
        fixed=_OWN_DTYPE,
        only={"num_experts_per_tok": (2,)},
        tensors=_MIXTRAL,
    ),
    Architecture(
        models="MiniMax-M2",
        model_types=("minimax_m2",),
        sizes=_MIXTRAL_SIZES,
        fields=_K,
        fixed={"score": "sigmoid"} | _SUM,
        only={"scoring_func": ("sigmoid",), "use_routing_bias": (True,)},
        tensors=(*_MIXTRAL, _bias("block_sparse_moe.e_score_correction_bias")),
    ),
    Architecture(
        models="Qwen3-MoE, Mellum",
        model_types=("qwen3_moe", "mellum"),
        sizes=_QWEN_SIZES,
        fields=_K | {"normalize": "norm_topk_prob"},
        fixed={"score": "softmax", "normalize_epsilon": 0.0} | _OWN_DTYPE,
        tensors=_QWEN,
    ),
    Architecture(
        models="Qwen2-MoE, Qwen3-Next",
        model_types=("qwen2_moe", "qwen3_next"),
        sizes=_QWEN_SIZES | {"S": "shared_expert_intermediate_size"},
        fields=_K | {"normalize": "norm_topk_prob"},
        fixed={"score": "softmax", "normalize_epsilon": 0.0} | _OWN_DTYPE,
        tensors=(*_QWEN, *_QWEN_SHARED),
    ),
    Architecture(
        models="Qwen3.5-MoE",
        model_types=("qwen3_5_moe_text",),
        sizes=_QWEN_SIZES | {"S": "shared_expert_intermediate_size"},
        fields=_K,
        fixed=_SOFTMAX,
        only={"norm_topk_prob": (True,)},
        tensors=(_router("mlp.gate.weight"), _STACKED, *_QWEN_SHARED),
    ),
    Architecture(
        models="Qwen3-VL-MoE",
        model_types=("qwen3_vl_moe_text",),
        sizes=_QWEN_SIZES,
        fields=_K,
        fixed=_SOFTMAX,
        only={"norm_topk_prob": (True,)},
        tensors=(
            _router("mlp.gate.weight"),
            *_stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "E H GF", "E F H"),
        ),
    ),
    Architecture(
        models="OLMoE, FlexOlmo",
        model_types=("olmoe", "flex_olmo"),
        sizes={
            "E": "num_experts|num_local_experts",
            "H": "hidden_size",
            "F": "intermediate_size",
        },
        fields=_K | {"normalize": "norm_topk_prob"},
        fixed={"score": "softmax", "normalize_epsilon": 0.0} | _OWN_DTYPE,
        defaults={"norm_topk_prob": False} | _SILU,
        tensors=_QWEN,
    ),
    Architecture(
        models="DeepSeek-V3 to V3.2, R1, Moonlight, Kimi-K2, GLM-4.5 to 5, MiMo-V2-Flash, "
        "dots.llm1, Solar Open",
        model_types=(
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe_text",
            "glm_moe_dsa",
            "dots1",
            "solar_open",
            "mimo_v2_flash",
        ),
        sizes=_DEEPSEEK_SIZES,
        fields=_K | _GROUPS,
        fixed=_DEEPSEEK,
        defaults=_DEEPSEEK_DEFAULTS,
        only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
        tensors=(*_DEEPSEEK_TENSORS, _bias("mlp.gate.e_score_correction_bias")),
    ),
    Architecture(
        models="EXAONE-MoE",
        model_types=("exaone_moe",),
        sizes={"E": "num_experts", "H": "hidden_size", "F": "moe_intermediate_size"}
        | _SHARED_BY_NUMBER,
        fields=_K | _GROUPS,
        fixed=_DEEPSEEK,
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        tensors=(*_DEEPSEEK_TENSORS, _bias("mlp.e_score_correction_bias")),
    ),
    Architecture(
        models="DeepSeek-V4, its layers with a learned choice of experts",
        model_types=("deepseek_v4",),
        sizes=_DEEPSEEK_SIZES,
        fields=_K | {"scale": "routed_scaling_factor", "clamp": "swiglu_limit"},
        fixed={"score": "sqrt_softplus", "normalize": True, "normalize_epsilon": 1e-20}
        | _OWN_DTYPE,
        defaults=_DEEPSEEK_DEFAULTS,
        only={
            "scoring_func": ("sqrtsoftplus",),
            "norm_topk_prob": (True,),
            "n_shared_experts": (1,),
        },
        tensors=(
            _router("ffn.gate.weight"),
            _bias("ffn.gate.bias"),
            *_each("ffn.experts", "w1", "w3", "w2"),
            *_mlp("ffn.shared_experts", "w1", "w3", "w2"),
        ),
    ),
    Architecture(
        models="Nemotron-H",
        model_types=("nemotron_h",),
        sizes=_DEEPSEEK_SIZES | {"S": "moe_shared_expert_intermediate_size"},
        fields=_K | {"activation": "mlp_hidden_act"} | _GROUPS,
        fixed=_DEEPSEEK,
        only={"moe_latent_size": (), "mlp_bias": (False,)},
        tensors=(
            _router("mixer.gate.weight"),
            _bias("mixer.gate.e_score_correction_bias"),
            Tensor(("wi_0",), "mixer.experts.{e}.up_proj.weight", "F H"),
            Tensor(("wo",), "mixer.experts.{e}.down_proj.weight", "H F"),
            Tensor(("shared_wi_0",), "mixer.shared_experts.up_proj.weight", "S H"),
            Tensor(("shared_wo",), "mixer.shared_experts.down_proj.weight", "H S"),
        ),
    ),
    Architecture(
        models="Hunyuan 3",
        model_types=("hy_v3",),
        sizes=_QWEN_SIZES | _SHARED_BY_NUMBER,
        fields=_K | {"scale": "router_scaling_factor"},
        fixed=_DEEPSEEK | {"normalize": True},
        tensors=(
            _router("mlp.router.gate.weight"),
            _bias("mlp.expert_bias"),
            _EXPERTS,
            *_mlp("mlp.shared_mlp"),
        ),
    ),
    Architecture(
        models="AFMoE",
        model_types=("afmoe",),
        sizes=_QWEN_SIZES | _SHARED_BY_NUMBER,
        fields=_K | {"scale": "route_scale"},
        fixed=_DEEPSEEK | {"normalize": True} | _OWN_DTYPE,
        only={"score_func": ("sigmoid",), "route_norm": (True,)},
        tensors=(
            _router("mlp.router.gate.weight"),
            _bias("mlp.expert_bias"),
            _EXPERTS,
            *_mlp("mlp.shared_experts"),
        ),
    ),
    Architecture(
        models="Aria",
        model_types=("aria_text",),
        sizes={
            "E": "moe_num_experts",
            "H": "hidden_size",
            "F": "intermediate_size",
            "S": "moe_num_shared_experts*intermediate_size",
        },
        fields={"num_experts_per_token": "moe_topk", "activation": "hidden_act"},
        fixed=_SOFTMAX,
        only={"mlp_bias": (False,), "hidden_act": ("silu",)},
        tensors=(
            _router("mlp.router.weight"),
            *_stacked("mlp.experts.fc1.weight", "mlp.experts.fc2.weight", "E H GF", "E F H"),
            *_mlp("mlp.shared_experts"),
        ),
    ),
    Architecture(
        models="DeepSeek-V2-Lite",
        model_types=("deepseek_v2",),
        sizes=_DEEPSEEK_SIZES,
        fields=_K | {"scale": "routed_scaling_factor"},
        fixed={"score": "softmax", "normalize": False},
        defaults=_DEEPSEEK_DEFAULTS,
        only=_DEEPSEEK_V2_ONLY | {"topk_method": ("greedy",)},
        tensors=_DEEPSEEK_TENSORS,
    ),
    Architecture(
        models="DeepSeek-V2",
        model_types=("deepseek_v2",),
        sizes=_DEEPSEEK_SIZES,
        fields=_K
        | {
            "num_groups": "n_group",
            "groups_kept": "topk_group",
            "scale": "routed_scaling_factor",
        },
        fixed={"score": "softmax", "normalize": False, "group_score": "max"},
        defaults=_DEEPSEEK_DEFAULTS,
        only=_DEEPSEEK_V2_ONLY | {"topk_method": ("group_limited_greedy",)},
        tensors=_DEEPSEEK_TENSORS,
    ),
    Architecture(
        models="Granite MoE",
        model_types=("granitemoe",),
        sizes=_MIXTRAL_SIZES,
        fields=_K,
        # A softmax over the chosen logits equals the softmax over all logits, normalized.
        fixed=_SOFTMAX,
        tensors=_GRANITE,
    ),
    Architecture(
        models="Granite MoE with shared experts, Granite 4.0",
        model_types=("granitemoeshared", "granitemoehybrid"),
        sizes=_MIXTRAL_SIZES | {"S": "shared_intermediate_size"},
        fields=_K,
        fixed=_SOFTMAX,
        tensors=(
            *_GRANITE,
            Tensor(("shared_wi_0", "shared_wi_1"), "shared_mlp.input_linear.weight", "GS H"),
            Tensor(("shared_wo",), "shared_mlp.output_linear.weight", "H S"),
        ),
    ),
    Architecture(
        models="GPT-OSS",
        model_types=("gpt_oss",),
        sizes=_MIXTRAL_SIZES,
        fields={
            "num_experts_per_token": "num_experts_per_tok",
            "gating": "swiglu_alpha",
            "clamp": "swiglu_limit",
        },
        # The softmax of the chosen logits is that of all logits, normalized.
        fixed=_SOFTMAX,
        defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        tensors=(
            _router("mlp.router.weight"),
            Tensor(("gate_bias",), "mlp.router.bias", "R"),
            OneOf(
                (
                    _stacked(
                        "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "E H FG", "E F H"
                    ),
                    _stacked(
                        "mlp.experts.gate_up_proj_blocks",
                        "mlp.experts.down_proj_blocks",
                        "E FG H",
                        "E H F",
                    ),
                )
            ),
            Tensor(("wi_0_bias", "wi_1_bias"), "mlp.experts.gate_up_proj_bias", "E FG"),
            Tensor(("wo_bias",), "mlp.experts.down_proj_bias", "E H"),
        ),
    ),
    Architecture(
        models="Llama 4",
        model_types=("llama4_text",),
        sizes=_MIXTRAL_SIZES | {"S": "intermediate_size"},
        fields=_K,
        fixed={"score": "sigmoid", "normalize": False, "weights_on": "input"} | _OWN_DTYPE,
        tensors=(
            _router("feed_forward.router.weight"),
            *_stacked(
                "feed_forward.experts.gate_up_proj",
                "feed_forward.experts.down_proj",
                "E H GF",
                "E F H",
            ),
            *_mlp("feed_forward.shared_expert"),
        ),
    ),
    Architecture(
        models="ERNIE 4.5",
        model_types=("ernie4_5_moe",),
        sizes={
            "E": "moe_num_experts",
            "H": "hidden_size",
            "F": "moe_intermediate_size",
            "S": "moe_num_shared_experts*moe_intermediate_size",
        },
        fields={
            "num_experts_per_token": "moe_k",
            "activation": "hidden_act",
            # The model uses it as a lower bound of the sum. Adding it to the sum instead makes a
            # difference only where the sum is below 1e-5.
            "normalize_epsilon": "moe_norm_min",
        },
        fixed={"score": "softmax", "normalize": True},
        defaults={"moe_norm_min": 1e-12} | _SILU,
        only={"use_bias": (False,)},
        tensors=(
            *_DEEPSEEK_TENSORS,
            Tensor(("bias",), "mlp.moe_statics.e_score_correction_bias", "1 R"),
        ),
    ),
    Architecture(
        models="Hunyuan-A13B",
        model_types=("hunyuan_v1_moe", "hunyuan"),
        sizes={
            "E": "num_experts",
            "H": "hidden_size",
            "F": "intermediate_size",
            "S": "intermediate_size",
        },
        fields={"num_experts_per_token": "moe_topk", "activation": "hidden_act"},
        fixed={"score": "softmax"} | _SUM,
        only={"norm_topk_prob": (True,)},
        tensors=(_router("mlp.gate.wg.weight"), _EXPERTS, *_mlp("mlp.shared_mlp")),
    ),
    Architecture(
        models="LFM2-MoE",
        model_types=("lfm2_moe",),
        sizes={"E": "num_experts", "H": "hidden_size", "F": "moe_intermediate_size"},
        fields={
            "num_experts_per_token": "num_experts_per_tok",
            "normalize": "norm_topk_prob",
            "scale": "routed_scaling_factor",
        },
        fixed={"score": "sigmoid", "normalize_epsilon": 1e-6} | _OWN_DTYPE,
        tensors=(
            _router("feed_forward.gate.weight"),
            _bias("feed_forward.expert_bias", "use_expert_bias"),
            *_each("feed_forward.experts", "w1", "w3", "w2"),
        ),
    ),
    Architecture(
        models="LongCat-Flash",
        model_types=("longcat_flash",),
        sizes={"E": "n_routed_experts", "H": "hidden_size", "F": "expert_ffn_hidden_size"},
        fields={
            "num_experts_per_token": "moe_topk",
            "activation": "hidden_act",
            "scale": "routed_scaling_factor",
            "identity_experts": "zero_expert_num",
        },
        fixed={"score": "softmax", "normalize": False},
        defaults={"zero_expert_num": 0} | _SILU,
        only={
            "zero_expert_type": ("identity",),
            "norm_topk_prob": (False,),
            "router_bias": (False,),
        },
        tensors=(
            _router("mlp.router.classifier.weight"),
            _bias("mlp.router.e_score_correction_bias"),
            *_each("mlp.experts"),
        ),
        unused=("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    ),
    Architecture(
        models="Jamba",
        model_types=("jamba",),
        sizes={"E": "num_experts", "H": "hidden_size", "F": "intermediate_size"},
        fields=_K,
        fixed={"score": "softmax", "normalize": False} | _OWN_DTYPE,
        tensors=(_router("feed_forward.router.weight"), *_each("feed_forward.experts")),
    ),
)


# The beginning of the published names of a decoder's layers, by `model_type`; default "model.".
_ROOTS = {
    "qwen3_5_moe_text": "model.language_model.",
    "qwen3_vl_moe_text": "model.language_model.",
    "glm4v_moe_text": "model.language_model.",
    "llama4_text": "language_model.model.",
    "nemotron_h": "backbone.",
    "deepseek_v4": "",
}


def root_parts() -> tuple[str, ...]:
    """Returns the parts of the names that published models have in front of their layers."""
    roots = ("model.", *_ROOTS.values())
    return tuple(dict.fromkeys(part for root in roots for part in root.split(".") if part))


def published_root(model_type: str, is_part: bool) -> str:
    """Returns the beginning of the names of the decoder's layers in a published model.

    Args:
        model_type: the `model_type` of the decoder.
        is_part: whether the decoder is the `text_config` of a multimodal model, such as the
            DeepSeek-V3 in Kimi-K2.5.
    """
    root = _ROOTS.get(model_type, "model.")
    return "language_model." + root if is_part and "language_model." not in root else root


def architectures() -> dict[str, Architecture]:
    """Maps each `model_type` to its row of the table, or to the first of several rows."""
    known: dict[str, Architecture] = {}
    for row in TABLE:
        for model_type in row.model_types:
            known.setdefault(model_type, row)
    return known
