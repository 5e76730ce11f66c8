"""Lists published models in a table: their router options, and where each weight is stored.

Letters name the axes of a stored tensor:

  E  the experts that have weights.
  R  the experts that the router chooses among: the E experts and experts without weights, such as
     LongCat-Flash's identity experts.
  H  the hidden size of the model, or of its experts if they have another one.
  D  the hidden size of the model, where the experts have another one.
  F  the hidden width of an expert.
  S  the hidden width of all shared experts together.
  1  an axis with one element.
  G  the two parameters wi_0 and wi_1, which one tensor holds. G shares an axis with F: "GF H" is
     [2 * F, H] with the rows of wi_0 before the rows of wi_1; "H FG" is [H, 2 * F] with alternating
     columns of wi_0 and wi_1.
  EF  F for each expert, one after another.

`{e}` in a tensor's name stands for the number of an expert; each expert then has its own tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.checkpoints.functions import half_silu
from jax_ep.moe.params import PARAMETERS

# Maps a parameter's name to the letters of its axes: "EHF" for wi_0, of shape [experts, hidden
# size, hidden width]. This module's docstring lists the letters.
PARAMETER_AXES = {name: parameter.dims for name, parameter in PARAMETERS.items()}


class Tensor(NamedTuple):
    """A stored tensor: its name, its axes, and the parameters whose weights it holds."""

    # Two parameters of `jax_ep.MoEParams` with an axis G, else one; none for a tensor that the
    # layer does not hold (`jax_ep.checkpoints.load_others`).
    params: tuple[str, ...]
    name: str  # after "layers.<layer>."
    axes: str  # letters, separated by spaces, such as "E GF H"
    where: str = ""  # a key of config.json that says whether the tensor exists; "": it always does


Tensors = tuple[Tensor, ...]


class OneOf(NamedTuple):
    """Alternative sets of tensors, which may differ only in their axes, of the same weights."""

    # The first MoE block of a new checkpoint gets the first layout that its quantization allows.
    layouts: tuple[Tensors, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Describes how models of one architecture are published: config.json and tensors.

    In `sizes` and `fields`, a key "a|b" is the first of the keys a and b that config.json has, and
    "a.b" is the key b of the object a. In `sizes`, "a*b" is the product of two keys' values.

    Attributes:
        models: the names of the models.
        model_types: the values of `model_type` in the models' config.json.
        sizes: maps the letter of an axis to the key of config.json that holds the axis's size. R,
            the outputs of the router, follows from E. Any other axis without a key has size 0.
            Tensors with an axis of size 0 do not exist.
        fields: maps fields of `jax_ep.MoEConfig` to the keys of config.json that hold their values.
        fixed: fields of `jax_ep.MoEConfig` that have the same value in all these models.
        defaults: maps keys that config.json may omit or set to null to their values in this case.
        only: maps keys of config.json, which may be missing, to the values that are supported.
        tensors: the tensors that hold the weights.
        unused: names of tensors that are ignored, of experts that compute nothing.
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


def _sizes(
    experts: str, width: str, shared: str = "", hidden: str = "hidden_size"
) -> dict[str, str]:
    """Maps the letters E, H, F and S to their keys of config.json."""
    return {"E": experts, "H": hidden, "F": width} | ({"S": shared} if shared else {})


def _router(name: str) -> Tensor:
    return Tensor(("gate",), name, "R H")


def _bias(name: str, where: str = "") -> Tensor:
    return Tensor(("bias",), name, "R", where)


def _others(*names: str) -> Tensors:
    """Lists tensors that the layer does not hold."""
    return tuple(Tensor((), name, "") for name in names)


def _each(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Lists the three tensors of each expert in `module`; the other arguments are their names."""
    return (
        Tensor(("wi_0",), f"{module}.{{e}}.{gate}.weight", "F H"),
        Tensor(("wi_1",), f"{module}.{{e}}.{up}.weight", "F H"),
        Tensor(("wo",), f"{module}.{{e}}.{down}.weight", "H F"),
    )


