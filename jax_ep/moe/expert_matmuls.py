"""Defines the experts' matmuls and their gradients: of arrays, in float8, of stored matrices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_ep import checks
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.formats.quantized_array import refuse_tangents, without_gradient
from jax_ep.matmul import float8, unquantized, weight_only
from jax_ep.matmul.float8 import QuantizedMatrices
from jax_ep.matmul.gating import Gating, filled_biases
from jax_ep.matmul.primitives import Implementation
from jax_ep.matmul.weight_only import dequantized, dequantized_as_stored
from jax_ep.placement.weights import ADAPTERS
from jax_ep.runtime import jax_compat
from pallas_kernels.matmul.chosen_groups import Groups
from pallas_kernels.matmul.row_blocks import TransposedRows, row_blocks

_ONCE = (
    "matmul_dtype must be None where second derivatives are taken, since float8 matmuls have first "
    "derivatives only."
)
# The gate's gradient is computed for used rows only if a buffer has at least this many times the
# rows that are used on average. If most rows are used, XLA's pass over all rows is as fast.
_MOSTLY_UNUSED = 2


def check_matmul_dtype(dtype: Any) -> None:
    if checks.floating(dtype) != float8.DTYPE:
        name = jnp.dtype(float8.DTYPE).name
        raise ValueError(f"matmul_dtype must be None or {name}, but is {dtype!r}.")


class QuantizedExperts(NamedTuple):
    """The matrices wi_0, wi_1 (or None) and wo in float8, as `quantize_experts` returns them."""

    wi_0: QuantizedMatrices
    wi_1: QuantizedMatrices | None
    wo: QuantizedMatrices

    @property
    def wi(self) -> tuple[QuantizedMatrices, ...]:
        return (self.wi_0,) if self.wi_1 is None else (self.wi_0, self.wi_1)


EXPERT_MATRICES = QuantizedExperts._fields  # "wi_0", "wi_1" and "wo"


class Experts(NamedTuple):
    """The weights of experts, with the shapes of `expert_mlp`; wi_1 and the biases may be None.

    `quantized` has the float8 operands. `sums`, in the backward pass of token chunks, has the sums
    of the gradients of earlier chunks, for wi_0, any wi_1 and wo. Their gradients are the new sums;
    the matrices then get none. So matmuls must use `sums` exactly once.
    """

    wi_0: Any
    wi_1: Any | None
    wo: Any
    wi_0_bias: jax.Array | None = None
    wi_1_bias: jax.Array | None = None
    wo_bias: jax.Array | None = None
    quantized: QuantizedExperts | None = None
    sums: tuple[jax.Array, ...] | None = None
    wi_0_lora_a: jax.Array | None = None
    wi_0_lora_b: jax.Array | None = None
    wi_1_lora_a: jax.Array | None = None
    wi_1_lora_b: jax.Array | None = None
    wo_lora_a: jax.Array | None = None
    wo_lora_b: jax.Array | None = None

    @property
    def wi(self) -> tuple[Any, ...]:
        return (self.wi_0,) if self.wi_1 is None else (self.wi_0, self.wi_1)

    @property
    def sums_of_wi_and_wo(self) -> tuple[Any, Any]:
        """Returns the sums for wi_0 and any wi_1, and the sum for wo, as tuples; or None twice."""
        return (None, None) if self.sums is None else (self.sums[:-1], self.sums[-1:])

    @property
    def adapters(self) -> dict[str, jax.Array]:
        named = {name: getattr(self, name) for name in ADAPTERS}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def biases(self) -> tuple[jax.Array | None, ...]:
        return self.wi_0_bias, self.wi_1_bias, self.wo_bias


@dataclasses.dataclass(frozen=True)
class ExpertMatmuls:
    """Computes the experts' grouped matmuls on arrays; C is H or F.

    Without `zero_unused`, rows of a result past the last group are undefined. `grad_rows` are the
    cotangents of the experts' output.
    """

    unit: Gating  # the function between the matmuls; of one array for experts without wi_1
    implementation: Implementation
    # Whether the matrices are stored quantized, and get no gradient.
    is_stored: bool = False

    # Whether `gated_hidden` adds the biases of wi_0 and wi_1 to the products.
    gates_with_biases = True

    def differentiated_once(self, tree: Any) -> Any:
        """Returns `tree`; float8 matmuls refuse second derivatives with respect to it."""
        return tree

    def as_operand(self, x: jax.Array) -> Any:
        """Converts rows [R, C] to the form in which other methods take `rows` and `grad_rows`."""
        return x

    def residual_experts(self, experts: Experts) -> Experts:
        """Returns the part of the experts' weights that the backward pass reads."""
        return experts

    def as_residual(self, product: jax.Array) -> Any:
        """Converts a product [R, F] to the form that is kept for the backward pass."""
        return product

    def as_array(self, kept: Any, dtype: Any) -> jax.Array:
        """Converts a result of `as_operand` or `as_residual` to an array."""
        return kept

    def gated_hidden(
        self, rows: Any, experts: Experts, groups: Groups, keep: bool
    ) -> tuple[Any, ...]:
        """Returns unit(x @ wi_0, x @ wi_1), an operand; with `keep`, both products as residuals."""
        wi_0, wi_1 = experts.wi
        return unquantized.gated_product_of_arrays(
            rows,
            (wi_0, wi_1),
            groups,
            self.unit,
            keep,
            self.implementation,
            zero_unused=False,
            biases=filled_biases(experts.biases[:2]),
        )

    def times(
        self, rows: Any, experts: Experts, name: str, groups: Groups, dtype: Any, zero_unused: bool
    ) -> jax.Array:
        """Multiplies rows by the matrices called `name`; returns [R, C], of `dtype` if float8."""
        return unquantized.product_of_arrays(
            rows, getattr(experts, name), groups, self.implementation, zero_unused=zero_unused
        )

    def dhidden(
        self, grad_rows: Any, experts: Experts, group_sizes: jax.Array, dtype: Any
    ) -> jax.Array:
        """Returns the gradient [R, F] of the hidden values; `dtype` is as in `times`."""
        return unquantized.product_of_arrays(
            grad_rows,
            experts.wo,
            group_sizes,
            self.implementation,
            transpose_rhs=True,
            zero_unused=False,
        )

    def gate_gradient(
        self,
        dhidden: jax.Array,
        pre: Sequence[Any],
        weights: jax.Array | None,
        group_sizes: jax.Array,
        mean_rows: int | None,
    ) -> tuple[Any, Any, jax.Array | None] | None:
        """Returns weights[:, None] * unit(*pre), and the gradients of `pre` and the weights [R].

        `pre` are the products [R, F], as `as_residual` returned them. `mean_rows` is the number of
        rows in groups, averaged over ranks; None: unknown. The result is None where the caller must
        compute all rows by XLA.
        """
        # The kernel has two products and weights.
        if len(pre) != 2 or weights is None or mean_rows is None:
            return None
        num_rows = dhidden.shape[0]
        if checks.is_symbolic(num_rows) or checks.is_symbolic(mean_rows):
            return None
        # JAX would report NaNs in rows past the last group, which the kernel leaves undefined.
        if num_rows < _MOSTLY_UNUSED * mean_rows or jax_compat.looks_for_nans():
            return None
        hidden, *dpre, dweights = unquantized.gate_gradient(
            self.unit, dhidden, tuple(pre), weights, group_sizes, self.implementation
        )
        return hidden, dpre, dweights

    def gradients(
        self,
        rows: Any,
        hidden: Any,
        dpre: Sequence[Any],
        grad_rows: Any,
        experts: Experts,
        group_sizes: jax.Array,
        zero_unused: bool,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        """Returns the gradients of the tokens, of wi_0 and wi_1, and of wo.

        The gradients of matrices are added to `experts.sums`, if given. `hidden` [R, F], multiplied
        by the rows' weights if there are any, and `dpre`, the gradients of the products, may be
        arrays or results of `gate_gradient`.
        """
        drhs = functools.partial(
            unquantized.drhs_of_each, group_sizes=group_sizes, implementation=self.implementation
        )
        sums_of_wi, sums_of_wo = experts.sums_of_wi_and_wo
        (dwo,) = drhs(hidden, (grad_rows,), sums=sums_of_wo)
        dwi = drhs(rows, tuple(dpre), sums=sums_of_wi)
        # The gradient of the tokens waits for the gradient of wo, so that it takes the memory of
        # `grad_rows`. It does not wait for the gradients of wi_0 and wi_1, so it may be sent to
        # other hosts while they are computed.
        dpre, dwo = lax.optimization_barrier((tuple(dpre), dwo))
        pairs = tuple(zip(dpre, experts.wi, strict=True))
        dtokens = unquantized.sum_of_products(
            pairs, group_sizes, self.implementation, transpose_rhs=True, zero_unused=zero_unused
        )
        return dtokens, dwi, dwo


@dataclasses.dataclass(frozen=True)
class Float8Matmuls(ExpertMatmuls):
    """Quantizes the operands of each matmul to float8; gradients are straight-through.

    Float8 matmuls contract the last axis of both operands. So x @ w reads the transpose of w,
    and the gradients of matrices, which are sums over rows, read transposed rows (`…_t`).
    """

    gates_with_biases = False

    def differentiated_once(self, tree):
        # JAX differentiates neither the forward nor the backward pass for a first derivative. For a
        # second one it does, and quantization, which passes no tangents, would give zeros.
        def checked(leaf: Any) -> Any:
            return leaf if isinstance(leaf, QuantizedArray) else refuse_tangents(_ONCE, leaf)

        return jax.tree.map(checked, tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))

    def as_operand(self, x: jax.Array | QuantizedArray) -> QuantizedArray:
        if not isinstance(x, QuantizedArray):
            return float8.quantize_rows(x)
        # Rows in another format are dequantized, and quantized again.
        operand = float8.rows_as_operand(x)
        return float8.quantize_rows(x.dequantize()) if operand is None else operand

    def residual_experts(self, experts: Experts) -> Experts:
        # Of the quantized matrices, the backward pass does not read the transposed copies. Of the
        # unquantized wi_0, wi_1 and wo, it reads only the dtypes, so empty arrays replace them.
        assert experts.quantized is not None
        dtypes: dict[str, Any] = {
            name: jnp.zeros(0, matrices.dtype)
            for name in EXPERT_MATRICES
            if (matrices := getattr(experts, name)) is not None
        }
        not_transposed: list[Any] = [
            None if matrices is None else matrices._replace(transposed=None)  # type: ignore
            for matrices in experts.quantized
        ]
        return experts._replace(**dtypes, quantized=QuantizedExperts(*not_transposed))

    def as_residual(self, product: jax.Array) -> QuantizedArray:
        return float8.quantize_rows(product)

    def as_array(self, kept: Any, dtype: Any) -> jax.Array:
        return kept.dequantize(dtype) if isinstance(kept, QuantizedArray) else kept

    def gated_hidden(self, rows, experts, groups, keep):
        wi_0, wi_1 = (matrices.transposed for matrices in experts.quantized.wi)
        return float8.gated_product_of_float8(
            rows, (wi_0, wi_1), groups, self.unit, keep, self.implementation
        )

    def times(self, rows, experts, name, groups, dtype, zero_unused):
        pairs = [(rows, getattr(experts.quantized, name).transposed)]
        return float8.product_of_float8(pairs, groups, dtype, self.implementation, zero_unused)

    def dhidden(self, grad_rows, experts, group_sizes, dtype):
        pairs = [(grad_rows, experts.quantized.wo.matrices)]
        return float8.product_of_float8(
            pairs, group_sizes, dtype, self.implementation, zero_unused=False
        )

    def gate_gradient(self, dhidden, pre, weights, group_sizes, mean_rows):
        # The kernel takes two products. It is used for any `mean_rows`.
        if len(pre) != 2:
            return None
        num_rows = dhidden.shape[0]
        blocks, _ = row_blocks(group_sizes, num_rows)
        row_weights = jnp.ones(num_rows, jnp.float32) if weights is None else weights
        results = float8.gate_gradient(
            self.unit, dhidden, pre, row_weights, blocks, self.implementation
        )
        return results.hidden, results.dpre, None if weights is None else results.dweights

    def gradients(self, rows, hidden, dpre, grad_rows, experts, group_sizes, zero_unused):
        blocks, group_blocks = row_blocks(group_sizes, rows.shape[0])

        # `transpose(x)` returns the rows x, or None without `return_rows`, and their transpose.
        transpose = functools.partial(
            float8.transpose_rows, blocks=blocks, implementation=self.implementation
        )

        def drhs(lhs, grads, dtype, sums):
            return float8.drhs_of_each(lhs, grads, group_blocks, dtype, self.implementation, sums)

        sums_of_wi, sums_of_wo = experts.sums_of_wi_and_wo
        hidden_t = hidden if isinstance(hidden, TransposedRows) else transpose(hidden)[1]
        _, grad_t = transpose(grad_rows)
        (dwo,) = drhs(hidden_t, [grad_t], experts.wo.dtype, sums_of_wo)
        # Each gradient twice, as rows and transposed, as `gate_gradient` returns it.
        dpre_twice = [
            each if isinstance(each, tuple) else transpose(each, return_rows=True) for each in dpre
        ]
        # The gradient of the tokens waits for that of wo, as in `ExpertMatmuls.gradients`.
        dpre_rows, dwo = lax.optimization_barrier(([grads for grads, _ in dpre_twice], dwo))
        _, rows_t = transpose(rows)
        dpre_t = [each_t for _, each_t in dpre_twice]
        dwi = drhs(rows_t, dpre_t, experts.wi_0.dtype, sums_of_wi)
        matrices = [wi.matrices for wi in experts.quantized.wi]
        pairs = list(zip(dpre_rows, matrices, strict=True))
        dtokens = float8.product_of_float8(
            pairs, group_sizes, rows.dtype, self.implementation, zero_unused
        )
        return dtokens, dwi, dwo


