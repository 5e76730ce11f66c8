"""Low-rank adapters (LoRA) of frozen experts: each matrix acts as W + lora_scale * A @ B.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.formats import QuantizedArray
from jax_ep.matmul.api import grouped_matmul
from jax_ep.matmul.gating import gated
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import Experts
from jax_ep.moe.expert_mlp import add_output_bias
from jax_ep.moe.params import MoEParams, default_kernel_init, per_expert
from jax_ep.placement.weights import ADAPTERS
from jax_ep.runtime.jax_compat import is_traced


def init_lora(params: MoEParams, rank: int, key: jax.Array) -> MoEParams:
    """Adds adapters to the experts' matrices, with which the layer's output is the same at first.

    Args:
        params: the parameters of a layer; the experts' matrices may be quantized.
        rank: r, the inner size of the adapters.
        key: a random key, of which the A of each adapter is drawn; each B is 0.

    Returns:
        `params` with adapters of wi_0, wi_1 (unless it is None) and wo, in their dtype. An adapter
        is sharded like its matrix, in the same memory, but not along r; the adapter of a quantized
        matrix along E only.

    Raises:
        TypeError, ValueError: `rank` is not an integer of at least 1.
    """
    rank = checks.check_integer("rank", rank)
    keys = iter(jax.random.split(key, len(ADAPTERS)))
    for name in ADAPTERS:
        matrix = getattr(params, name[: name.index("_lora")])
        if matrix is None:
            continue
        held, rows, columns = matrix.shape
        is_a = name.endswith("a")
        init: Any = per_expert(default_kernel_init) if is_a else jax.nn.initializers.zeros
        shape = (held, rows, rank) if is_a else (held, rank, columns)
        make = jax.jit(init, static_argnums=(1, 2), out_shardings=_sharding_of(name, matrix))
        params = params._replace(**{name: make(next(keys), shape, matrix.dtype)})
    return params


def _sharding_of(name: str, matrix: jax.Array | QuantizedArray) -> Sharding | None:
    """Returns the sharding of the adapter `name`; None if none was chosen for its matrix."""
    values = matrix.values if isinstance(matrix, QuantizedArray) else matrix
    sharding = getattr(values, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        is_chosen = isinstance(sharding, SingleDeviceSharding) and values.committed
        return sharding if is_chosen else None
    spec = (*sharding.spec, None, None, None)
    if isinstance(matrix, QuantizedArray):
        return sharding.update(spec=PartitionSpec(spec[0]))
    # A has the rows of the matrix, B its columns; r is not split.
    rows, columns = (spec[1], None) if name.endswith("a") else (None, spec[2])
    return sharding.update(spec=PartitionSpec(spec[0], rows, columns))


def merge_lora(params: MoEParams, lora_scale: float) -> MoEParams:
    """Adds each adapter to its matrix, W + lora_scale * A @ B, and removes the adapters.

    `lora_scale` is that of the layer's `MoEConfig`. The sums are computed in float32 and rounded to
    the dtype of the matrix, whose sharding and kind of memory they get; quantized matrices that
    have adapters are dequantized. With the result, the layer computes the same up to rounding.
    """
    merged: dict[str, Any] = dict.fromkeys(ADAPTERS)
    for name in ("wi_0", "wi_1", "wo"):
        a, b = (getattr(params, f"{name}_lora_{which}") for which in "ab")
        if a is None:
            continue
        matrix = getattr(params, name)
        if isinstance(matrix, QuantizedArray):
            matrix = matrix.dequantize()
        w, a, b = (_on_devices(x).astype(jnp.float32) for x in (matrix, a, b))
        total = (w + lora_scale * jnp.einsum("ehr,erf->ehf", a, b)).astype(matrix.dtype)
        merged[name] = jax.device_put(total, matrix.sharding) if _is_placed(matrix) else total
    return params._replace(**merged)


def _is_placed(array: jax.Array) -> bool:
    return not is_traced(array) and getattr(array, "committed", False)


def _on_devices(array: jax.Array) -> jax.Array:
    """Moves an array to the devices' memory: XLA computes nothing in the host's memory."""
    if not _is_placed(array):
        return array
    sharding: Any = array.sharding
    return jax.device_put(array, sharding.with_memory_kind(None))


def adapted_mlp(
    tokens: jax.Array, experts: Experts, group_sizes: jax.Array, config: MoEConfig
) -> jax.Array:
    """Runs experts that have adapters on received tokens [R, H]; returns [R, H]."""
    wide = wide_dtype(tokens.dtype)

    def product(x: jax.Array, matrices: Any) -> jax.Array:
        return grouped_matmul(x, matrices, group_sizes, implementation=config.matmul_implementation)

    def adapted_product(x: jax.Array, name: str) -> jax.Array:
        # x @ W + lora_scale * (x @ A) @ B for the matrices W called `name`.
        out = product(x, lax.stop_gradient(getattr(experts, name)))
        if (a := experts.adapters.get(f"{name}_lora_a")) is None:
            return out
        b = experts.adapters[f"{name}_lora_b"]
        low = product(product(x, a.astype(x.dtype)), b.astype(x.dtype))
        return (out.astype(wide) + config.lora_scale * low.astype(wide)).astype(out.dtype)

    names = ("wi_0",) if experts.wi_1 is None else ("wi_0", "wi_1")
    products = [adapted_product(tokens, name) for name in names]
    hidden = gated(config.unit(), *products, biases=experts.biases[:2], groups=group_sizes)
    return add_output_bias(adapted_product(hidden, "wo"), experts, group_sizes)
