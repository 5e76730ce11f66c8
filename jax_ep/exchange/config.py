"""The static arguments of an exchange, in either layout, and of the one that its gradient makes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jax_ep.exchange import primitives, quantization
from jax_ep.exchange.primitives import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the custom gradients need to know; a layout may add parameters of its primitives."""

    axis_name: tuple[str, ...]
    num_experts: int
    implementation: Implementation
    implementation_of_cotangents: Implementation
    wire_dtype: jnp.dtype | None = None
    grad_wire_dtype: jnp.dtype | None = None
    quantized: bool = False  # whether rows are handed out as they came

    @classmethod
    def of(
        cls,
        name: Literal["x", "y"],
        rows: jax.Array,
        *,
        top_k: int,
        implementation: Implementation,
        wire_dtype: jax.typing.DTypeLike | None,
        grad_wire_dtype: jax.typing.DTypeLike | None,
        **parameters: Any,
    ) -> Self:
        """Of rows "x" to be sent, or "y" to be summed; checks the dtypes and what can serve."""
        wire_dtypes = quantization.both_checked(name, rows, wire_dtype, grad_wire_dtype)
        serving, serving_cotangents = primitives.choose_implementations(
            implementation,
            rows,
            axis_name=parameters["axis_name"],
            top_k=top_k,
            num_experts=parameters["num_experts"],
            wire_dtypes=wire_dtypes,
        )
        return cls(
            implementation=serving,
            implementation_of_cotangents=serving_cotangents,
            wire_dtype=wire_dtypes[0],
            grad_wire_dtype=wire_dtypes[1],
            **parameters,
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the primitives that every direction shares."""
        others = ("implementation_of_cotangents", "wire_dtype", "grad_wire_dtype", "quantized")
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name not in others}

    @property
    def of_cotangents(self) -> Self:
        return dataclasses.replace(
            self,
            implementation=self.implementation_of_cotangents,
            wire_dtype=self.grad_wire_dtype,
            grad_wire_dtype=None,
            quantized=False,
        )