@dataclasses.dataclass(frozen=True)
class WeightOnlyMatmuls(ExpertMatmuls):
    """Multiplies rows by matrices that are stored quantized, without quantizing the rows."""

    # The forward pass reads matrices as they are stored, if a kernel knows their format. All other
    # matmuls dequantize matrices right before they multiply.

    def gated_hidden(self, rows, experts, groups, keep):
        return weight_only.product_of_stored(
            rows,
            experts.wi,
            experts.biases[:2],
            groups,
            gating=self.unit,
            implementation=self.implementation,
            keep=keep,
            zero_unused=False,
        )

    def times(self, rows, experts, name, groups, dtype, zero_unused):
        (out,) = weight_only.product_of_stored(
            rows,
            matrices=[getattr(experts, name)],
            biases=[None],
            groups=groups,
            implementation=self.implementation,
            zero_unused=zero_unused,
        )
        return out

    def dhidden(self, grad_rows, experts, group_sizes, dtype):
        dense, is_transposed = dequantized_as_stored(experts.wo, experts.wo.dtype)
        return unquantized.product_of_arrays(
            grad_rows,
            dense,
            group_sizes,
            self.implementation,
            transpose_rhs=not is_transposed,
            zero_unused=False,
        )

    def gradients(self, rows, hidden, dpre, grad_rows, experts, group_sizes, zero_unused):
        dense = {
            name: dequantized(matrices, matrices.dtype)
            for name in EXPERT_MATRICES
            if (matrices := getattr(experts, name)) is not None
        }
        experts = experts._replace(**dense)
        return super().gradients(rows, hidden, dpre, grad_rows, experts, group_sizes, zero_unused)


