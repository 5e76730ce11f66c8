"""Wraps every private or unstable part of JAX that jax_ep uses.

Where JAX lacks a name that primitives need, `define_primitive` returns a stand-in that computes
inline, and kernels are refused with the reason of `primitives_unavailable_reason`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import json
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AbstractMesh, Mesh

_Tree = TypeVar("_Tree")


def _find(path: str) -> Any:
    """Returns the object at a dotted path, or None where this JAX lacks it."""
    module, _, name = path.rpartition(".")
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


# Primitives need these names. Where JAX lacks one, `define_primitive` returns a stand-in.
_REQUIRED = {
    path: _find(path)
    for path in (
        "jax.core.ShapedArray",
        "jax.extend.core.Primitive",
        "jax.interpreters.ad.deflinear2",
        "jax.interpreters.batching.primitive_batchers",
        "jax.interpreters.mlir.lower_fun",
        "jax.interpreters.mlir.register_lowering",
        "jax.interpreters.xla.apply_primitive",
    )
}
_shaped_array, _primitive, _deflinear2, _batchers, *_functions = _REQUIRED.values()
_lower_fun, _register_lowering, _apply_primitive = _functions


def primitives_unavailable_reason() -> str | None:
    """Returns which names that primitives need JAX lacks, or None if it has all."""
    missing = [path for path, found in _REQUIRED.items() if found is None]
    return f"JAX {jax.__version__} lacks {', '.join(missing)}" if missing else None


# Maps each optional name of JAX to what the library does, or lacks, where JAX does not have it.
_OPTIONAL = {
    "jax._src.mesh.get_concrete_mesh": "kernels are refused on abstract meshes",
    "jax.interpreters.partial_eval.dce_rules": "unused results of primitives are computed",
    "jax._src.dispatch.prim_requires_devices_during_lowering": "kernels are refused",
    "jax._src.config._check_vma": "kernels that write to operands need check_vma=False",
    "jax.interpreters.pxla.thread_resources": "the mesh of a `with mesh:` is not known",
    "jax._src.distributed.global_state": "processes cannot share memory: kernels are refused",
}


def optional_names_missing() -> list[str]:
    """Returns the names in `_OPTIONAL` that JAX lacks, as "name: consequence"."""
    return [f"{path}: {then}" for path, then in _OPTIONAL.items() if _find(path) is None]


def devices() -> list[jax.Device]:
    """Returns `jax.devices()`. Raises RuntimeError, with the reason, if JAX finds no backend."""
    try:
        return jax.devices()
    except AssertionError as error:
        # JAX_PLATFORMS=cuda makes JAX raise this, without a text, on a machine without a GPU.
        raise RuntimeError(
            f"JAX_PLATFORMS={jax.config.values['jax_platforms']} names no platform of this machine"
        ) from error


# ------------------------------------------------------------------------- varying-axes types (vma)

_check_vma = _find("jax._src.config._check_vma")


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array or type varies (vma); none if JAX lacks vma."""
    # `mat`, a type's manual axis type, holds them.
    kind = x if hasattr(x, "mat") else jax.typeof(x)
    return getattr(getattr(kind, "mat", None), "varying", frozenset())


def match_varying(operands: _Tree, axis_name: Iterable[str] = ()) -> _Tree:
    """Casts all arrays of a pytree to vary over `axis_name` and each axis that any varies over.

    A collective's result differs from rank to rank, so its operands must be typed as varying (vma).
    The transpose of this cast sums the gradient of a replicated operand over the ranks.
    """
    if not hasattr(jax.typeof(jnp.float32(0)), "mat"):
        return operands  # This JAX has no vma.
    axes = frozenset(axis_name).union(*map(varying_axes, jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: to_varying(x, axes - varying_axes(x)), operands)


def to_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Casts x to vary (vma) over the mesh axes `axes`, too; it must not vary over them already."""
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def without_varying(kind: Any) -> Any:
    """Returns the type of an array that varies over no mesh axis (vma), and is else like `kind`."""
    if not varying_axes(kind):
        return kind
    return kind.update(manual_axis_type=kind.mat.update(varying=frozenset()))


def result_type(
    operand: Any, shape: Sequence[int], dtype: Any = None, *, varying: frozenset[str] | None = None
) -> Any:
    """Returns the type of a primitive's result, which has the sharding of `operand`.

    `dtype` and the axes `varying` (vma) are the operand's where they are None.
    """
    changes: dict[str, Any] = {}
    if varying is not None and hasattr(operand, "mat"):
        changes["manual_axis_type"] = operand.mat.update(varying=varying)
    dtype = operand.dtype if dtype is None else jnp.dtype(dtype)
    return operand.update(shape=tuple(shape), dtype=dtype, weak_type=False, **changes)


def replicated(x: jax.Array) -> jax.Array:
    """Reshards x to be replicated over the mesh's Explicit axes, unless it already is."""
    if not any(jax.typeof(x).sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*[None] * x.ndim))


