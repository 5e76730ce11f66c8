"""Lists published models in a table: their router options, and where each weight is stored.

Letters name the axes of a stored tensor:

  E  the experts that have weights.
  R  the experts that the router chooses among: the E experts and experts without weights, such as
     LongCat-Flash's identity experts.
  H  the hidden size of the model.
  F  the hidden width of an expert.
  S  the hidden width of all shared experts together.
  1  an axis with one element.
  G  the two parameters wi_0 and wi_1, which one tensor holds. G shares an axis with F: "GF H" is
     [2 * F, H] with the rows of wi_0 before the rows of wi_1; "H FG" is [H, 2 * F] with alternating
     columns of wi_0 and wi_1.

`{e}` in a tensor's name stands for the number of an expert; each expert then has its own tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ep.moe.params import PARAMETERS

# Maps a parameter's name to the letters of its axes: "EHF" for wi_0, of shape [experts, hidden
# size, hidden width]. This module's docstring lists the letters.
PARAMETER_AXES = {name: parameter.dims for name, parameter in PARAMETERS.items()}


class Tensor(NamedTuple):
    """Describes a stored tensor: its name, its axes, and the parameters whose weights it holds.

    Attributes:
        params: the names of the parameters in `jax_ep.MoEParams` that the tensor holds: two if its
            axes have the letter G, else one.
        name: the tensor's name after "layers.<layer>.".
        axes: the letters of the tensor's axes, separated by spaces, such as "E GF H"; this module's
            docstring lists the letters.
        where: a key of config.json whose value says whether the tensor exists. "" stands for a
            tensor that always exists.
    """

    params: tuple[str, ...]
    name: str
    axes: str
    where: str = ""


Tensors = tuple[Tensor, ...]


class OneOf(NamedTuple):
    """Alternative sets of tensors in which the same weights may be stored.

    Attributes:
        layouts: the alternatives, each a tuple of tensors. A checkpoint has the tensors of one
            alternative. When a first MoE block is saved to a checkpoint, it gets the tensors of the
            first alternative that the model's quantization allows.
    """

    layouts: tuple[Tensors, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Describes how models of one architecture are published: config.json and tensors.

    In `sizes` and `fields`, a key may be written as "a|b": the first of the keys a and b that
    config.json has. In `sizes`, it may also be written as "a*b": the product of the values of the
    keys a and b.

    Attributes:
        models: the names of the models.
        model_types: the values of `model_type` in the models' config.json.
        sizes: maps the letter of an axis (see this module's docstring) to the key of config.json
            that holds the axis's size. R, the outputs of the router, follows from E. Any other
            axis without a key has size 0. Tensors with an axis of size 0 do not exist.
        fields: maps fields of `jax_ep.MoEConfig` to the keys of config.json that hold their values.
        fixed: fields of `jax_ep.MoEConfig` that have the same value in all these models.
        defaults: maps keys that config.json may omit or set to null to their values in this case.
        only: maps keys of config.json to the values that this library supports. Loading a model
            with any other value is an error. A key may always be missing.
        tensors: the tensors that hold the weights.
        unused: names of tensors that are ignored. Some files hold them for experts that compute
            nothing and so need no weights.
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
    """Lists the tensors of models in which each expert has its own three tensors.

    `block` is the name of the PyTorch module that contains all experts. `gate`, `up` and `down` are
    the names of the modules inside an expert that hold wi_0, wi_1 and wo.
    """
    return (
        Tensor(("wi_0",), f"{block}.{{e}}.{gate}.weight", "F H"),
        Tensor(("wi_1",), f"{block}.{{e}}.{up}.weight", "F H"),
        Tensor(("wo",), f"{block}.{{e}}.{down}.weight", "H F"),
    )


def _stacked(gate_up: str, down: str, axes: str = "E GF H", down_axes: str = "E H F"):
    """Lists the tensors of models in which two tensors hold the matrices of all experts.

    `gate_up` is the name of the tensor that holds wi_0 and wi_1, and `axes` are its axes. `down` is
    the name of the tensor that holds wo, and `down_axes` are its axes.
    """
    return Tensor(("wi_0", "wi_1"), gate_up, axes), Tensor(("wo",), down, down_axes)


def _mlp(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Lists the three tensors of the shared experts, which are stored as a single MLP.

    The MLP's hidden width S is that of all shared experts together. `block` is the name of the
    MLP's PyTorch module; `gate`, `up` and `down` are the names of the modules inside it that hold
    shared_wi_0, shared_wi_1 and shared_wo.
    """
    return (
        Tensor(("shared_wi_0",), f"{block}.{gate}.weight", "S H"),
        Tensor(("shared_wi_1",), f"{block}.{up}.weight", "S H"),
        Tensor(("shared_wo",), f"{block}.{down}.weight", "H S"),
    )