def with_quantized(matmul_dtype: Any, experts: Experts, implementation: Implementation) -> Experts:
    """Sets `quantized` for a `matmul_dtype`; refuses gradients of stored quantized matrices."""
    names = EXPERT_MATRICES
    # Arrays keep their gradients.
    constant = {name: without_gradient(name, getattr(experts, name)) for name in names}
    experts = experts._replace(**constant)
    if matmul_dtype is None or experts.quantized is not None:
        return experts
    return experts._replace(quantized=quantize_of_rank(constant, implementation))


def matmuls_of(
    unit: Gating, matmul_dtype: Any, experts: Experts, implementation: Implementation
) -> tuple[ExpertMatmuls, Experts]:
    """Returns the matmuls of arrays, float8 or stored matrices, and `experts` as they take them."""
    is_stored = isinstance(experts.wi_0, QuantizedArray)
    of_arrays = WeightOnlyMatmuls if is_stored else ExpertMatmuls
    kind = of_arrays if matmul_dtype is None else Float8Matmuls
    experts = with_quantized(matmul_dtype, experts, implementation)
    return kind(unit, implementation, is_stored), experts


def specs_of_quantized(
    quantized: QuantizedExperts, specs: Mapping[str, PartitionSpec]
) -> QuantizedExperts:
    """Returns how both copies of each matrix are split, given the specs of the matrices."""

    def of_matrices(name: str, matrices: QuantizedMatrices | None) -> Any:
        if matrices is None:
            return None
        spec = specs[name]
        transposed = PartitionSpec(spec[0], spec[2], spec[1])
        return QuantizedMatrices(
            jax.tree.map(lambda _: spec, matrices.matrices),
            jax.tree.map(lambda _: transposed, matrices.transposed),
        )

    return QuantizedExperts(*(of_matrices(*item) for item in quantized._asdict().items()))


