"""Gathers parameters that fully sharded data parallelism (FSDP) splits over further mesh axes.

Further axes, or FSDP axes, are neither the expert axes, which split the experts, nor the tensor
axes, which split the experts' hidden size. `LayerMesh.further_axes` holds the further axes of each
parameter. A parameter that is split over further axes enters the layer's `jax.shard_map` as shards,
and is gathered there right before it is used. Matrices are gathered in the compute dtype, or in
float8 if the experts multiply float8. The transpose of the gather is a reduce-scatter: it sums the
ranks' gradients in the parameter's dtype, and leaves each rank its own shard.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.matmul.float8 import QuantizedMatrices
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.mesh import Axes, AxisRules, LayerMesh, explicit_axes, large_axes
from jax_ep.moe.params import LOGICAL_AXES, MoEParams
from jax_ep.runtime.jax_compat import to_varying, varying_axes


def with_further_axes(
    where: LayerMesh, params: MoEParams, config: MoEConfig, axis_rules: AxisRules
) -> LayerMesh:
    """Returns `where` with `further_axes`: the FSDP axes that each parameter is split over.

    The axes are those of `config.fsdp_axes`, which the caller's axis rules must not contradict. If
    that is None, Explicit axes are read from the types of the parameters, and Auto axes are guessed
    from the caller's axis rules. XLA gathers a parameter that is split over any other axes.

    Raises:
        ValueError: `config.fsdp_axes` does not fit the mesh, the parameters or the axis rules.
    """
    if where.mesh is None:
        _check_not_bound(config)
        return where
    arrays = {name: array for name, array in params._asdict().items() if array is not None}
    stored = [name for name, array in arrays.items() if isinstance(array, QuantizedArray)]
    _check_quantized_not_split(stored, config)
    for name in stored:
        del arrays[name]
    if config.fsdp_axes is None:
        found = {name: _found(name, a, where, axis_rules) for name, a in arrays.items()}
    else:
        _check_on_mesh(config.further_axes(), where)
        found = {name: _given(name, a, where, config, axis_rules) for name, a in arrays.items()}
    further = {name: axes for name, axes in found.items() if any(axes)}
    return where._replace(further_axes=tuple(further.items()))


def _check_quantized_not_split(names: list[str], config: MoEConfig) -> None:
    given = config.further_axes()
    for name in names:
        if split := [axis for axis in LOGICAL_AXES[name] if given.get(axis or "")]:
            raise ValueError(
                f"fsdp_axes must not split {split} where {name} is a QuantizedArray, which the "
                f"layer does not gather, but is {given}."
            )


def _check_not_bound(config: MoEConfig) -> None:
    bound = set(jax.sharding.get_abstract_mesh().manual_axes)
    given = config.further_axes().values()
    if named := [axis for axes in given for axis in axes if axis in bound]:
        raise ValueError(
            f"fsdp_axes must not name {named} in a jax.shard_map that binds them, since the layer "
            "gathers parameters only in its own: gather them before the call, and leave fsdp_axes "
            "at None."
        )


def _check_on_mesh(given: dict[str, Axes], where: LayerMesh) -> None:
    assert where.mesh is not None
    for logical, axes in given.items():
        if missing := [axis for axis in axes if axis not in where.mesh.axis_names]:
            raise ValueError(
                f"fsdp_axes must name axes of the mesh {dict(where.mesh.shape)}, but has {missing} "
                f"for {logical!r}."
            )
        if same := [axis for axis in axes if axis not in where.batch_axes]:
            raise ValueError(
                f"fsdp_axes must name axes over which the tokens are spread, batch_axes "
                f"{where.batch_axes}, but has {same} for {logical!r}."
            )


def _given(
    name: str, array: jax.Array, where: LayerMesh, config: MoEConfig, axis_rules: AxisRules
) -> tuple[Axes, ...]:
    """Returns, for each dimension of the parameter `name`, the axes of `config.fsdp_axes`.

    Raises ValueError if the number of ranks that split a dimension of `array` does not divide the
    dimension's size, or if an axis rule splits the dimension otherwise.
    """
    assert where.mesh is not None
    logical = LOGICAL_AXES[name]
    further = config.further_axes_of(logical)
    by_rules = assign_axes(logical, axis_rules)
    ruled = {name for name, _ in axis_rules}
    split = zip(logical, array.shape, where.axes_of(logical), further, by_rules, strict=True)
    for axis, size, base, more, ruled_axes in split:
        wanted, own = (large_axes(axes, where.mesh) for axes in (base + more, ruled_axes))
        if more and axis in ruled and own != wanted:
            raise ValueError(
                f"fsdp_axes must agree with the axis rules, but splits {axis!r} of {name} over "
                f"{wanted}, and the rules over {own}: the parameter would be moved in each call. "
                "Change the rules, or let the layer read them with fsdp_axes=None."
            )
        if more and size % where.size(base + more):
            raise ValueError(
                f"fsdp_axes must divide each dimension that is split, but {axis!r} of {name} "
                f"{array.shape} has {size}, and {where.size(base + more)} ranks are along "
                f"{base + more}."
            )
    return tuple(large_axes(axes, where.mesh) for axes in further)


def _found(
    name: str, array: jax.Array, where: LayerMesh, axis_rules: AxisRules
) -> tuple[Axes, ...]:
    """Finds, for each dimension of the parameter `name`, the FSDP axes that split it.

    This is for calls in which `config.fsdp_axes` is None. Explicit axes are read from the type of
    `array`. Auto axes are guessed from `axis_rules`, since types do not show them. If the layer
    splits a dimension over the expert or tensor axes, FSDP axes are found only if the expert or
    tensor axes come first in the sharding of the dimension.
    """
    assert where.mesh is not None
    explicit = explicit_axes(where.mesh)
    logical = LOGICAL_AXES[name]
    of_type = (*jax.typeof(array).sharding.spec, *[None] * len(logical))
    by_rules = assign_axes(logical, axis_rules)
    base = where.axes_of(logical)
    used = {axis for axes in base for axis in axes}
    further = []
    for i, own in enumerate(base):
        auto = tuple(axis for axis in by_rules[i] if axis not in explicit)
        axes = (_names(of_type[i]) or ()) + auto
        more = axes[len(own) :] if axes[: len(own)] == own else ()
        if own and not more and name == "wi_0":
            _check_rule_of_own_axes(name, str(logical[i]), axes, own, axis_rules)
        known = logical[i] is not None and (own or logical[i] != "exp")
        fits = set(more) <= set(where.batch_axes) - used and not (
            array.shape[i] % where.size(own + more) if more and known else 0
        )
        further.append(more if known and fits else ())
        used |= set(further[-1])
    return tuple(large_axes(axes, where.mesh) for axes in further)


def _check_rule_of_own_axes(
    name: str, logical: str, axes: Axes, own: Axes, axis_rules: AxisRules
) -> None:
    """Warns if the layer does not gather a dimension as the axis rules mean it.

    `own` are the layer's own axes, which split the dimension `logical` of the parameter `name`.
    `axes` are those over which it is split, by its type and by the rules that apply.
    """
    meant = [_names(given) or () for ruled, given in axis_rules if ruled == logical]
    if set(own) < set(axes):
        right = *own, *(axis for axis in axes if axis not in own)
        warnings.warn(
            f"{name} is split along {logical!r} over {axes}, where {own} must come first: the "
            "layer does not gather its parts, so XLA moves and gathers whole parameters. Write "
            f"{right} in the axis rules.",
            stacklevel=2,
        )
    elif not axes and any(set(own) & set(each) for each in meant):
        warnings.warn(
            f"no axis rule splits {name} along {logical!r} over {own}, because a rule before it "
            f"gives its mesh axes to another dimension: every rank holds all of {logical!r}. Put "
            f"the rule of {logical!r} first.",
            stacklevel=2,
        )


def assign_axes(logical: Sequence[str | None], axis_rules: AxisRules) -> list[Axes]:
    """Returns the mesh axes that the axis rules give each logical axis, as Flax applies the rules.

    For each logical axis, the first rule whose mesh axes are not yet assigned to another logical
    axis applies. A logical axis without such a rule gets ().
    """
    assigned: dict[str, Axes] = {}
    for name, mesh_axes in axis_rules:
        axes = _names(mesh_axes)
        taken = {axis for other in assigned.values() for axis in other}
        if name in logical and name not in assigned and axes is not None and not taken & set(axes):
            assigned[name] = axes
    return [assigned.get(axis or "", ()) for axis in logical]


def _names(part: Any) -> Axes | None:
    """Returns the mesh axes in `part`, one entry of a `PartitionSpec`, as a tuple; () for None.

    Returns None for an entry that is not a name or a tuple of names, such as UNCONSTRAINED.
    """
    axes = (part,) if isinstance(part, str) else part
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, (tuple, list)) else None


def spec_of_parameter(name: str, where: LayerMesh) -> PartitionSpec:
    """Returns the `PartitionSpec` of a parameter, as it enters the layer's `jax.shard_map`.

    Each dimension is split over its expert or tensor axes first, then over its FSDP axes.
    """
    return PartitionSpec(*(axes or None for axes in _all_axes(name, where)))


def _all_axes(name: str, where: LayerMesh) -> tuple[Axes, ...]:
    base = where.axes_of(LOGICAL_AXES[name])
    further = where.further(name) or ((),) * len(base)
    return tuple(own + more for own, more in zip(base, further, strict=True))


def mesh_of_quantized(where: LayerMesh, params: MoEParams) -> LayerMesh:
    """Returns `where` with the axes that split the float8 copies of wi_0, wi_1 and wo.

    They are the axes that split the matrices themselves, if each rank's shard then consists of
    whole blocks of 128 x 128. Otherwise they are only the expert and tensor axes.
    """
    arrays = {name: getattr(params, name) for name in QuantizedExperts._fields}
    shapes = [_part_shape(name, a, where) for name, a in arrays.items() if a is not None]
    return where if has_whole_blocks(*shapes) else where._replace(further_axes=())


def has_whole_blocks(*shapes: tuple[int, ...]) -> bool:
    """Returns whether the last two sizes of every shape are multiples of 128, a block's size."""
    block = FLOAT8_MATRICES.block
    return not any(n % b for shape in shapes for n, b in zip(shape[1:], block, strict=True))


