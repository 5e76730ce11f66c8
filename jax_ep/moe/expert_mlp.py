"""Computes the expert MLP by grouped matmuls, with a custom VJP that keeps few residuals."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.formats.quantized_array import with_jax_dtype, without_gradient
from jax_ep.matmul.gating import bias_of_row, biases_of_rows, gated, hidden_values, sum_by_group
from jax_ep.matmul.primitives import Implementation, check_implementation
from jax_ep.moe import expert_matmuls
from jax_ep.moe.expert_matmuls import EXPERT_MATRICES, ExpertMatmuls, Experts, matmuls_of
from jax_ep.runtime.jax_compat import is_traced, match_varying
from pallas_kernels.matmul.chosen_groups import Groups, group_of_row

# An elementwise function of one array, gate, or of two, gate and up.
Activation = Callable[..., jax.Array]


def check_activation(name: str, value: Any, otherwise: str = "") -> None:
    checks.check_function(name, value, f"a function of gate, or of gate and up{otherwise}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenUnit:
    """The elementwise function between an expert's matmuls; `expert_mlp` describes it."""

    activation: Activation = jax.nn.silu
    clamp: float | None = None

    @functools.cached_property
    def takes_up(self) -> bool:
        """Whether `activation` must be given two arrays, gate and up."""
        try:
            parameters = inspect.signature(self.activation).parameters.values()
        except (TypeError, ValueError):
            return False  # A function whose signature is unknown is given one array.
        required = (p for p in parameters if p.default is p.empty)
        return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required) == 2

    def check(self) -> None:
        check_activation("activation", self.activation)
        if self.clamp is not None:
            checks.check_number("clamp", self.clamp, otherwise=", or None")

    def __call__(self, gate: jax.Array, *up: jax.Array) -> jax.Array:
        # `up` is one array, or none for experts without wi_1.
        if self.clamp is not None:
            gate = jnp.minimum(gate, jnp.asarray(self.clamp, gate.dtype))
            up = tuple(jnp.clip(u, -self.clamp, self.clamp) for u in up)
        if self.takes_up:
            return self.activation(gate, *up)
        hidden = self.activation(gate)
        return hidden * up[0] if up else hidden


