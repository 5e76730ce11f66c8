"""Defines the matmuls of experts and of their gradients, with or without quantization to float8.

Each class is one kind of matmul: `Matmuls` multiplies arrays, `Float8Matmuls` quantizes its
operands, and `WeightOnlyMatmuls` and `StoredFloat8Matmuls` take matrices that are stored
quantized, which get no gradient. `jax_ep.moe.expert_mlp` calls the methods of these classes. R is
the number of rows, H the hidden size of a token, F that of an expert, and C is H or F:

  as_operand(x)        converts rows x [R, C] to an operand of a matmul: x itself, or x quantized
  residual_experts     returns the part of the experts' weights that the backward pass reads
  gated_product        computes the hidden values, gating(x @ wi_0, x @ wi_1), [R, F]
  up_products          computes the products x @ wi_0 and x @ wi_1, [R, F] each
  as_residual(product) converts a product [R, F] to the form that is kept for the backward pass
  as_array(x)          converts the result of `as_residual`, or of `as_operand`, to an array
  down_product         computes the product of the hidden values with wo, [R, H]
  dhidden              computes the gradient of the hidden values, [R, F]
  gate_gradient        computes the gradients of x @ wi_0 and x @ wi_1 for `gradients`, or None
  gradients            computes the gradients of the tokens, wi_0, wi_1 and wo
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_ep import checks
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.formats.quantized_array import without_gradient
from jax_ep.matmul import float8, unquantized, weight_only
from jax_ep.matmul.float8 import QuantizedMatrices
from jax_ep.matmul.gating import filled_biases
from jax_ep.matmul.groups import Groups
from jax_ep.matmul.primitives import Implementation
from jax_ep.matmul.weight_only import dequantized, dequantized_as_stored
from jax_ep.moe.traced import Traced
from jax_ep.runtime import jax_compat
from pallas_kernels.matmul.row_blocks import TransposedRows, row_blocks

MATMUL_DTYPES = (jnp.float8_e4m3fn,)
# A buffer is mostly unused if it has at least so many times as many rows as are used on average.
_MOSTLY_UNUSED = 2


def check_matmul_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError unless matmuls can quantize to `dtype`, the value of the option `name`."""
    known = checks.floating(dtype)
    if known not in [jnp.dtype(each) for each in MATMUL_DTYPES]:
        names = ", ".join(jnp.dtype(each).name for each in MATMUL_DTYPES)
        raise ValueError(f"{name} must be None or {names}, but is {dtype!r}.")


class QuantizedExperts(NamedTuple):
    """The matrices wi_0, wi_1 and wo of experts in float8, as `quantize_experts` returns them.

    wi_1 is None for experts that have only wi_0 and wo.
    """

    wi_0: QuantizedMatrices
    wi_1: QuantizedMatrices | None
    wo: QuantizedMatrices

    @property
    def wi(self) -> tuple[QuantizedMatrices, ...]:
        return (self.wi_0,) if self.wi_1 is None else (self.wi_0, self.wi_1)