def replicated_over_explicit_axes(function: Callable[..., Any], *operands: jax.Array) -> Any:
    """Calls a function with the mesh's Explicit axes made Auto, and replicates its results.

    Inside `shard_map`, the only Explicit axes are those that the `shard_map` leaves out.
    """
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit:
        spec = jax.sharding.PartitionSpec()
        function = jax.sharding.auto_axes(function, axes=explicit, out_sharding=spec)
    return function(*operands)


# ------------------------------------------------------------ the program that is being lowered


_concrete_mesh = _find("jax._src.mesh.get_concrete_mesh")


class Program:
    """The program in which a primitive is being lowered: its platforms, mesh and devices."""

    def __init__(self, context: Any) -> None:
        # The context is a jax.interpreters.mlir.LoweringRuleContext.
        self._context = context

    @property
    def operand_types(self) -> Sequence[Any]:
        return self._context.avals_in

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms to lower for, such as ("cuda",); () where JAX does not say."""
        platforms = getattr(self._context, "platforms", None)
        platforms = platforms or getattr(self._context.module_context, "platforms", None)
        return tuple(platforms or ())

    @property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh of the enclosing `shard_map`; None without one, and where JAX does not say."""
        return getattr(self._axis_context, "mesh", None)

    @property
    def is_of_one_device(self) -> bool:
        """Whether XLA keeps each array on one device, unpartitioned; False if JAX does not say."""
        mesh, manual = self.mesh, getattr(self._axis_context, "manual_axes", None)
        if mesh is not None and manual is not None:
            return all(size == 1 or name in manual for name, size in mesh.shape.items())
        return getattr(self._axis_context, "num_devices", None) == 1

    @property
    def for_export(self) -> bool:
        """Whether the program is lowered for `jax.export`; True where JAX does not say."""
        parameters = getattr(self._context.module_context, "lowering_parameters", None)
        return getattr(parameters, "for_export", True)

    @property
    def mesh_devices(self) -> np.ndarray | None:
        """The devices of the program's mesh, in the mesh's shape; None where they are not known.

        The devices of an abstract mesh come from an equal mesh of `jax.set_mesh`. Without a mesh,
        they are all devices of the program.
        """
        mesh = self.mesh
        if mesh is None:
            devices = getattr(self._axis_context, "device_assignment", None)
            return None if devices is None else np.asarray(devices, object)
        if isinstance(mesh, AbstractMesh):
            ambient = None if _concrete_mesh is None else _concrete_mesh()
            same = isinstance(ambient, Mesh) and ambient.shape_tuple == mesh.shape_tuple
            mesh = ambient if same else None
        return mesh.devices if isinstance(mesh, Mesh) else None

    @property
    def _axis_context(self) -> Any:
        return getattr(self._context.module_context, "axis_context", None)

    def lower(self, function: Callable[..., Any], *operands: Any, **params: Any) -> Any:
        """Lowers a traceable function in place of the primitive; returns the results' IR values.

        While the function is traced, `current_program` returns this program.
        """
        # The function is traced as with check_vma=False. A kernel that writes to its operands takes
        # references, and Pallas refuses references to arrays that vary over mesh axes.
        context = self._context
        unchecked = contextlib.nullcontext()
        if _check_vma is not None:
            kinds = [without_varying(kind) for kind in self.operand_types]
            context = context.replace(avals_in=kinds)
            unchecked = _check_vma(False)
        token = _current.set(self)
        try:
            with unchecked:
                return _lower_fun(function, multiple_results=True)(context, *operands, **params)
        finally:
            _current.reset(token)


_current: contextvars.ContextVar[Program | None] = contextvars.ContextVar("program", default=None)


def current_program() -> Program | None:
    """Returns the program whose `Program.lower` is running, or None outside of such a call."""
    return _current.get()


# -------------------------------------------------------------------------------------- primitives