def expert_mlp(
    tokens: jax.Array | QuantizedArray,
    wi_0: jax.Array | QuantizedArray,
    wi_1: jax.Array | QuantizedArray | None,
    wo: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    *,
    wi_0_bias: jax.Array | None = None,
    wi_1_bias: jax.Array | None = None,
    wo_bias: jax.Array | None = None,
    activation: Activation = jax.nn.silu,
    clamp: float | None = None,
    matmul_dtype: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Runs each row through its group's expert: (activation(x @ wi_0) * (x @ wi_1)) @ wo.

    With SiLU this is the SwiGLU layer of Shazeer, "GLU Variants Improve Transformer" (2020).
    Everything between the matmuls is computed in float32. "pallas" computes both products, their
    biases and the function between the matmuls in one kernel, if the function is made of sums,
    products, minima, maxima, comparisons, exp, tanh and sigmoid (SiLU, GELU by tanh, ReLU, clamps).

    **What is kept for the backward pass**: `tokens` and the products x @ wi_0 and x @ wi_1
    (R·(H + 2F) values), under the names "dispatched_tokens" and "expert_pre_activations".

    Rows of `tokens` past the last group may hold anything. The result and the gradient of `tokens`
    are zero there, and these rows contribute nothing to other gradients.

    The three matrices may each be a `QuantizedArray`, which has no gradient. The page "Float8" says
    which formats are multiplied as they are stored. A matrix in another format is dequantized in
    each call, and with `matmul_dtype` quantized to float8.

    Args:
      tokens: [R, H] floating: R rows in group order, as in `Dispatched.tokens`. With `matmul_dtype`
        it may be a `QuantizedArray`, which has no gradient, such as the tokens of
        `dispatch(..., output="quantized")`.
      wi_0: [L, H, F] for L experts, the dtype of tokens; the activation is applied to x @ wi_0.
      wi_1: [L, H, F], or None; the result of the activation is multiplied by x @ wi_1.
      wo: [L, F, H]: the projection from the hidden size F back to H.
      group_sizes: [L] integer: the number of rows in each expert's block; their sum is at most R.
      wi_0_bias, wi_1_bias: [L, F] floating, or None: biases of the pre-activations.
      wo_bias: [L, H] floating, or None: a bias of the output.
      activation: an elementwise function, finite at zero. Of one array: the expert computes
        (activation(gate) * up) @ wo, or activation(gate) @ wo without wi_1. Of two, as its
        signature says: activation(gate, up) @ wo (GPT-OSS). It is a static argument, so values that
        it reads besides its arguments are constants, which are not trained.
      clamp: None, or a number c above 0: before the activation, gate is clamped to at most c, and
        up to [-c, c] (GPT-OSS, DeepSeek-V4).
      matmul_dtype: None, or `jnp.float8_e4m3fn`: the dtype that the matmuls multiply; H and F are
        then multiples of 128. Tokens, hidden values, matrices and their gradients are quantized,
        and gradients pass straight through the rounding; parameters and results keep their dtypes.
        See the page "Float8".
      implementation: as in `grouped_matmul`.

    Returns:
      [R, H], the dtype of tokens.

    Raises:
      TypeError, ValueError: an argument does not fit, or the named implementation cannot run
        here; the message says why.
    """
    experts = Experts(wi_0, wi_1, wo, wi_0_bias, wi_1_bias, wo_bias)
    unit = HiddenUnit(activation=activation, clamp=clamp)
    check_operands(tokens, experts, group_sizes, unit, matmul_dtype)
    check_computation(tokens, experts, unit, matmul_dtype, implementation, "implementation")
    # Without the barrier, XLA would evaluate what depends on a constant, while it compiles.
    group_sizes = lax.optimization_barrier(jnp.asarray(group_sizes, jnp.int32))
    return run_mlp(tokens, experts, group_sizes, unit, matmul_dtype, implementation)


def run_mlp(
    tokens: jax.Array | QuantizedArray,
    experts: Experts,
    group_sizes: jax.Array,
    unit: HiddenUnit,
    matmul_dtype: Any,
    implementation: Implementation,
) -> jax.Array:
    """Computes `expert_mlp` of operands that have been checked."""
    tokens_have_gradient = not isinstance(tokens, QuantizedArray)
    # Quantized tokens of a dtype that JAX lacks, such as float64 without x64, get a narrower one.
    tokens = without_gradient("tokens", with_jax_dtype(tokens))
    arrays = match_varying(jax.tree.map(jnp.asarray, (tokens, experts, group_sizes)))
    tokens, experts, group_sizes = arrays
    if tokens.shape[0] == 0:  # Matmuls need a row.
        # The zeros are typed as varying over the axes that the operands vary over (vma).
        zeros, *_ = match_varying((jnp.zeros(tokens.shape, tokens.dtype), *arrays))
        return zeros
    matmuls, experts = matmuls_of(unit, matmul_dtype, experts, implementation)
    return _expert_mlp(tokens, experts, group_sizes, matmuls, tokens_have_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _expert_mlp(
    tokens, experts: Experts, group_sizes, matmuls: ExpertMatmuls, tokens_have_gradient: bool
):
    return forward(tokens, experts, group_sizes, matmuls, keep=False)[0]


def _forward(tokens, experts, group_sizes, matmuls, tokens_have_gradient):
    tokens, experts = matmuls.differentiated_once((tokens, experts))
    return forward(tokens, experts, group_sizes, matmuls)


def _backward(matmuls, tokens_have_gradient, saved, grad):
    grad = matmuls.differentiated_once(grad)
    dtokens, dexperts, _ = backward(saved, grad, weights=None, matmuls=matmuls)
    return dtokens if tokens_have_gradient else None, dexperts, None


def forward(
    tokens: Any,
    experts: Experts,
    groups: Groups,
    matmuls: ExpertMatmuls,
    keep: bool = True,
    zero_unused: bool = True,
) -> tuple[jax.Array, tuple]:
    """Returns the output, [R, H] or for S chosen groups [S * height, H], and with `keep` residuals.

    `groups` are the group sizes of tokens [R, H]; or `ChosenGroups`, each of which computes all
    tokens [height, H]. Without `zero_unused`, rows past the last group are undefined.
    """
    dtype = tokens.dtype
    rows = checkpoint_name(matmuls.as_operand(tokens), "dispatched_tokens")
    has_biases = experts.wi_0_bias is not None or experts.wi_1_bias is not None
    # "pallas" may compute the first branch in one kernel; the second computes the same.
    if experts.wi_1 is not None and (matmuls.gates_with_biases or not has_biases):
        hidden, *products = matmuls.gated_hidden(rows, experts, groups, keep)
        pre = tuple(checkpoint_name(product, "expert_pre_activations") for product in products)
    else:
        products = [
            matmuls.times(rows, experts, name, groups, jnp.float32, zero_unused=False)
            for name in ("wi_0", "wi_1")[: len(experts.wi)]
        ]
        kept = (matmuls.as_residual(product) for product in products)
        pre = tuple(checkpoint_name(product, "expert_pre_activations") for product in kept)
        # `pre` may be rounded, unlike `products`. Without `keep`, no caller reads `pre`.
        hidden = gated(matmuls.unit, *products, biases=experts.biases[:2], groups=groups)
        hidden = matmuls.as_operand(hidden)
    out = matmuls.times(hidden, experts, "wo", groups, dtype, zero_unused=zero_unused)
    out = add_output_bias(out, experts, groups)
    return out, (rows, pre, matmuls.residual_experts(experts), groups)


def add_output_bias(out: jax.Array, experts: Experts, groups: Groups) -> jax.Array:
    """Adds to the rows `out` of each group its expert's wo_bias, if there are any."""
    if experts.wo_bias is None:
        return out
    biases = biases_of_rows([experts.wo_bias], groups, out.shape[0], wide_dtype(out.dtype))
    return hidden_values(lambda output: output, biases, [out])


def backward(
    saved: tuple,
    grad: Any,
    weights: jax.Array | None,
    matmuls: ExpertMatmuls,
    zero_unused: bool = True,
    mean_rows: int | None = None,
) -> tuple[jax.Array, Experts, jax.Array | None]:
    """Returns the gradients of the tokens, of the experts, and of the row weights or None.

    `saved` are the residuals of `forward`. `grad` is the cotangent of the output, or with weights
    [R] of weights[:, None] * output; weights multiply the hidden values here. `mean_rows` is the
    mean number of rows in groups on a rank, if known; `zero_unused` is as in `forward`.
    """
    rows, _, experts, group_sizes = saved
    grad_rows = matmuls.as_operand(grad)
    dhidden = matmuls.dhidden(grad_rows, experts, group_sizes, rows.dtype)
    hidden, dpre, dweights = _gate_gradient(saved, dhidden, weights, matmuls, mean_rows)
    dtokens, dwi, dwo = matmuls.gradients(
        rows, hidden, dpre, grad_rows, experts, group_sizes, zero_unused
    )
    # Stored matrices get no gradient. XLA removes the matmuls whose results are dropped here.
    dexperts = Experts(wi_0=None, wi_1=None, wo=None)
    if experts.sums is not None:
        dexperts = dexperts._replace(sums=(*dwi, dwo))
    elif not matmuls.is_stored:
        dexperts = Experts(dwi[0], dwi[1] if len(dwi) > 1 else None, dwo)
    if all(bias is None for bias in experts.biases):
        return dtokens, dexperts, dweights
    group_of_rows = group_of_row(group_sizes, dtokens.shape[0])
    for name, dproduct in zip(("wi_0_bias", "wi_1_bias"), dpre, strict=False):
        if (bias := getattr(experts, name)) is not None:
            dbias = sum_by_group(dproduct, group_of_rows, bias)
            dexperts = dexperts._replace(**{name: dbias})  # type: ignore
    if (bias := experts.wo_bias) is not None:
        grad = matmuls.as_array(grad, rows.dtype)
        dbias, terms = _output_bias_gradient(bias, grad, weights, group_of_rows)
        dexperts = dexperts._replace(wo_bias=dbias)
        if dweights is not None:
            dweights += terms.astype(dweights.dtype)
    return dtokens, dexperts, dweights


def _gate_gradient(
    saved: tuple,
    dhidden: jax.Array,
    weights: jax.Array | None,
    matmuls: ExpertMatmuls,
    mean_rows: int | None,
) -> tuple[Any, Any, jax.Array | None]:
    """Returns weights * hidden values, and the products' and weights' gradients, for `backward`."""
    rows, pre, experts, group_sizes = saved
    dtype = rows.dtype
    biases = biases_of_rows(experts.biases[:2], group_sizes, rows.shape[0], wide_dtype(dtype))
    # The kernels add no biases, and `matmuls` may leave products without biases to XLA.
    if all(bias is None for bias in biases):
        results = matmuls.gate_gradient(dhidden, pre, weights, group_sizes, mean_rows)
        if results is not None:
            return results
    products = tuple(matmuls.as_array(product, dtype) for product in pre)
    factors = (products,) if weights is None else (products, weights)
    hidden, vjp = jax.vjp(functools.partial(hidden_values, matmuls.unit, biases), *factors)
    dproducts, *dweights = vjp(dhidden)
    return hidden, dproducts, dweights[0] if dweights else None


def _output_bias_gradient(
    bias: jax.Array, grad: jax.Array, weights: jax.Array | None, group_of_rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of wo_bias, and what the bias adds to each row weight's gradient."""
    wide = wide_dtype(grad.dtype)
    # Rows past the last group may hold anything.
    dout = jnp.where((group_of_rows < len(bias))[:, None], grad, 0).astype(wide)
    terms = jnp.sum(dout * bias_of_row(bias, group_of_rows, wide), axis=-1)
    if weights is not None:
        dout *= weights.astype(wide)[:, None]
    return sum_by_group(dout.astype(grad.dtype), group_of_rows, bias), terms


_expert_mlp.defvjp(_forward, _backward)


# The dimensions of each operand of `expert_mlp`.
_DIMS = {
    "wi_0": "LHF",
    "wi_1": "LHF",
    "wo": "LFH",
    "wi_0_bias": "LF",
    "wi_1_bias": "LF",
    "wo_bias": "LH",
    "tokens": "RH",
    "group_sizes": "L",
}


def check_operands(
    tokens: jax.Array | QuantizedArray,
    experts: Experts,
    group_sizes: jax.Array,
    unit: HiddenUnit,
    matmul_dtype: Any,
) -> None:
    """Raises TypeError or ValueError unless dtypes and shapes are those that `expert_mlp` needs."""
    all_weights = {name: getattr(experts, name) for name in _DIMS if name in Experts._fields}
    # wi_0 and wo are required, so they are checked even if they are None.
    weights = {n: w for n, w in all_weights.items() if w is not None or n in ("wi_0", "wo")}
    arrays = weights | {"tokens": tokens, "group_sizes": group_sizes}
    for name, array in arrays.items():
        kind = jnp.integer if name == "group_sizes" else jnp.floating
        may_be_quantized = name in EXPERT_MATRICES
        if name == "tokens":
            may_be_quantized = matmul_dtype is not None
        checks.check_array(
            name,
            array,
            len(_DIMS[name]),
            kind,
            f"[{', '.join(_DIMS[name])}]",
            may_be_empty=name not in weights,
            may_be_quantized=may_be_quantized,
        )
    expert_matmuls.check_same_kind(experts, EXPERT_MATRICES)
    sizes = dict(zip("LHF", experts.wi_0.shape, strict=True)) | {"R": tokens.shape[0]}
    for name, array in arrays.items():
        wanted = tuple(sizes[dim] for dim in _DIMS[name])
        of_wi_0 = f"for wi_0 [L, H, F] of shape {experts.wi_0.shape}"
        checks.check_shape(name, array, wanted, f"shape {wanted} {of_wi_0}")
        if name in EXPERT_MATRICES and array.dtype != tokens.dtype:
            raise TypeError(
                f"{name} must have the dtype of tokens, {tokens.dtype}, but has {array.dtype}; "
                "cast it with .astype."
            )
        for part in jax.tree.leaves(array):
            checks.check_not_sharded(name, part)
    unit.check()
    if matmul_dtype is not None:
        expert_matmuls.check_matmul_dtype(matmul_dtype)
        for name in ("wi_0", "wo"):
            FLOAT8_MATRICES.check_shape(name, arrays[name].shape)


def check_computation(
    tokens: jax.Array | QuantizedArray,
    experts: Experts,
    unit: HiddenUnit,
    matmul_dtype: Any,
    implementation: Implementation,
    name_of_implementation: str,
) -> None:
    """Raises TypeError or ValueError unless experts of the right shapes can be computed."""
    # `name_of_implementation` is the caller's name of `implementation`, for errors.
    dtype = jax.dtypes.canonicalize_dtype(tokens.dtype)
    num_rows = 1 if tokens.shape[0] == 0 else tokens.shape[0]
    rows = jax.ShapeDtypeStruct((num_rows, experts.wi_0.shape[2]), wide_dtype(dtype))
    _check_activation(unit, rows)
    if experts.wi_1 is None:
        one = "where wi_1 is None: an expert without a gate has one pre-activation."
        if unit.takes_up:
            raise ValueError(f"activation must be a function of one array {one}")
        if experts.wi_1_bias is not None:
            raise ValueError(f"wi_1_bias must be None {one}")
    check_implementation(implementation, experts.wi_0, name_of_implementation, matmul_dtype)


def _check_activation(unit: HiddenUnit, rows: jax.ShapeDtypeStruct) -> None:
    count = 2 if unit.takes_up else 1
    try:
        jaxpr, result = jax.make_jaxpr(unit.activation, return_shape=True)(*[rows] * count)
    except TypeError as error:
        arrays = "an array" if count == 1 else "two arrays"
        raise TypeError(f"activation failed for {arrays}: {error}") from error
    # A traced array that is not an argument would get no gradient.
    for constant in jaxpr.consts:
        if is_traced(constant):
            raise ValueError(
                "activation must be a function of its arguments alone, but reads a traced array, "
                f"{jax.typeof(constant)}. Only constants may be read besides."
            )
    is_array = isinstance(result, jax.ShapeDtypeStruct) and result.shape == rows.shape
    if not (is_array and jnp.issubdtype(result.dtype, jnp.floating)):
        raise ValueError(
            f"activation must be elementwise: for {rows.dtype} of shape {rows.shape} it must "
            f"return floats of the same shape, but returns {result}."
        )