class Experts(NamedTuple):
    """The weights of experts, with the shapes of `expert_mlp`; wi_1 and the biases may be None.

    wi_0, wi_1 and wo are either all arrays or all `QuantizedArray`s. `quantized` has the float8
    operands made from these matrices, and is None where the matmuls do not multiply float8.

    `sums` is None except in the backward pass of token chunks. There it has arrays with the shapes
    of wi_0, wi_1 (unless it is None) and wo: the sums of the gradients of earlier chunks. The
    gradient that the matmuls return for such an array is the array plus the gradient of the matrix.
    For the matrix itself they return no gradient. Hence the matmuls must use `sums` exactly once.
    """

    wi_0: Any
    wi_1: Any | None
    wo: Any
    wi_0_bias: jax.Array | None = None
    wi_1_bias: jax.Array | None = None
    wo_bias: jax.Array | None = None
    quantized: QuantizedExperts | None = None
    sums: tuple[jax.Array, ...] | None = None

    @property
    def wi(self) -> tuple[Any, ...]:
        return (self.wi_0,) if self.wi_1 is None else (self.wi_0, self.wi_1)

    @property
    def sums_of_wi_and_wo(self) -> tuple[Any, Any]:
        """Returns the sums of wi_0 and wi_1, and that of wo, a tuple each; or None for both."""
        return (None, None) if self.sums is None else (self.sums[:-1], self.sums[-1:])

    @property
    def biases(self) -> tuple[jax.Array | None, ...]:
        return self.wi_0_bias, self.wi_1_bias, self.wo_bias


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """Computes the experts' grouped matmuls on arrays, without quantization.

    `implementation` is that of `grouped_matmul`, such as "pallas".
    """

    implementation: Implementation

    # Whether the method `gated_product` adds the biases of wi_0 and wi_1 to the products.
    gates_with_biases = True

    # Whether the method `as_residual` rounds the products x @ wi_0 and x @ wi_1. If True, the
    # forward pass computes the hidden values from the products as they were before this rounding.
    rounds_residuals = False

    def as_operand(self, x: jax.Array) -> Any:
        return x

    def residual_experts(self, experts: Experts) -> Experts:
        return experts

    def as_residual(self, product: jax.Array) -> Any:
        return product

    def as_array(self, kept: Any, dtype: Any) -> jax.Array:
        return kept

    def gated_product(
        self, rows: Any, experts: Experts, groups: Groups, unit: Traced, keep: bool
    ) -> tuple[Any, ...]:
        """Computes the experts' hidden values, unit(x @ wi_0, x @ wi_1), of the tokens x.

        `rows` are the tokens, converted by `as_operand`. `unit` is the elementwise function between
        the matmuls. If `gates_with_biases`, it gets the products plus their biases. Returns the
        hidden values, converted by `as_operand`, too. With `keep`, also returns the two products,
        without biases, converted by `as_residual`.
        """
        gate, up = experts.wi
        return unquantized.gated_product(
            rows,
            (gate, up),
            groups,
            unit,
            keep,
            self.implementation,
            zero_unused=False,
            biases=filled_biases(experts.biases[:2]),
        )

    def up_products(self, rows: Any, experts: Experts, groups: Groups) -> list[jax.Array]:
        """Returns the products of the tokens with wi_0 and, if it is not None, with wi_1.

        `rows` are the tokens, converted by `as_operand`.
        """
        return [
            unquantized.product(rows, wi, groups, self.implementation, zero_unused=False)
            for wi in experts.wi
        ]

    def down_product(
        self, hidden: Any, experts: Experts, groups: Groups, dtype: Any, zero_unused: bool
    ) -> jax.Array:
        """Returns the experts' output, the product of the hidden values with wo.

        `hidden` holds the hidden values, converted by `as_operand`. The output's rows past the last
        group are zero with `zero_unused`, and undefined without. Only float8 matmuls read `dtype`,
        the dtype of their output.
        """
        return unquantized.product(
            hidden, experts.wo, groups, self.implementation, zero_unused=zero_unused
        )

    def dhidden(
        self, grad_rows: Any, experts: Experts, group_sizes: jax.Array, dtype: Any
    ) -> jax.Array:
        return unquantized.product(
            grad_rows,
            experts.wo,
            group_sizes,
            self.implementation,
            transpose_rhs=True,
            zero_unused=False,
        )

    def gate_gradient(
        self,
        unit: Traced,
        dhidden: jax.Array,
        pre: Sequence[Any],
        weights: jax.Array | None,
        group_sizes: jax.Array,
        mean_rows: int | None,
    ) -> tuple[Any, Any, jax.Array | None] | None:
        """Backpropagates through weights[:, None] * unit(*pre), the weighted hidden values.

        Args:
          unit: the elementwise function between the matmuls.
          dhidden: the gradient of the weighted hidden values, [rows, F].
          pre: the products with wi_0 and wi_1, [rows, F] each, converted by `as_residual`.
          weights: [rows] float32, the top-k weights of the rows, or None.
          group_sizes: [experts] int32: the number of rows of each expert.
          mean_rows: the number of rows in groups on a rank, mean over ranks; None if it is not
            known.

        Returns:
          The weighted hidden values and the gradients of the products, both as `gradients` takes
          them, and the gradient of the weights or None. Returns None instead if there is only one
          product, or if a pass of XLA over all rows is as fast, because most of them are used. The
          caller then computes the results.
        """
        num_rows = dhidden.shape[0]
        if len(pre) != 2 or weights is None or mean_rows is None:
            return None
        if checks.is_symbolic(num_rows) or checks.is_symbolic(mean_rows):
            return None
        if num_rows < _MOSTLY_UNUSED * mean_rows:
            return None
        if jax_compat.looks_for_nans():
            return None
        hidden, *dpre, dweights = unquantized.gate_gradient(
            unit, dhidden, tuple(pre), weights, group_sizes, self.implementation
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

        If `experts` have `sums`, the results for the matrices are the sums plus the gradients.

        A barrier lets XLA compute the tokens' gradient after the gradient of wo. So `grad_rows` are
        not held any more, and the tokens' gradient takes their memory. It does not wait for the
        gradients of wi_0 and wi_1, so it may be sent to other hosts while they are computed.

        Args:
          rows: the tokens [rows, H], converted by `as_operand`.
          hidden: the hidden values [rows, F], multiplied by the rows' top-k weights if there are
            any.
          dpre: the gradients of the products with wi_0 and wi_1, [rows, F] each. `hidden` and
            `dpre` may also be results of `gate_gradient`.
          grad_rows: the output's gradient [rows, H], converted by `as_operand`.
          experts: the weights of the experts.
          group_sizes: [experts] int32: the number of rows of each expert.
          zero_unused: whether the tokens' gradient is zero in rows past the last group. Otherwise
            it is undefined there.
        """

        def drhs(sums, *operands):
            options = group_sizes, self.implementation
            if sums is None:
                return unquantized.drhs_of_each(*operands, *options)
            return unquantized.add_drhs_of_each(sums, *operands, *options)

        of_wi, of_wo = experts.sums_of_wi_and_wo
        (dwo,) = drhs(of_wo, hidden, (grad_rows,))
        dwi = drhs(of_wi, rows, tuple(dpre))
        # The gradient of the tokens waits for that of wo.
        dpre, dwo = lax.optimization_barrier((tuple(dpre), dwo))
        pairs = tuple(zip(dpre, experts.wi, strict=True))
        dtokens = unquantized.sum_of_products(
            pairs, group_sizes, self.implementation, transpose_rhs=True, zero_unused=zero_unused
        )
        return dtokens, dwi, dwo


@dataclasses.dataclass(frozen=True)
class Float8Matmuls(Matmuls):
    """Quantizes the operands of each matmul to float8, and multiplies them as float8.

    Gradients ignore the rounding: each is computed as if quantization were the identity
    (straight-through).
    """

    gates_with_biases = False
    rounds_residuals = True

    def as_operand(self, x: jax.Array | QuantizedArray) -> QuantizedArray:
        if not isinstance(x, QuantizedArray):
            return float8.quantize_rows(x)
        # Rows in another format are dequantized, and quantized again.
        operand = float8.rows_as_operand(x)
        return float8.quantize_rows(x.dequantize()) if operand is None else operand

    def residual_experts(self, experts: Experts) -> Experts:
        # Of the quantized matrices, the backward pass does not read the transposed copies, which
        # are dropped. Of the unquantized wi_0, wi_1 and wo, it reads only the dtypes, so empty
        # arrays replace them.
        assert experts.quantized is not None
        dtypes: dict[str, Any] = {
            name: jnp.zeros(0, matrices.dtype)
            for name in QuantizedExperts._fields
            if (matrices := getattr(experts, name)) is not None
        }
        in_one_order: list[Any] = [
            None if both is None else both._replace(transposed=None)  # type: ignore
            for both in experts.quantized
        ]
        return experts._replace(**dtypes, quantized=QuantizedExperts(*in_one_order))

    def as_residual(self, product: jax.Array) -> QuantizedArray:
        return float8.quantize_rows(product)

    def as_array(self, kept: Any, dtype: Any) -> jax.Array:
        return kept.dequantize(dtype) if isinstance(kept, QuantizedArray) else kept

    def gated_product(self, rows, experts, groups, unit, keep):
        gate, up = (wi.transposed for wi in experts.quantized.wi)
        return float8.gated_product(rows, (gate, up), groups, unit, keep, self.implementation)

    def up_products(self, rows, experts, groups):
        return [
            float8.product(
                [(rows, wi.transposed)],
                groups,
                jnp.float32,
                self.implementation,
                zero_unused=False,
            )
            for wi in experts.quantized.wi
        ]

    def down_product(self, hidden, experts, groups, dtype, zero_unused):
        pairs = [(hidden, experts.quantized.wo.transposed)]
        return float8.product(pairs, groups, dtype, self.implementation, zero_unused)

    def dhidden(self, grad_rows, experts, group_sizes, dtype):
        pairs = [(grad_rows, experts.quantized.wo.matrices)]
        return float8.product(pairs, group_sizes, dtype, self.implementation, zero_unused=False)

    def gate_gradient(self, unit, dhidden, pre, weights, group_sizes, mean_rows):
        if len(pre) != 2:
            return None
        num_rows = dhidden.shape[0]
        blocks, _ = row_blocks(group_sizes, num_rows)
        of_rows = jnp.ones(num_rows, jnp.float32) if weights is None else weights
        results = float8.gate_gradient(unit, dhidden, pre, of_rows, blocks, self.implementation)
        dweights = None if weights is None else results.dweights
        return results.hidden, results.dpre, dweights

    def gradients(self, rows, hidden, dpre, grad_rows, experts, group_sizes, zero_unused):
        blocks, group_blocks = row_blocks(group_sizes, rows.shape[0])

        def transpose(rows, **options):
            return float8.transpose_rows(
                rows, blocks, implementation=self.implementation, **options
            )

        def drhs(lhs, grads, dtype, sums):
            return float8.drhs_of_each(lhs, grads, group_blocks, dtype, self.implementation, sums)

        of_wi, of_wo = experts.sums_of_wi_and_wo
        of_hidden = hidden if isinstance(hidden, TransposedRows) else transpose(hidden)[1]
        of_grad = transpose(grad_rows)[1]
        (dwo,) = drhs(of_hidden, [of_grad], experts.wo.dtype, of_wo)
        both = [
            each if isinstance(each, tuple) else transpose(each, return_rows=True) for each in dpre
        ]
        # The gradient of the tokens waits for that of wo.
        kept, dwo = lax.optimization_barrier(([kept for kept, _ in both], dwo))
        of_tokens = transpose(rows)[1]
        dwi = drhs(of_tokens, [of_rows for _, of_rows in both], experts.wi_0.dtype, of_wi)
        pairs = [(each, wi.matrices) for each, wi in zip(kept, experts.quantized.wi, strict=True)]
        dtokens = float8.product(pairs, group_sizes, rows.dtype, self.implementation, zero_unused)
        return dtokens, dwi, dwo


@dataclasses.dataclass(frozen=True)
class WeightOnlyMatmuls(Matmuls):
    """Multiplies rows by matrices that are stored quantized, without quantizing the rows.

    In the forward pass, the matmuls read matrices as they are stored, if a kernel knows their
    format. All other matmuls dequantize matrices right before they multiply. The matrices get no
    gradient.
    """

    def gated_product(self, rows, experts, groups, unit, keep):
        biases = experts.biases[:2]
        return weight_only.gated_product(
            rows, experts.wi, biases, groups, unit, keep, self.implementation
        )

    def up_products(self, rows, experts, groups):
        return [self._product(rows, wi, groups, zero_unused=False) for wi in experts.wi]

    def down_product(self, hidden, experts, groups, dtype, zero_unused):
        return self._product(hidden, experts.wo, groups, zero_unused)

    def _product(
        self, rows: jax.Array, matrices: QuantizedArray, groups: Groups, zero_unused: bool
    ) -> jax.Array:
        return weight_only.product(
            rows,
            [matrices],
            [None],
            groups,
            implementation=self.implementation,
            zero_unused=zero_unused,
        )

    def dhidden(self, grad_rows, experts, group_sizes, dtype):
        dense, is_transposed = dequantized_as_stored(experts.wo, experts.wo.dtype)
        return unquantized.product(
            grad_rows,
            dense,
            group_sizes,
            self.implementation,
            transpose_rhs=not is_transposed,
            zero_unused=False,
        )

    def gradients(self, rows, hidden, dpre, grad_rows, experts, *others):
        experts = _dequantized(experts)
        # XLA removes the matmuls whose results are dropped here.
        dtokens, *_ = super().gradients(rows, hidden, dpre, grad_rows, experts, *others)
        return dtokens, (None,) * len(dpre), None


@dataclasses.dataclass(frozen=True)
class StoredFloat8Matmuls(Float8Matmuls):
    """Quantizes rows to float8, and multiplies them by matrices that are stored quantized.

    The matrices get no gradient.
    """

    def gradients(self, rows, hidden, dpre, grad_rows, experts, *others):
        # XLA removes the matmuls whose results are dropped here.
        dtokens, *_ = super().gradients(rows, hidden, dpre, grad_rows, experts, *others)
        return dtokens, (None,) * len(dpre), None


def _dequantized(experts: Experts) -> Experts:
    wi_0, wi_1, wo = (
        None if matrices is None else dequantized(matrices, matrices.dtype)
        for matrices in (experts.wi_0, experts.wi_1, experts.wo)
    )
    return experts._replace(wi_0=wi_0, wi_1=wi_1, wo=wo)


def with_quantized(matmul_dtype: Any, experts: Experts, implementation: Implementation) -> Experts:
    """Returns the experts, with their field `quantized` set if `matmul_dtype` is not None.

    wi_0, wi_1 and wo are then quantized, unless `experts.quantized` is set already. Differentiating
    with respect to wi_0, wi_1 and wo raises TypeError if they are stored quantized.
    """
    names = QuantizedExperts._fields
    constant = {name: without_gradient(name, getattr(experts, name)) for name in names}
    experts = experts._replace(**constant)
    if matmul_dtype is None or experts.quantized is not None:
        return experts
    quantized = quantize_experts_of_rank(experts.wi_0, experts.wi_1, experts.wo, implementation)
    return experts._replace(quantized=quantized)


def matmuls_of(
    matmul_dtype: Any, experts: Experts, implementation: Implementation
) -> tuple[Matmuls, Experts]:
    """Selects the class of matmuls for the option `matmul_dtype` and the type of the matrices.

    Returns an object of that class, and the experts with the float8 operands that it multiplies.
    """
    kinds = (Matmuls, Float8Matmuls)
    if isinstance(experts.wi_0, QuantizedArray):
        kinds = (WeightOnlyMatmuls, StoredFloat8Matmuls)
    matmuls = kinds[matmul_dtype is not None](implementation)
    return matmuls, with_quantized(matmul_dtype, experts, implementation)


def specs_of_quantized(quantized: QuantizedExperts, specs: Any) -> QuantizedExperts:
    """Returns the `PartitionSpec` of each array in `quantized`, in the same structure.

    The attributes wi_0, wi_1 and wo of `specs` are the specs of these matrices. The transposed copy
    of a matrix gets its spec with the last two entries exchanged.
    """

    def of_matrices(name: str, matrices: QuantizedMatrices | None) -> Any:
        if matrices is None:
            return None
        spec = getattr(specs, name)
        turned = PartitionSpec(spec[0], spec[2], spec[1])
        return QuantizedMatrices(
            jax.tree.map(lambda _: spec, matrices.matrices),
            jax.tree.map(lambda _: turned, matrices.transposed),
        )

    return QuantizedExperts(*(of_matrices(*item) for item in quantized._asdict().items()))


def check_quantized(quantized: Any, experts: Any, matmul_dtype: Any) -> None:
    """Raises TypeError or ValueError unless a layer's argument `quantized_experts` is valid.

    The argument may be None. Otherwise it must be a `QuantizedExperts` with the shapes of the wi_0,
    wi_1 and wo in `experts`, and `matmul_dtype` must not be None.
    """
    if quantized is None:
        return
    if not isinstance(quantized, QuantizedExperts):
        raise TypeError(
            "quantized_experts must be None or what jax_ep.quantize_experts returns, but is "
            f"{checks.described(quantized)}."
        )
    if matmul_dtype is None:
        raise ValueError("quantized_experts must be None where matmul_dtype is None.")
    check_are_arrays("quantized_experts must be None", experts)
    for name, of_name in quantized._asdict().items():
        matrices = getattr(experts, name)
        shape = None if matrices is None else matrices.shape
        found = None if of_name is None else of_name.matrices.shape
        if found != shape:
            raise ValueError(
                f"quantized_experts.{name} must have the shape of {name}, {shape}, but has {found}."
            )


def check_are_arrays(must: str, experts: Any) -> None:
    """Raises ValueError if wi_0, wi_1 or wo of `experts` is stored as a `QuantizedArray`.

    The message begins with `must`, which states the requirement.
    """
    for name in QuantizedExperts._fields:
        if isinstance(matrices := getattr(experts, name), QuantizedArray):
            raise ValueError(
                f"{must} where {name} is a QuantizedArray, here in the format "
                f"{matrices.format.name}: it is stored quantized already."
            )


def check_same_kind(experts: Any, names: Sequence[str]) -> None:
    """Raises TypeError unless the matrices `names` are all arrays or all `QuantizedArray`s.

    `names` are attributes of `experts`, of which those that are None are ignored.
    """
    given = {name: m for name in names if (m := getattr(experts, name)) is not None}
    if len({isinstance(matrices, QuantizedArray) for matrices in given.values()}) > 1:
        kinds = ", ".join(f"{name} is {checks.described(m)}" for name, m in given.items())
        raise TypeError(
            f"{', '.join(given)} must all be arrays or all be QuantizedArrays, but {kinds}."
        )


def quantize_experts_of_rank(
    wi_0: jax.Array | QuantizedArray,
    wi_1: jax.Array | QuantizedArray | None,
    wo: jax.Array | QuantizedArray,
    implementation: Implementation = None,
) -> QuantizedExperts:
    """Quantizes the matrices of one rank's experts: wi_0, wi_1 (or None) and wo.

    A `QuantizedArray` in the format of the float8 matmuls, transposed or not, is not quantized
    again. A `QuantizedArray` in another format is dequantized first.
    """

    def quantize(name: str, matrices: Any) -> QuantizedMatrices | None:
        if matrices is None:
            return None
        FLOAT8_MATRICES.check_shape(name, matrices.shape)
        if isinstance(matrices, QuantizedArray):
            if (operands := float8.matrices_as_operands(matrices)) is not None:
                return operands
            matrices = dequantized(matrices, matrices.dtype)
        return float8.quantize_matrices(lax.stop_gradient(matrices), implementation)

    matrices = {"wi_0": wi_0, "wi_1": wi_1, "wo": wo}
    return QuantizedExperts(**{n: quantize(n, each) for n, each in matrices.items()})  # type: ignore