def define_primitive(
    name: str,
    *,
    abstract_eval: Callable[..., Any],
    lower: Callable[..., Any],
    inline: Callable[..., Any],
    batch: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    multiple_results: bool = True,
    platforms: Sequence[str | None] = (None,),
    unused: Callable[..., Any] | None = None,
) -> Any:
    """Makes a primitive; where JAX lacks what primitives need, a stand-in that computes inline.

    The params of the primitive must be hashable.

    Args:
      abstract_eval: maps (operand types, params) to the type or types of the results.
      lower: maps (`Program`, IR values of the operands, params) to the results' IR values.
      inline: maps (operands, params) to the results; the function that the stand-in calls.
      batch: the rule for `jax.vmap`; maps (operands, batch axes, params) to the results and their
        batch axes.
      transpose: the transpose of a linear primitive; maps (cotangents, operand types, params) to
        the operands' cotangents.
      platforms: the platforms that get a lowering of their own; None in it means every other one.
        A program for several platforms branches over them, and no branch may have a collective.
      unused: the rule by which JAX drops unused results. It maps a list that says for each result
        whether it is used, and params, to (reduced params, indices of the kept results, indices of
        the kept operands or None for all).
    """
    if primitives_unavailable_reason() is not None:
        return types.SimpleNamespace(bind=inline)
    primitive = _primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract_eval)
    for platform in platforms:
        _register_lowering(
            primitive,
            lambda context, *operands, **params: lower(Program(context), *operands, **params),
            platform=platform,
        )
    if transpose is not None:
        _deflinear2(
            primitive,
            lambda cotangents, *operands, **params: transpose(
                cotangents, *map(_type_of_linear, operands), **params
            ),
        )
    if batch is not None:
        _batchers[primitive] = batch
    primitive.def_impl(functools.partial(_apply_primitive, primitive))
    if unused is not None and _dce_rules is not None:
        _dce_rules[primitive] = functools.partial(_without_unused_results, unused)
    return primitive


def one_by_one(
    bind: Callable[..., Any], operands: Sequence[jax.Array], dims: Sequence[int | None]
) -> Any:
    """Runs a primitive for one element of a `jax.vmap`'s batch after the other; stacks results.

    dims[i] is the batch axis of operands[i]; None: all elements of the batch share the operand.
    """
    pairs = list(zip(operands, dims, strict=True))

    def bind_one(elements: list[jax.Array]) -> Any:
        remaining = iter(elements)
        return bind(*(x if dim is None else next(remaining) for x, dim in pairs))

    return lax.map(bind_one, [jnp.moveaxis(x, dim, 0) for x, dim in pairs if dim is not None])


def _type_of_linear(operand: Any) -> Any:
    """Returns the type of a transpose rule's operand: an array, or JAX's placeholder for one."""
    kind = getattr(operand, "aval", None)
    return jax.typeof(operand) if kind is None else kind


_dce_rules = _find("jax.interpreters.partial_eval.dce_rules")


def _without_unused_results(
    unused: Callable[..., Any], used: Sequence[bool], *live_and_equation: Any
) -> tuple[list[bool], Any]:
    """Removes unused results from a jaxpr equation, by the rule `unused` of `define_primitive`.

    Returns for each operand whether it is used, and the smaller equation; None: drop it.
    """
    # From jax 0.12 on, the live operands come before the equation.
    equation = live_and_equation[-1]
    if not any(used):
        return [False] * len(equation.invars), None
    params, kept_results, kept_operands = unused(used, equation.params)
    if kept_operands is None:
        kept_operands = range(len(equation.invars))
    smaller = equation.replace(
        params=params,
        invars=[equation.invars[i] for i in kept_operands],
        outvars=[equation.outvars[i] for i in kept_results],
    )
    return [i in kept_operands for i in range(len(equation.invars))], smaller


def _lower_mesh_index(program: Program) -> list[Any]:
    # The partition_id of a device is its index in the mesh. XLA launches a kernel to store the
    # result of `lax.axis_index`, but none for partition_id.
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    i32 = ir.IntegerType.get_signless(32)
    word = stablehlo.bitcast_convert(ir.RankedTensorType.get((), i32), stablehlo.partition_id())
    return [stablehlo.reshape(ir.RankedTensorType.get((1,), i32), word)]


_mesh_index_p = define_primitive(
    "ep_mesh_index",
    abstract_eval=lambda: _shaped_array((1,), jnp.int32),
    lower=_lower_mesh_index,
    # Never called: only kernels use it, which are refused where JAX cannot define primitives.
    inline=lambda: jnp.zeros(1, jnp.int32),
    multiple_results=False,
)


def mesh_index() -> jax.Array:
    """Returns this device's index in its mesh, in row-major order, as [1] int32."""
    return _mesh_index_p.bind()


