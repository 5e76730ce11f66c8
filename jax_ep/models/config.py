"""The sizes and options of a `jax_ep.models` decoder, from a published config.json or by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ep.checkpoints.block import new_block
from jax_ep.checkpoints.config import Keys, look_up
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams, ParameterOptions

# The window of a layer that attends to all earlier tokens.
NO_WINDOW = 2**30


class Yarn(NamedTuple):
    """How YaRN (Peng et al., 2023) stretches a rotary embedding to longer contexts.

    A pair of values that rotates at least `fast` times within the original context keeps its
    frequency. The frequency of one that rotates at most `slow` times is divided by `factor`. Pairs
    in between get a weighted mean of both.
    """

    factor: float  # by how much the context is longer
    context: int  # the number of tokens of the original context
    fast: float = 32
    slow: float = 1
    truncate: bool = True  # whether the two limits are rounded to whole pairs
    scale: float | None = None  # of cosine and sine; None: computed from `factor`


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and options of a decoder-only model with an MoE block in every layer; hashable."""

    vocab: int  # V
    hidden: int  # H, the width of the residual stream
    num_layers: int
    num_heads: int  # of queries
    num_key_value_heads: int  # divides `num_heads`
    head_dim: int  # D
    mlp_dim: int  # F, the hidden width of one expert
    moe: MoEConfig  # the options of the MoE blocks
    parameters: ParameterOptions = ParameterOptions()  # of the MoE blocks
    epsilon: float = 1e-6  # that RMSNorm adds to the mean square
    rotary_base: float = 1e6  # of the rotary embedding's wavelengths
    yarn: Yarn | None = None
    # How many tokens a token attends to, itself included, in layers 0, 1, ...; the windows repeat
    # if there are more layers.
    windows: tuple[int, ...] = (NO_WINDOW,)
    qk_norm: bool = True  # whether queries and keys are normalized
    attention_bias: bool = False  # whether attention's projections have biases
    sinks: bool = False  # whether attention's softmax has a score without a value for each head
    tied: bool = False  # whether the output matrix is the embedding
    stop_tokens: tuple[int, ...] = ()  # the ids of the tokens that end a sequence

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, but is {self.head_dim}.")
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_key_value_heads={self.num_key_value_heads}, "
                f"but is {self.num_heads}."
            )

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    @property
    def num_experts_per_token(self) -> int:
        return self.moe.num_experts_per_token

    def replace(self, **changes: Any) -> DecoderConfig:
        """Returns the configuration with changed fields: its own, or of `moe` and `parameters`."""
        parts: dict[str, Any] = {}
        for name in ("moe", "parameters"):
            part = getattr(self, name)
            names = {field.name for field in dataclasses.fields(part)} & changes.keys()
            parts[name] = dataclasses.replace(part, **{n: changes.pop(n) for n in names})
        return dataclasses.replace(self, **(parts | changes))

    @classmethod
    def of(cls, published: Mapping[str, Any], path: Path = Path()) -> DecoderConfig:
        """Makes the configuration of a Qwen3-MoE or GPT-OSS from its config.json, `published`."""
        # ValueError, for another model or a value that is not supported, names the folder `path`.
        model_type = published.get("model_type")
        for name, value, allowed in (
            ("model_type", model_type, ("qwen3_moe", "gpt_oss")),
            ("mlp_only_layers", published.get("mlp_only_layers") or [], ([],)),
            ("decoder_sparse_step", published.get("decoder_sparse_step", 1), (1,)),
            ("use_sliding_window", bool(published.get("use_sliding_window")), (False,)),
        ):
            if value not in allowed:
                raise ValueError(
                    f"{name} of {path / 'config.json'} must be {' or '.join(map(repr, allowed))}, "
                    f"but is {value!r}."
                )
        is_gpt_oss = model_type == "gpt_oss"
        block = new_block(published, 0, path)  # of layer 0, to which all others are equal
        keys = look_up(path, 0, published)
        # `ParameterOptions` depend on which parameters there are, and not on their dtypes.
        shapes: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(block.shape(name), np.float32) for name in block.params()
        }
        layers = keys.value("num_hidden_layers")
        windows = [NO_WINDOW]
        if is_gpt_oss:
            kinds = published.get("layer_types") or ["sliding_attention", "full_attention"]
            slides = (kind == "sliding_attention" for kind in kinds[:layers])
            windows = [keys.value("sliding_window") if each else NO_WINDOW for each in slides]
        rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
        heads, hidden = keys.value("num_attention_heads"), keys.value("hidden_size")
        stop = published.get("eos_token_id")  # a token id, a list of them, or None
        return cls(
            vocab=keys.value("vocab_size"),
            hidden=hidden,
            num_layers=layers,
            num_heads=heads,
            num_key_value_heads=keys.value("num_key_value_heads"),
            head_dim=published.get("head_dim") or hidden // heads,
            mlp_dim=block.sizes["F"],
            moe=MoEConfig(**dict(block.fields)),
            parameters=ParameterOptions.of_params(MoEParams.of(**shapes)),
            epsilon=keys.value("rms_norm_eps"),
            rotary_base=rope.get("rope_theta") or keys.value("rope_theta"),
            yarn=_yarn(rope, keys),
            windows=tuple(windows),
            qk_norm=not is_gpt_oss,
            attention_bias=published.get("attention_bias", is_gpt_oss),
            sinks=is_gpt_oss,
            tied=published.get("tie_word_embeddings", False),
            stop_tokens=() if stop is None else tuple(np.atleast_1d(stop).tolist()),
        )

    def rotary(self) -> tuple[np.ndarray, float]:
        """Returns the rotary embedding's frequencies [D / 2] and its factor on cosine and sine.

        Pair i of the values of a head is rotated by position * frequencies[i] radians.
        """
        width, base, yarn = self.head_dim, self.rotary_base, self.yarn
        frequencies = base ** (-np.arange(0, width, 2) / width)
        if yarn is None:
            return frequencies.astype(np.float32), 1.0

        # The (fractional) index of the pair that rotates `turns` times within the context.
        def pair(turns: float) -> float:
            return width * math.log(yarn.context / (turns * 2 * math.pi)) / (2 * math.log(base))

        # Up to pair `low`, frequencies are kept; from pair `high` on, they are divided by `factor`.
        low, high = pair(yarn.fast), pair(yarn.slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The published code also limits `high` so, although there are only width / 2 pairs.
        low, high = max(low, 0), min(high, width - 1)
        # For each pair, 0 where its frequency is kept, 1 where it is divided by `factor`.
        slowed = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
        # Without a published scale, the one that the YaRN paper recommends.
        scale = yarn.scale or 0.1 * math.log(max(yarn.factor, 1)) + 1
        return (frequencies * (1 - slowed + slowed / yarn.factor)).astype(np.float32), scale

    def window(self, layer: int) -> int:
        return self.windows[layer % len(self.windows)]

    def active_params(self) -> int:
        """Returns the number of parameters that are used to compute one token, without biases."""
        # The embedding is only looked up, but the output matrix [V, H] counts.
        queries, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        # q_proj and o_proj, k_proj and v_proj, and the norms of queries and keys.
        attention = 2 * self.hidden * (queries + keys) + 2 * self.head_dim * self.qk_norm
        experts = self.num_experts_per_token + self.parameters.num_shared_experts
        moe = self.hidden * self.num_experts + experts * 3 * self.hidden * self.mlp_dim
        layer = attention + moe + 2 * self.hidden  # with both norms of the hidden states
        return self.num_layers * layer + self.hidden + self.vocab * self.hidden

    def training_flops_per_token(self, seq_len: int) -> float:
        """Returns the FLOPs of a token, forward and backward, in sequences of `seq_len` tokens."""
        # An active parameter takes 6 FLOPs. Tokens attend to S / 2 keys on average, by 2 products;
        # shorter windows are not considered.
        attention = self.num_layers * seq_len * self.num_heads * self.head_dim
        return 6.0 * (self.active_params() + attention)


def _yarn(rope: Mapping[str, Any], keys: Keys) -> Yarn | None:
    """Reads YaRN from `rope`, the rotary embedding's options in config.json; None without it."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope_type of {keys.file} must be 'default' or 'yarn', but is {kind!r}.")
    context = rope.get("original_max_position_embeddings")
    return Yarn(
        factor=keys.value("rope_parameters.factor|rope_scaling.factor"),
        context=context or keys.value("max_position_embeddings"),
        fast=rope.get("beta_fast") or 32,
        slow=rope.get("beta_slow") or 1,
        truncate=rope.get("truncate", True),
        scale=rope.get("attention_factor"),
    )


_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# The contents of config.json of models with random weights, by name: of published models, and of
# tiny ones.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3,
    "gpt-oss-20b": _GPT_OSS,
    "tiny": _QWEN3
    | _TINY
    | {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    "tiny-gpt-oss": _GPT_OSS
    | _TINY
    | {"intermediate_size": 128, "num_local_experts": 8, "sliding_window": 8},
}
# The sizes of a `DecoderConfig`, and their keys in the config.json of a Qwen3-MoE.
SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "moe_intermediate_size",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
}
MODELS = {name: DecoderConfig.of(published) for name, published in PUBLISHED.items()}
# A model with the sizes of DeepSeek-V3, but with grouped-query attention in place of multi-head
# latent attention.
MODELS["deepseek-v3-like"] = MODELS["qwen3-30b-a3b"].replace(
    vocab=129280,
    hidden=7168,
    num_layers=61,
    num_heads=64,
    num_key_value_heads=8,
    mlp_dim=2048,
    num_experts=256,
    num_shared_experts=1,
    score="sigmoid",
)