def check_are_arrays(must: str, experts: Any) -> None:
    """Raises ValueError if a matrix is a `QuantizedArray`; `must` begins the message."""
    for name in EXPERT_MATRICES:
        if isinstance(matrices := getattr(experts, name), QuantizedArray):
            raise ValueError(
                f"{must} where {name} is a QuantizedArray, here in the format "
                f"{matrices.format.name}: it is stored quantized already."
            )


def check_same_kind(experts: Any, names: Sequence[str]) -> None:
    given = {name: m for name in names if (m := getattr(experts, name)) is not None}
    if len({isinstance(matrices, QuantizedArray) for matrices in given.values()}) > 1:
        kinds = ", ".join(f"{name} is {checks.described(m)}" for name, m in given.items())
        raise TypeError(
            f"{', '.join(given)} must all be arrays or all be QuantizedArrays, but {kinds}."
        )


def quantize_of_rank(given: Mapping[str, Any], implementation: Implementation) -> QuantizedExperts:
    """Quantizes a rank's wi_0, any wi_1, and wo, unless float8 matmuls take their format."""

    def quantize(name: str, matrices: Any) -> QuantizedMatrices | None:
        if matrices is None:
            return None
        FLOAT8_MATRICES.check_shape(name, matrices.shape)
        if isinstance(matrices, QuantizedArray):
            if (operands := float8.matrices_as_operands(matrices)) is not None:
                return operands
            matrices = dequantized(matrices, matrices.dtype)
        return float8.quantize_matrices(lax.stop_gradient(matrices), implementation)

    found: dict[str, Any] = {name: quantize(name, matrices) for name, matrices in given.items()}
    return QuantizedExperts(**({"wi_1": None} | found))