# The set of the primitives that make JAX lower a program again for other devices, instead of
# running a cached program there. None where JAX lacks the set.
_requires_devices = _find("jax._src.dispatch.prim_requires_devices_during_lowering")

_devices_p: Any = define_primitive(
    "ep_devices",
    abstract_eval=lambda x: x,
    lower=lambda program, x: [x],
    inline=lambda x: x,
    batch=lambda operands, axes: (_devices_p.bind(*operands), axes[0]),
    transpose=lambda g, x: [lowered_anew_for_other_devices(g)],
    multiple_results=False,
)
if _requires_devices is not None and primitives_unavailable_reason() is None:
    _requires_devices.add(_devices_p)


def devices_unavailable_reason() -> str | None:
    """Returns why JAX does not lower programs with kernels anew for other GPUs; else None."""
    if _requires_devices is None:
        return (
            "this JAX may run what is lowered for some GPUs on others: it lacks "
            "jax._src.dispatch.prim_requires_devices_during_lowering"
        )
    return None


def lowered_anew_for_other_devices(x: jax.Array) -> jax.Array:
    """Returns x, by a primitive for which JAX lowers the program anew for each set of GPUs.

    A program with kernels needs this, since it holds addresses of its GPUs' memory.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Else the program is for another machine, whose devices are not known.
    is_for_this_machine = jax.default_backend() == "gpu" and mesh.size <= jax.device_count()
    return _devices_p.bind(x) if is_for_this_machine else x


def is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def gpus() -> list[jax.Device]:
    """Returns the GPUs that JAX finds on this machine, whatever its default backend is."""
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def register_for_export(
    kind: type,
    to_names: Callable[[Any], Any] = lambda fields: fields,
    of_names: Callable[[Any], Any] = lambda fields: fields,
) -> None:
    """Lets `jax.export` serialize a dataclass that is a pytree, or a NamedTuple.

    `to_names` converts a dataclass's static fields to strings, numbers, None, and tuples of them;
    `of_names` converts them back.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    # JAX refuses a name that is registered already, as if the module is reloaded.
    with contextlib.suppress(ValueError):
        if issubclass(kind, tuple):
            export.register_namedtuple_serialization(kind, serialized_name=name)
        else:
            export.register_pytree_node_serialization(
                kind,
                serialized_name=name,
                serialize_auxdata=lambda fields: _static_to_bytes(name, to_names(fields)),
                deserialize_auxdata=lambda data: of_names(_tuples(json.loads(data))),
            )


def _static_to_bytes(name: str, fields: Any) -> bytes:
    try:
        return json.dumps(fields).encode()
    except TypeError as error:
        raise ValueError(
            f"the static fields of {name} cannot be serialized, they are {fields}: a capacity that "
            "depends on a symbolic dimension must be given as an integer."
        ) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def smaller(size: Any, other: Any) -> Any:
    """Returns the smaller of two sizes, which may be symbolic dimensions of `jax.export`."""
    return jax.core.min_dim(size, other)


def mesh_of_with_statement() -> Mesh | None:
    """Returns the mesh of an enclosing `with mesh:`, which predates `jax.set_mesh`; else None."""
    resources = _find("jax.interpreters.pxla.thread_resources")
    mesh = getattr(getattr(resources, "env", None), "physical_mesh", None)
    return None if mesh is None or mesh.empty else mesh


def platform_of_traced_mesh() -> str | None:
    """Returns the platform of the traced mesh's devices, as "gpu"; None where JAX does not say."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def distributed_client() -> Any:
    """Returns a client of `jax.distributed`'s key-value service; None before `initialize`."""
    return getattr(_find("jax._src.distributed.global_state"), "client", None)


def is_rocm(device: jax.Device) -> bool:
    """Returns whether a GPU is made by AMD (ROCm); False where JAX does not say."""
    return "rocm" in getattr(getattr(device, "client", None), "platform_version", "")


def looks_for_nans() -> bool:
    """Returns whether `jax_debug_nans` or `jax_debug_infs` makes JAX check all results."""
    config = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs)  # type: ignore[attr-defined]


def address_of(array: jax.Array) -> int:
    """Returns the memory address of an array's shard on its first device of this process."""
    get_address = getattr(array.addressable_shards[0].data, "unsafe_buffer_pointer", None)
    if get_address is None:
        raise NotImplementedError(
            f"JAX {jax.__version__} lacks jax.Array.unsafe_buffer_pointer, which gives addresses"
        )
    return int(get_address())