def _stacked(
    module: str,
    axes: str = "E GF H",
    down_axes: str = "E H F",
    *,
    gate_up: str = "gate_up_proj",
    down: str = "down_proj",
):
    """Lists the tensors `gate_up`, with `axes`, and `down` in `module`, each of all experts."""
    wo = Tensor(("wo",), f"{module}.{down}", down_axes)
    return Tensor(("wi_0", "wi_1"), f"{module}.{gate_up}", axes), wo


def _mlp(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Lists the three tensors of the shared experts, which `module` stores as one MLP."""
    return (
        Tensor(("shared_wi_0",), f"{module}.{gate}.weight", "S H"),
        Tensor(("shared_wi_1",), f"{module}.{up}.weight", "S H"),
        Tensor(("shared_wo",), f"{module}.{down}.weight", "H S"),
    )


# Each expert has its own tensors, or two tensors hold all experts. In _STACKED, the second is
# preferred, but each expert of a float8 model still has its own tensors.
_EXPERTS = OneOf((_each("mlp.experts"), _stacked("mlp.experts")))
_STACKED = OneOf(_EXPERTS.layouts[::-1])

_K = {
    "num_experts_per_token": "num_experts_per_tok|num_experts_per_token",
    "activation": "hidden_act",
}
_SILU = {"hidden_act": "silu"}

# Values of the field `router_dtype`: routers compute their logits in the dtype of the tokens, or
# in float32.
_OWN_DTYPE = {"router_dtype": None}
_FLOAT32 = {"router_dtype": jnp.float32}

# The fields of routers that divide the weights of a token's K experts by their sum.
_SUM = {"normalize": True, "normalize_epsilon": 0.0}
_SOFTMAX = {"score": "softmax"} | _SUM | _OWN_DTYPE

# What the models of a family have in common: arguments of `Architecture`.
_MIXTRAL: dict[str, Any] = {
    "sizes": _sizes("num_local_experts", "intermediate_size"),
    "fields": _K,
    "fixed": _SOFTMAX,
    "tensors": (
        _router("block_sparse_moe.gate.weight"),
        *_each("block_sparse_moe.experts", "w1", "w3", "w2"),
    ),
}
_QWEN: dict[str, Any] = {
    "sizes": _sizes("num_experts|num_local_experts", "moe_intermediate_size"),
    "fields": _K | {"normalize": "norm_topk_prob"},
    "fixed": {"score": "softmax", "normalize_epsilon": 0.0} | _OWN_DTYPE,
    "tensors": (_router("mlp.gate.weight"), _EXPERTS),
}
_QWEN_SHARED = (
    *_mlp("mlp.shared_expert"),
    Tensor(("shared_gate",), "mlp.shared_expert_gate.weight", "1 H"),
)
_SHARED_BY_NUMBER = {"S": "num_shared_experts*moe_intermediate_size"}
_SHARED_BY_WIDTH = {"S": "shared_expert_intermediate_size"}

_DEEPSEEK: dict[str, Any] = {
    "sizes": _sizes(
        "n_routed_experts|num_experts",
        "moe_intermediate_size",
        "n_shared_experts|num_shared_experts*moe_intermediate_size",
    ),
    "fields": _K | {"scale": "routed_scaling_factor"},
    "tensors": (_router("mlp.gate.weight"), _EXPERTS, *_mlp("mlp.shared_experts")),
}
_NO_SHARED = {"n_shared_experts": 0}
_DEEPSEEK_V2: dict[str, Any] = _DEEPSEEK | {
    "fixed": {"score": "softmax", "normalize": False},
    "defaults": _NO_SHARED,
    "only": {"scoring_func": ("softmax",), "norm_topk_prob": (False,)},
}
_GROUPS = {"num_groups": "n_group|num_expert_group", "groups_kept": "topk_group"}
# The router adds a small number to the sum of the weights before it divides by it.
_SIGMOID = {"score": "sigmoid", "normalize_epsilon": 1e-20}
_DEEPSEEK_V3: dict[str, Any] = _DEEPSEEK | {
    "fields": _DEEPSEEK["fields"] | _GROUPS | {"normalize": "norm_topk_prob|moe_renormalize"},
    "fixed": _SIGMOID,
    "tensors": (*_DEEPSEEK["tensors"], _bias("mlp.gate.e_score_correction_bias")),
}
_DEEPSEEK_V3_ONLY = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
_NEMOTRON: dict[str, Any] = _DEEPSEEK_V3 | {
    "fields": _DEEPSEEK_V3["fields"] | {"activation": "mlp_hidden_act"},
    "only": {"mlp_bias": (False,)},
}
_NEMOTRON_EXPERTS = (
    _bias("mixer.gate.e_score_correction_bias"),
    Tensor(("wi_0",), "mixer.experts.{e}.up_proj.weight", "F H"),
    Tensor(("wo",), "mixer.experts.{e}.down_proj.weight", "H F"),
)
_LINEAR = {"gate_up": "input_linear.weight", "down": "output_linear.weight"}
_GRANITE_SHARED = (
    Tensor(("shared_wi_0", "shared_wi_1"), "shared_mlp.input_linear.weight", "GS H"),
    Tensor(("shared_wo",), "shared_mlp.output_linear.weight", "H S"),
)
_GPT_OSS: dict[str, Any] = {
    "sizes": _MIXTRAL["sizes"],
    "fields": {
        "num_experts_per_token": "num_experts_per_tok",
        "activation": "swiglu_alpha",
        "clamp": "swiglu_limit",
    },
    # GPT-OSS computes the softmax over the chosen logits only. A softmax over all logits gives the
    # same weights, once the chosen ones are divided by their sum.
    "fixed": _SOFTMAX,
}
_GPT_OSS_BLOCKS = _stacked(
    "mlp.experts", "E FG H", gate_up="gate_up_proj_blocks", down="down_proj_blocks"
)
_GPT_OSS_ROUTER = (
    _router("mlp.router.weight"),
    Tensor(("gate_bias",), "mlp.router.bias", "R"),
)


def _row(family: dict[str, Any], models: str, model_types: str, **changes: Any) -> Architecture:
    """Describes models of a family; mappings among the `changes` are added to the family's."""
    for name, value in changes.items():
        if isinstance(value, Mapping):
            changes[name] = {**family.get(name, {}), **value}
    return Architecture(
        models=models, model_types=tuple(model_types.split()), **{**family, **changes}
    )


_like_mixtral = functools.partial(_row, _MIXTRAL)
_like_qwen = functools.partial(_row, _QWEN)
_like_deepseek_v3 = functools.partial(_row, _DEEPSEEK_V3)

TABLE = (
    _like_mixtral("Mixtral, MiniMax-Text-01", "mixtral minimax"),
    Architecture(
        models="Phi-3.5-MoE, its router at inference",
        model_types=("phimoe",),
        sizes=_MIXTRAL["sizes"],
        fields=_K | {"router": "router_jitter_noise"},
        fixed=_OWN_DTYPE,
        only={"num_experts_per_tok": (2,)},
        tensors=_MIXTRAL["tensors"],
    ),
    _like_mixtral(
        "MiniMax-M2",
        "minimax_m2",
        fixed={"score": "sigmoid"} | _FLOAT32,
        only={"scoring_func": ("sigmoid",), "use_routing_bias": (True,)},
        tensors=(*_MIXTRAL["tensors"], _bias("block_sparse_moe.e_score_correction_bias")),
    ),
    _like_qwen("Qwen3-MoE, Qwen3-Omni's thinker, Mellum", "qwen3_moe qwen3_omni_moe_text mellum"),
    _like_qwen(
        "Qwen2-MoE, Qwen3-Next, Qwen3-Omni's talker, Qwen4 Experimental",
        "qwen2_moe qwen3_next qwen3_omni_moe_talker_text qwen4_exp_text",
        sizes=_SHARED_BY_WIDTH,
        tensors=(*_QWEN["tensors"], *_QWEN_SHARED),
    ),
    _like_mixtral(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        sizes=_QWEN["sizes"] | _SHARED_BY_WIDTH,
        only={"norm_topk_prob": (True,)},
        tensors=(_router("mlp.gate.weight"), _STACKED, *_QWEN_SHARED),
    ),
    _like_mixtral(
        "Qwen3-VL-MoE",
        "qwen3_vl_moe_text",
        sizes=_QWEN["sizes"],
        only={"norm_topk_prob": (True,)},
        tensors=(
            _router("mlp.gate.weight"),
            # As published, and as transformers 5 saves them.
            OneOf((_stacked("mlp.experts", "E H GF", "E F H"), _stacked("mlp.experts"))),
        ),
    ),
    _like_qwen(
        "OLMoE, FlexOlmo",
        "olmoe flex_olmo",
        sizes={"F": "intermediate_size"},
        defaults={"norm_topk_prob": False} | _SILU,
    ),
    _like_deepseek_v3(
        "DeepSeek-V3 to V3.2, R1, Moonlight, Kimi-K2, GLM-4.5 to 5, dots.llm1, Solar Open, Beam, "
        # A.X-K1's decoder layer normalizes the block's output.
        "A.X-K1, Sarvam-105B",
        "deepseek_v3 deepseek_v32 kimi_k2 glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa dots1 "
        "solar_open beam axk1 sarvam_mla",
        defaults=_NO_SHARED,
        only=_DEEPSEEK_V3_ONLY,
    ),
    _like_deepseek_v3(
        "MiMo-V2-Flash",
        "mimo_v2_flash",
        # Its config.json has null for both of these keys.
        defaults=_NO_SHARED | {"routed_scaling_factor": 1.0},
        only=_DEEPSEEK_V3_ONLY,
    ),
    _like_deepseek_v3(
        # A.X-K2 chooses an expert of a group that is not kept before one whose score and bias have
        # a negative sum. This library never does.
        "A.X-K2",
        "axk2",
        # Both are null if there are no groups.
        defaults={"n_group": 1, "topk_group": 1},
    ),
    _like_deepseek_v3(
        "Dots 3 Note",
        "dots3_note_text dots3_note",
        sizes={
            "S": "n_shared_experts*"
            "shared_experts_intermediate_size|moe_shared_expert_intermediate_size"
        },
    ),
    _row(_DEEPSEEK_V3, "GLM-5-Next", "glm5_next_text glm5_next", fields={"clamp": "swiglu_limit"}),
    _like_deepseek_v3(
        "Bailing Hybrid (Ling, Ring), Sarvam-30B",
        "bailing_hybrid sarvam_moe",
        tensors=(*_DEEPSEEK["tensors"], _bias("mlp.gate.expert_bias")),
    ),
    _like_deepseek_v3(
        "Kimi Linear",
        "kimi_linear",
        only={"moe_router_activation_func": ("sigmoid",)},
        tensors=(
            *_MIXTRAL["tensors"],
            _bias("block_sparse_moe.gate.e_score_correction_bias"),
            *_mlp("block_sparse_moe.shared_experts"),
        ),
    ),
    _like_deepseek_v3(
        "Hunyuan 4",
        "hy_v4 hy_v4_vl_text",
        fields={"clamp": "swiglu_limit"},
        fixed={"shared_activation": jax.nn.silu},
        tensors=(
            _router("mlp.gate.weight"),
            _bias("mlp.gate.e_score_correction_bias"),
            _STACKED,
            # transformers loads the first name, and saves the second one.
            OneOf((_mlp("mlp.shared_experts"), _mlp("mlp.shared_experts", "linear_gate"))),
        ),
    ),
    _like_deepseek_v3(
        "Mistral Small 4",
        "mistral4",
        fixed={"score": "softmax"} | _OWN_DTYPE,
        tensors=(_router("mlp.gate.weight"), _STACKED, *_mlp("mlp.shared_experts")),
    ),
    _row(
        _DEEPSEEK,
        "Mistral Large 4",
        "mistral_large4_text",
        fields=_GROUPS,
        fixed={"score": "softmax", "normalize": True, "normalize_epsilon": 1e-20},
        tensors=(
            _router("gate.weight"),
            *_each("experts", "w1", "w3", "w2"),
            *_mlp("shared_experts", "w1", "w3", "w2"),
        ),
    ),
    _like_qwen(
        "Lara Mini",
        "lara_mini",
        sizes=_SHARED_BY_WIDTH,
        fixed=_FLOAT32,
        tensors=(_router("mlp.gate.weight"), _STACKED, *_mlp("mlp.shared_expert")),
    ),
    _like_qwen(
        "Flint",
        "flint",
        sizes=_SHARED_BY_WIDTH,
        fixed={"score": "sigmoid"} | _FLOAT32,
        tensors=(*_QWEN["tensors"], *_mlp("mlp.shared_expert")),
    ),
    _like_qwen(
        "Kolibri 1",
        "kolibri1",
        sizes=_SHARED_BY_WIDTH,
        fixed={"score": "sigmoid", "choose_by": "logit"} | _FLOAT32,
        tensors=(
            *_QWEN["tensors"],
            _bias("moe.router.expert_bias"),
            *_mlp("mlp.shared_experts"),
        ),
    ),
    _like_mixtral(
        "Laguna",
        "laguna",
        sizes=_QWEN["sizes"] | _SHARED_BY_WIDTH,
        fields={
            "scale": "moe_routed_scaling_factor",
            "logit_softcap": "moe_router_logit_softcapping",
        },
        fixed={"score": "sigmoid"},
        defaults={"moe_routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0},
        only={"moe_apply_router_weight_on_input": (False,)},
        tensors=(
            *_QWEN["tensors"],
            _bias("mlp.experts.e_score_correction_bias"),
            *_mlp("mlp.shared_expert"),
        ),
    ),
    *(
        Architecture(
            models="Cohere2-MoE",
            model_types=("cohere2_moe",),
            sizes=_sizes(
                "num_experts", "intermediate_size", "num_shared_experts*intermediate_size"
            ),
            # Cohere2-MoE computes the softmax over the chosen logits only; see _GPT_OSS.
            fields=_K | {"score": "expert_selection_fn"},
            fixed=_SUM | _OWN_DTYPE | fixed,
            defaults={"num_shared_experts": 0, "expert_selection_fn": "softmax"},
            only={"norm_topk_prob": (True,)} | only,
            tensors=(*_QWEN["tensors"], *_mlp("mlp.shared_experts")),
        )
        for only, fixed in (
            ({"num_shared_experts": (0,)}, {}),
            ({"shared_expert_combination_strategy": ("sum",)}, {}),
            # The mean of both outputs.
            (
                {"shared_expert_combination_strategy": ("average",)},
                {"scale": 0.5, "shared_activation": half_silu},
            ),
        )
    ),
    Architecture(
        models="Step-3.5, Step-3.7",
        model_types=("step3p5",),
        sizes=_sizes(
            "n_routed_experts|moe_num_experts", "moe_intermediate_size", "share_expert_dim"
        ),
        fields={
            "num_experts_per_token": "num_experts_per_tok|moe_top_k",
            "scale": "moe_router_scaling_factor",
            "activation": "swiglu_limits",
            "shared_activation": "swiglu_limits_shared",
        },
        fixed=_SOFTMAX | {"score": "sigmoid"},
        defaults={"swiglu_limits": 0.0, "swiglu_limits_shared": 0.0},
        tensors=(
            _router("moe.gate.weight"),
            _bias("moe.router_bias"),
            Tensor(("wi_0",), "moe.gate_proj.weight", "E F H"),
            Tensor(("wi_1",), "moe.up_proj.weight", "E F H"),
            Tensor(("wo",), "moe.down_proj.weight", "E H F"),
            *_mlp("share_expert"),
        ),
    ),
    Architecture(
        models="DBRX",
        model_types=("dbrx",),
        sizes=_sizes("ffn_config.moe_num_experts", "ffn_config.ffn_hidden_size", hidden="d_model"),
        fields={
            "num_experts_per_token": "ffn_config.moe_top_k",
            "activation": "ffn_config.ffn_act_fn.name",
            "normalize": "ffn_config.moe_normalize_expert_weights",
        },
        fixed=_QWEN["fixed"],
        defaults={
            "ffn_config.ffn_act_fn.name": "silu",
            "ffn_config.moe_normalize_expert_weights": 0,
        },
        # The sum of the weights is their norm of order 1.
        only={"ffn_config.moe_normalize_expert_weights": (1,)},
        tensors=(
            _router("ffn.router.layer.weight"),
            Tensor(("wi_0",), "ffn.experts.mlp.w1", "EF H"),
            Tensor(("wi_1",), "ffn.experts.mlp.v1", "EF H"),
            Tensor(("wo",), "ffn.experts.mlp.w2", "EF H"),
        ),
    ),
    _row(
        _GPT_OSS,
        "MiniMax-M3",
        "minimax_m3_vl_text",
        sizes={"S": "shared_intermediate_size"},
        fields={"scale": "routed_scaling_factor"},
        fixed={"score": "sigmoid"},
        tensors=(
            *_MIXTRAL["tensors"],
            _bias("block_sparse_moe.e_score_correction_bias"),
            *_mlp("block_sparse_moe.shared_experts"),
        ),
    ),
    _like_deepseek_v3(
        "EXAONE-MoE",
        "exaone_moe",
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        tensors=(*_DEEPSEEK["tensors"], _bias("mlp.e_score_correction_bias")),
    ),
    _row(
        _DEEPSEEK,
        "DeepSeek-V4",
        "deepseek_v4",
        fields={"clamp": "swiglu_limit"},
        fixed={"score": "sqrt_softplus", "normalize": True, "normalize_epsilon": 1e-20}
        | _OWN_DTYPE,
        defaults=_NO_SHARED,
        only={
            "scoring_func": ("sqrtsoftplus",),
            "norm_topk_prob": (True,),
            "n_shared_experts": (1,),
        },
        tensors=(
            _router("ffn.gate.weight"),
            # A layer with a learned choice of experts, or one that chooses by the token's id.
            OneOf(((_bias("ffn.gate.bias"),), _others("ffn.gate.tid2eid"))),
            *_each("ffn.experts", "w1", "w3", "w2"),
            *_mlp("ffn.shared_experts", "w1", "w3", "w2"),
        ),
    ),
    _row(
        _NEMOTRON,
        "Nemotron-H",
        "nemotron_h",
        sizes={"S": "moe_shared_expert_intermediate_size"},
        only={"moe_latent_size": ()},
        tensors=(
            _router("mixer.gate.weight"),
            *_NEMOTRON_EXPERTS,
            Tensor(("shared_wi_0",), "mixer.shared_experts.up_proj.weight", "S H"),
            Tensor(("shared_wo",), "mixer.shared_experts.down_proj.weight", "H S"),
        ),
    ),
    _row(
        _NEMOTRON,
        "Nemotron-H with latent experts",
        "nemotron_h",
        sizes={"H": "moe_latent_size", "D": "hidden_size"},
        tensors=(
            Tensor(("gate",), "mixer.gate.weight", "R D"),
            *_NEMOTRON_EXPERTS,
            *_others(
                "mixer.fc1_latent_proj.weight",
                "mixer.fc2_latent_proj.weight",
                "mixer.shared_experts.up_proj.weight",
                "mixer.shared_experts.down_proj.weight",
            ),
        ),
    ),
    Architecture(
        models="Gemma 4, DiffusionGemma",
        model_types=("gemma4_text", "diffusion_gemma_text"),
        sizes=_QWEN["sizes"],
        fields={"num_experts_per_token": "top_k_experts", "activation": "hidden_activation"},
        fixed=_SOFTMAX,
        tensors=(
            _router("router.proj.weight"),
            Tensor(("expert_scale",), "router.per_expert_scale", "R"),
            *_stacked("experts"),
            *_others("router.scale"),
        ),
    ),
    _like_mixtral(
        "JetMoE, without its experts of attention",
        "jetmoe",
        fields={"activation": "activation_function"},
        tensors=(
            _router("mlp.router.layer.weight"),
            *_stacked("mlp", **_LINEAR),
            *_others("mlp.bias"),
        ),
    ),
    Architecture(
        # Its shared experts have a part in the sum of the weights, so the caller routes.
        models="Inkling, its routed experts",
        model_types=("inkling_text",),
        sizes=_DEEPSEEK["sizes"] | {"F": "moe_intermediate_size|intermediate_size"},
        fields=_K,
        fixed={},
        defaults=_SILU,
        tensors=(
            *_others("mlp.gate.weight", "mlp.gate.bias", "mlp.gate.global_scale"),
            *_stacked("mlp.experts", "E FG H", gate_up="w13_weight", down="w2_weight"),
            *_others("mlp.shared_experts.shared_w13_weight"),
            *_others("mlp.shared_experts.shared_w2_weight"),
        ),
    ),
    Architecture(
        models="Hunyuan 3",
        model_types=("hy_v3",),
        sizes=_QWEN["sizes"] | _SHARED_BY_NUMBER,
        fields=_K | {"scale": "router_scaling_factor"},
        fixed=_SIGMOID | {"normalize": True},
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
        sizes=_QWEN["sizes"] | _SHARED_BY_NUMBER,
        fields=_K | {"scale": "route_scale"},
        fixed=_SIGMOID | {"normalize": True} | _OWN_DTYPE,
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
        sizes=_sizes(
            "moe_num_experts", "intermediate_size", "moe_num_shared_experts*intermediate_size"
        ),
        fields={"num_experts_per_token": "moe_topk", "activation": "hidden_act"},
        fixed=_SOFTMAX,
        only={"mlp_bias": (False,), "hidden_act": ("silu",)},
        tensors=(
            _router("mlp.router.weight"),
            *_stacked("mlp.experts", "E H GF", "E F H", gate_up="fc1.weight", down="fc2.weight"),
            *_mlp("mlp.shared_experts"),
        ),
    ),
    _row(
        _DEEPSEEK_V2,
        "DeepSeek-V2-Lite, DeepSeek-OCR 2, Unlimited OCR",
        "deepseek_v2 deepseek_ocr2_text unlimited_ocr_text",
        only={"topk_method": ("greedy",)},
    ),
    _row(
        _DEEPSEEK_V2,
        "DeepSeek-V2",
        "deepseek_v2 deepseek_ocr2_text unlimited_ocr_text",
        fields={"num_groups": "n_group", "groups_kept": "topk_group"},
        fixed={"group_score": "max"},
        only={"topk_method": ("group_limited_greedy",)},
    ),
    _like_mixtral(
        "Granite MoE, also with shared experts, Granite 4.0",
        "granitemoe granitemoeshared granitemoehybrid",
        sizes={"S": "shared_intermediate_size"},
        defaults={"shared_intermediate_size": 0},
        # Granite computes the softmax over the chosen logits only; see _GPT_OSS.
        tensors=(
            _router("block_sparse_moe.router.layer.weight"),
            *_stacked("block_sparse_moe", **_LINEAR),
            *_GRANITE_SHARED,
        ),
    ),
    _like_mixtral(
        "Granite MoE with sliding windows",
        "granitemoe_swa",
        sizes={"S": "shared_intermediate_size"},
        tensors=(
            _router("block_sparse_moe.router.weight"),
            *_stacked("block_sparse_moe.experts"),
            *_GRANITE_SHARED,
        ),
    ),
    _row(
        _GPT_OSS,
        "GPT-OSS",
        "gpt_oss",
        defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        tensors=(
            *_GPT_OSS_ROUTER,
            OneOf((_stacked("mlp.experts", "E H FG", "E F H"), _GPT_OSS_BLOCKS)),
            Tensor(("wi_0_bias", "wi_1_bias"), "mlp.experts.gate_up_proj_bias", "E FG"),
            Tensor(("wo_bias",), "mlp.experts.down_proj_bias", "E H"),
        ),
    ),
    _row(
        _GPT_OSS,
        "OpenAI Privacy Filter",
        "openai_privacy_filter",
        fixed=_FLOAT32,
        tensors=(
            *_GPT_OSS_ROUTER,
            *_stacked("mlp.experts", "E H GF", "E F H"),
            Tensor(("wi_0_bias", "wi_1_bias"), "mlp.experts.gate_up_proj_bias", "E GF"),
            Tensor(("wo_bias",), "mlp.experts.down_proj_bias", "E H"),
        ),
    ),
    Architecture(
        models="Llama 4",
        model_types=("llama4_text",),
        sizes=_MIXTRAL["sizes"] | {"S": "intermediate_size"},
        fields=_K,
        fixed={"score": "sigmoid", "normalize": False, "weights_on": "input"} | _OWN_DTYPE,
        tensors=(
            _router("feed_forward.router.weight"),
            *_stacked("feed_forward.experts", "E H GF", "E F H"),
            *_mlp("feed_forward.shared_expert"),
        ),
    ),
    Architecture(
        models="ERNIE 4.5",
        model_types=("ernie4_5_moe",),
        sizes=_sizes(
            "moe_num_experts",
            "moe_intermediate_size",
            "moe_num_shared_experts*moe_intermediate_size",
        ),
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
            *_DEEPSEEK["tensors"],
            Tensor(("bias",), "mlp.moe_statics.e_score_correction_bias", "1 R"),
        ),
    ),
    Architecture(
        models="Hunyuan-A13B",
        model_types=("hunyuan_v1_moe", "hunyuan"),
        sizes=_sizes("num_experts", "intermediate_size", "intermediate_size"),
        fields={"num_experts_per_token": "moe_topk", "activation": "hidden_act"},
        fixed={"score": "softmax"} | _SUM,
        only={"norm_topk_prob": (True,)},
        tensors=(_router("mlp.gate.wg.weight"), _EXPERTS, *_mlp("mlp.shared_mlp")),
    ),
    Architecture(
        models="LFM2-MoE",
        model_types=("lfm2_moe",),
        sizes=_sizes("num_experts", "moe_intermediate_size"),
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
        sizes=_sizes("n_routed_experts", "expert_ffn_hidden_size"),
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
        sizes=_sizes("num_experts", "intermediate_size"),
        fields=_K,
        fixed={"score": "softmax", "normalize": False} | _OWN_DTYPE,
        tensors=(_router("feed_forward.router.weight"), *_each("feed_forward.experts")),
    ),
)


# Lists values of `model_type` by what precedes "layers." in published tensor names: of a decoder
# alone, and of a decoder that is a part of a multimodal model.
_ROOTS = {
    ("model.", "model."): "dots3_note_text deepseek_ocr2_text unlimited_ocr_text hy_v4_vl_text "
    "step3p5",
    ("model.language_model.", "model.language_model."): "qwen3_5_moe_text qwen4_exp_text "
    "glm5_next_text glm5_next qwen3_vl_moe_text glm4v_moe_text",
    ("model.", "model.language_model."): "gemma4_text",
    ("model.", "model.llm."): "inkling_text",
    ("model.", "model.decoder."): "diffusion_gemma_text",
    ("model.", "thinker.model."): "qwen3_omni_moe_text",
    ("model.", "talker.model."): "qwen3_omni_moe_talker_text",
    ("model.", ""): "mistral_large4_text",
    ("", "language_model."): "deepseek_v4",
    ("language_model.model.", "language_model.model."): "llama4_text",
    ("backbone.", "language_model.backbone."): "nemotron_h",
    ("transformer.", "language_model.transformer."): "dbrx",
}
_OTHER_ROOTS = ("model.", "language_model.model.")


def root_parts() -> tuple[str, ...]:
    """Returns the words that may precede "layers." or "blocks." in published tensor names."""
    roots = [root for pair in (_OTHER_ROOTS, *_ROOTS) for root in pair]
    return tuple(dict.fromkeys(part for root in roots for part in root.split(".") if part))


def published_root(model_type: str, is_multimodal: bool) -> str:
    """Returns the beginning of tensor names, "model.layers." or the like; see `_ROOTS`."""
    pairs = (pair for pair, models in _ROOTS.items() if model_type in models.split())
    alone, in_multimodal = next(pairs, _OTHER_ROOTS)
    root = in_multimodal if is_multimodal else alone
    return root + ("blocks." if model_type == "dbrx" else "layers.")


def architectures() -> dict[str, Architecture]:
    """Returns a dict from each supported `model_type` of config.json to its first architecture."""
    return {model_type: row for row in reversed(TABLE) for model_type in row.model_types}