def _part_shape(name: str, array: jax.Array, where: LayerMesh) -> tuple[int, ...]:
    split = zip(array.shape, _all_axes(name, where), strict=True)
    return tuple(size // where.size(axes) for size, axes in split)


def gather(name: str, part: jax.Array, where: LayerMesh, dtype: Any = None) -> jax.Array:
    """Gathers the parameter `name` along its FSDP axes, from each rank's shard `part`.

    The shard is first cast to `dtype`, unless `dtype` is None. Without FSDP axes, it is only cast.
    """
    dims = _dims(name, where)
    dtype = part.dtype if dtype is None else jnp.dtype(dtype)
    if not dims:
        return part.astype(dtype)
    whole = _gather(dims, dtype, part.dtype, False, _of_each_token(part, where))
    return checkpoint_name(whole, GATHERED)


# The name that `checkpoint_name` gives gathered parameters. With it, a policy of `jax.checkpoint`
# decides whether the backward pass keeps them or gathers them again.
GATHERED = "gathered_parameters"


def stand_in(name: str, part: jax.Array, where: LayerMesh, dtype: Any) -> jax.Array:
    """Returns zeros instead of the gathered parameter `name`, without communication.

    This is for matrices that no matmul reads, because the matmuls multiply float8 copies. The zeros
    have the shape and `dtype` of the gathered matrices. The backward pass reduce-scatters their
    gradient to the shard `part`, as after `gather`. Without FSDP axes, `part` is only cast.
    """
    dims = _dims(name, where)
    if not dims:
        return part.astype(dtype)
    return _gather(dims, jnp.dtype(dtype), part.dtype, True, _of_each_token(part, where))


def gather_quantized(quantized: QuantizedExperts, where: LayerMesh) -> QuantizedExperts:
    """Gathers the float8 matrices along their FSDP axes, and then transposes them.

    The transposed copies are made from the gathered matrices, so each matrix is sent only once.
    """

    def whole(name: str, matrices: QuantizedMatrices | None) -> QuantizedMatrices | None:
        if matrices is None or not (dims := _dims(name, where)):
            return matrices

        def moved(array: jax.Array) -> jax.Array:
            return checkpoint_name(_all_gather(array, dims), GATHERED)

        def turned(array: jax.Array) -> jax.Array:
            return jnp.swapaxes(array, 1, 2)

        gathered: QuantizedArray = jax.tree.map(moved, matrices.matrices)
        return QuantizedMatrices(gathered, jax.tree.map(turned, gathered))

    return QuantizedExperts(*(whole(*item) for item in quantized._asdict().items()))  # type: ignore


_Dims = tuple[tuple[int, Axes], ...]


def _dims(name: str, where: LayerMesh) -> _Dims:
    return tuple((i, axes) for i, axes in enumerate(where.further(name)) if axes)


def _of_each_token(part: jax.Array, where: LayerMesh) -> jax.Array:
    """Casts a shard so that its type varies over all mesh axes of the tokens (vma).

    Ranks that hold the same shard must sum their gradients. With this type, JAX sums the gradients
    after the reduce-scatter, when they are smaller.
    """
    return to_varying(part, frozenset(where.batch_axes) - varying_axes(part))


def _all_gather(array: jax.Array, dims: _Dims) -> jax.Array:
    for dim, axes in dims:
        array = lax.all_gather(array, axes, axis=dim, tiled=True)
    return array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(dims: _Dims, dtype: Any, grad_dtype: Any, zeros: bool, part: jax.Array) -> jax.Array:
    """Casts a rank's shard `part` to `dtype`, and gathers it along mesh axes.

    `dims` is pairs (dimension, mesh axes along which it is gathered). With `zeros`, nothing is
    gathered, and the result is zeros of the gathered shape (see `stand_in`). The backward pass
    casts the gradient to `grad_dtype` and reduce-scatters it.
    """
    if not zeros:
        return _all_gather(part.astype(dtype), dims)
    shape = list(part.shape)
    for dim, axes in dims:
        shape[dim] *= math.prod(lax.axis_size(axis) for axis in axes)
    return to_varying(jnp.zeros(shape, dtype), varying_axes(part))


def _scatter(dims: _Dims, dtype: Any, grad_dtype: Any, zeros: bool, _: None, grad: jax.Array):
    grad = grad.astype(grad_dtype)
    for dim, axes in reversed(dims):
        grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    return (grad,)


_gather.defvjp(lambda *args: (_gather(*args), None), _scatter)