_EXPERTS = OneOf(
    (_each("mlp.experts"), _stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
)
# The alternatives of _EXPERTS in the reverse order: the tensors that hold all experts are preferred
# when a first MoE block is saved to a directory. In a float8 model, each expert still has its own
# tensors.
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

# The field of `jax_ep.MoEConfig` by which routers compute their logits in the dtype of the tokens,
# not in float32.
_OWN_DTYPE = {"router_dtype": None}

# The fields of `jax_ep.MoEConfig` for routers that divide the weights of a token's K experts by
# their sum. (DeepSeek's router adds a small number to the sum: `_DEEPSEEK`.)
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
_DEEPSEEK_V3_TENSORS = (*_DEEPSEEK_TENSORS, _bias("mlp.gate.e_score_correction_bias"))
_DEEPSEEK_V3_ONLY = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
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
        models="DeepSeek-V3 to V3.2, R1, Moonlight, Kimi-K2, GLM-4.5 to 5, dots.llm1, Solar Open",
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
        ),
        sizes=_DEEPSEEK_SIZES,
        fields=_K | _GROUPS,
        fixed=_DEEPSEEK,
        defaults=_DEEPSEEK_DEFAULTS,
        only=_DEEPSEEK_V3_ONLY,
        tensors=_DEEPSEEK_V3_TENSORS,
    ),
    Architecture(
        models="MiMo-V2-Flash",
        model_types=("mimo_v2_flash",),
        sizes=_DEEPSEEK_SIZES,
        fields=_K | _GROUPS,
        fixed=_DEEPSEEK,
        # Its config.json has null for both of these keys.
        defaults=_DEEPSEEK_DEFAULTS | {"routed_scaling_factor": 1.0},
        only=_DEEPSEEK_V3_ONLY,
        tensors=_DEEPSEEK_V3_TENSORS,
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
        # Granite computes the softmax over the chosen logits only. A softmax over all logits gives
        # the same weights, once the chosen ones are divided by their sum.
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
        # GPT-OSS computes the softmax over the chosen logits only. A softmax over all logits gives
        # the same weights, once the chosen ones are divided by their sum.
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
            # ERNIE divides a token's weights by their sum, or by moe_norm_min if the sum is
            # smaller. This library's layer adds moe_norm_min to the sum, which makes a difference
            # only if the sum is below 1e-5.
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


# Maps a model's `model_type` to what precedes "layers." in its published tensor names. For all
# models that are not listed, this is "model.".
_ROOTS = {
    "qwen3_5_moe_text": "model.language_model.",
    "qwen3_vl_moe_text": "model.language_model.",
    "glm4v_moe_text": "model.language_model.",
    "llama4_text": "language_model.model.",
    "nemotron_h": "backbone.",
    "deepseek_v4": "",
}


def root_parts() -> tuple[str, ...]:
    """Returns the words that may precede "layers." in the tensor names of published models.

    In "model.language_model.layers.0.", for example, these are "model" and "language_model".
    """
    roots = ("model.", *_ROOTS.values())
    return tuple(dict.fromkeys(part for root in roots for part in root.split(".") if part))


def published_root(model_type: str, is_part: bool) -> str:
    """Returns the beginning of a published model's tensor names, before "layers.".

    Args:
        model_type: the `model_type` of the decoder.
        is_part: whether the decoder is the `text_config` of a multimodal model, such as the
            DeepSeek-V3 in Kimi-K2.5.
    """
    root = _ROOTS.get(model_type, "model.")
    return "language_model." + root if is_part and "language_model." not in root else root


def architectures() -> dict[str, Architecture]:
    """Returns a dict that maps each supported `model_type` of config.json to its architecture.

    A `model_type` of several architectures maps to the first of them in `TABLE`.
    """
    known: dict[str, Architecture] = {}
    for row in TABLE:
        for model_type in row.model_types:
            known.setdefault(model_type, row)
    return known
