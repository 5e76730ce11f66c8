"""Tests of the memory accounting, against XLA's memory analysis and the kernels' operands."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.contract import AXIS
from support.kernels import needs_kernels
from support.meshes import cuda_mesh, expert_mesh
from support.selection import quick

import jax_ep
from jax_ep.exchange import memory
from jax_ep.exchange.routes import RankRoutes, Routes, dropless_capacity

MIB = 2**20
MODEL = dict(num_tokens=128, hidden=7168, num_experts=256, top_k=8, num_ranks=8)

# Each shape is (N ranks, T tokens, H hidden, K choices, E experts, R rows).
SHAPES = [(8, 128, 256, 8, 256, 1152), (8, 16, 1024, 4, 32, 96), (2, 64, 512, 8, 32, 600)]


def model_of(shape: tuple[int, ...]) -> dict[str, int]:
    num_ranks, num_tokens, hidden, top_k, num_experts, capacity = shape
    return dict(
        num_ranks=num_ranks, num_tokens=num_tokens, hidden=hidden, top_k=top_k,
        num_experts=num_experts, capacity=capacity,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations whose memory is counted, on one rank, as functions of arrays."""

    implementation: str
    model: dict[str, int]
    layout: str
    wire_dtype: str | None
    output: str

    def run_by(self) -> dict[str, Any]:
        return dict(implementation=self.implementation)

    def on_wire(self) -> dict[str, Any]:
        return dict(wire_dtype=self.wire_dtype, **self.run_by())

    def gradient_on_wire(self) -> dict[str, Any]:
        return dict(grad_wire_dtype=self.wire_dtype, **self.run_by())

    def handle(self, topk_idx, *routes):
        num_experts, capacity = self.model["num_experts"], self.model["capacity"]
        if self.layout == "rank":
            return jax_ep.RankHandle(RankRoutes(topk_idx, *routes), (AXIS,), num_experts)
        return jax_ep.Handle(Routes(topk_idx, *routes), (AXIS,), capacity, num_experts, 1)

    def routes_and_weights(self, arrays):
        """Splits the last operands of a combine into routes and weights."""
        return (arrays, None) if self.layout == "rank" else (arrays[:-1], arrays[-1])

    def dispatch(self, x, topk_idx):
        rank_major = self.layout == "rank"
        layout = dict(layout="rank") if rank_major else dict(capacity=self.model["capacity"])
        sent = jax_ep.dispatch(
            x,
            topk_idx,
            num_experts=self.model["num_experts"],
            axis_name=AXIS,
            output=self.output,
            **layout,
            **self.on_wire(),
        )
        return sent.tokens

    def dispatch_like(self, x, *routes):
        return jax_ep.dispatch_like(x, self.handle(*routes), **self.on_wire())

    def dispatch_grad(self, x, g, *routes):
        def like(x):
            return jax_ep.dispatch_like(x, self.handle(*routes), **self.gradient_on_wire())

        return jax.vjp(like, x)[1](g)

    def combine(self, y, *arrays):
        routes, weights = self.routes_and_weights(arrays)
        return jax_ep.combine(y, self.handle(*routes), weights, **self.on_wire())

    def combine_grad(self, y, g, *arrays):
        routes, weights = self.routes_and_weights(arrays)

        def combined(y, weights):
            return jax_ep.combine(y, self.handle(*routes), weights, **self.gradient_on_wire())

        return jax.vjp(combined, y, weights)[1](g)

    def received(self, tokens, topk_idx, local_topk_idx):
        handle = self.handle(topk_idx, local_topk_idx)
        return jax_ep.RankDispatched(tokens, local_topk_idx, None, handle)

    def group_by_expert(self, *arrays):
        options = dict(capacity=self.model["capacity"], **self.run_by())
        return jax_ep.group_by_expert(self.received(*arrays), **options).tokens

    def sum_by_token(self, y, grouped_rows, counts, tokens, topk_idx, local_topk_idx):
        num_local = self.model["num_experts"] // self.model["num_ranks"]
        flat = local_topk_idx.reshape(-1, self.model["top_k"])
        routes = Routes(flat, grouped_rows, counts)
        local = jax_ep.Handle(routes, (), self.model["capacity"], num_local, 1)
        grouped = jax_ep.Dispatched(y, *(None,) * 5, local)
        received = dataclasses.replace(
            self.received(tokens, topk_idx, local_topk_idx),
            topk_weights=local_topk_idx * jnp.float32(0.5),
        )
        return jax_ep.sum_by_token(y, grouped, received, **self.run_by())


def operation(
    name: str, implementation: str, model: dict[str, int], dtype: str, mesh, *, layout, wire_dtype,
    output="dequantized",
):  # fmt: skip
    """Returns the operation `name` of `Operations`, jitted, and the shapes of its arguments."""
    ranks, tokens, rows = model["num_ranks"], model["num_tokens"], model["capacity"]
    hidden, top_k, num_experts = model["hidden"], model["top_k"], model["num_experts"]
    choices = ((ranks * tokens, top_k), "int32")
    of_ranks = ((ranks * ranks, tokens, top_k), "int32")
    sent = ((ranks * tokens, hidden), dtype)
    if layout == "rank":
        received = ((ranks * ranks, tokens, hidden), dtype)
        routes, weights = [choices, of_ranks], []
    else:
        received = ((ranks * rows, hidden), dtype)
        routes = [choices, of_ranks, ((ranks * ranks, num_experts), "int32")]
        weights = [((ranks * tokens, top_k), "float32")]
    grouped = [
        ((ranks * rows, hidden), dtype),
        ((ranks, ranks * tokens, top_k), "int32"),
        ((ranks, num_experts // ranks), "int32"),
    ]
    of = Operations(implementation, model, layout, wire_dtype, output)
    body, arguments = {
        "dispatch": (of.dispatch, [sent, choices]),
        "dispatch_like": (of.dispatch_like, [sent, *routes]),
        "dispatch_grad": (of.dispatch_grad, [sent, received, *routes]),
        "combine": (of.combine, [received, *routes, *weights]),
        "combine_grad": (of.combine_grad, [received, sent, *routes, *weights]),
        "group_by_expert": (of.group_by_expert, [received, *routes]),
        "sum_by_token": (of.sum_by_token, [*grouped, received, *routes]),
    }[name]
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
    return run, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]


def held_by(name: str, implementation: str, model: dict[str, int], dtype: str, **way) -> Any:
    """Compiles an operation; returns the bytes of its temporaries and of its results."""
    mesh = expert_mesh(model["num_ranks"])
    run, arguments = operation(name, implementation, model, dtype, mesh, **way)
    analysis = run.lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes, analysis.output_size_in_bytes


on_cpus = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the bounds are of XLA for CPUs"
)
# Each case is (operation, layout, dtype, least, most): XLA must hold at least `least` and at most
# `most` times the counted bytes. It allocates a few more vectors, and reuses some memory.
CASES = [
    ("dispatch", "expert", "bfloat16", 0.7, 1.4),
    ("dispatch", "rank", "bfloat16", 0.85, 1.05),
    ("dispatch_like", "expert", "bfloat16", 0.95, 1.05),
    ("dispatch_like", "rank", "bfloat16", 0.85, 1.05),
    ("combine", "expert", "bfloat16", 0.95, 1.05),
    # In float32, since XLA for CPUs converts bfloat16 to float32 for an all-to-all.
    ("combine", "rank", "float32", 0.7, 1.05),
    ("dispatch_grad", "expert", "bfloat16", 0.95, 1.05),
    ("dispatch_grad", "rank", "float32", 0.7, 1.05),
    # XLA holds less than is counted, since the products with y reuse the gathered tokens' memory.
    ("combine_grad", "expert", "bfloat16", 0.65, 1.05),
    ("combine_grad", "expert", "float32", 0.65, 1.05),
    ("combine_grad", "rank", "bfloat16", 0.85, 1.05),
]


@on_cpus
@pytest.mark.parametrize("shape", quick(SHAPES, SHAPES[1], unpack=False), ids=str)
@pytest.mark.parametrize(("name", "layout", "dtype", "least", "most"), CASES)
def test_the_portable_exchange_holds_what_xla_says(name, layout, dtype, least, most, shape):
    model, way = model_of(shape), dict(layout=layout, wire_dtype=None)
    held, _ = held_by(name, "xla", model, dtype, **way)
    counted = sum(memory.workspace_bytes(name, "xla", dtype=dtype, **way, **model).values())
    assert least * counted <= held <= most * counted


@on_cpus
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_group_by_expert_holds_what_xla_says(shape):
    """The counted bytes of `group_by_expert` must be close to XLA's temporaries."""
    model, way = model_of(shape), dict(layout="rank", wire_dtype=None)
    held, _ = held_by("group_by_expert", "xla", model, "float32", **way)
    buffers = memory.workspace_bytes(
        "group_by_expert", "xla", dtype="float32", layout="rank", **model
    )
    counted = sum(buffers.values())
    assert 0.7 * counted <= held <= 1.05 * counted + 3 * buffers["counting choices"]


_KERNEL = re.compile(r"stablehlo\.custom_call @mosaic_gpu_v2.* : \((.*)\) -> \(?(.*?)\)?$", re.M)


def tensors(text: str) -> list[tuple[tuple[int, ...], int]]:
    """Returns (shape, bytes) of each tensor<...> type in a program's text."""
    found = []
    for sizes, bits in re.findall(r"tensor<((?:\d+x)*)[a-z]+(\d+)\w*>", text):
        shape = tuple(int(size) for size in sizes.split("x")[:-1])
        total = int(bits) // 8
        for size in shape:
            total *= size
        found.append((shape, total))
    return found


@needs_kernels
@pytest.mark.parametrize(
    ("name", "layout", "wire_dtype", "output"),
    [
        ("dispatch", "expert", None, "dequantized"),
        ("dispatch", "rank", None, "dequantized"),
        ("dispatch", "expert", "float8_e4m3fn", "dequantized"),
        ("dispatch", "expert", "float8_e4m3fn", "quantized"),
        ("dispatch", "rank", "float8_e4m3fn", "quantized"),
        ("dispatch_like", "expert", None, "dequantized"),
        ("dispatch_like", "rank", None, "dequantized"),
        ("dispatch_like", "expert", "float8_e4m3fn", "dequantized"),
        ("combine", "expert", None, "dequantized"),
        ("combine", "rank", None, "dequantized"),
        ("combine", "expert", "float8_e4m3fn", "dequantized"),
        ("combine", "rank", "float8_e4m3fn", "dequantized"),
        ("dispatch_grad", "expert", "float8_e4m3fn", "dequantized"),
        ("dispatch_grad", "expert", None, "dequantized"),
        ("dispatch_grad", "rank", None, "dequantized"),
        ("combine_grad", "rank", None, "dequantized"),
        ("group_by_expert", "rank", None, "dequantized"),
        ("sum_by_token", "rank", None, "dequantized"),
    ],
)
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(7168, "bfloat16"), (384, "bfloat16"), (200, "float32")],
)
@pytest.mark.parametrize("num_tokens", [128, 4096])
@pytest.mark.slow
def test_the_kernels_hold_what_their_calls_are_lowered_with(
    name, layout, wire_dtype, output, num_tokens, hidden, dtype
):
    if wire_dtype is not None and hidden % 128:
        pytest.skip("not whole blocks")
    model = MODEL | {"num_tokens": num_tokens, "hidden": hidden, "capacity": num_tokens * 9}
    way = dict(layout=layout, wire_dtype=wire_dtype, output=output)
    mesh = cuda_mesh((8,), (AXIS,))
    run, arguments = operation(name, "pallas", model, dtype, mesh, **way)
    text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    kernels = _KERNEL.findall(text)
    # The operation's kernel is the last one: in a gradient, a forward kernel may come before it.
    operands, results = map(tensors, kernels[-1])
    # The first operand is the index of this rank's device in the mesh.
    index, *operands = operands
    assert index == ((1,), 4)

    itemsize = jnp.dtype(dtype).itemsize
    multiple = 512 if wire_dtype is not None else 128 // itemsize
    padded = -(-hidden // multiple) * multiple
    by_rank = layout == "rank" and name not in memory.LOCAL
    num_rows = 8 * num_tokens if by_rank else model["capacity"]
    y = received = [((num_rows, padded), num_rows * padded * itemsize)]
    if wire_dtype is not None:
        scales = padded // 128
        received = [
            ((num_rows, padded), num_rows * padded), ((num_rows, scales), num_rows * scales * 4)
        ]  # fmt: skip
    if name in ("combine", "dispatch_grad", "sum_by_token"):
        assert operands[0] == y[0]
        held = results[1:] + ([operands[0], results[0]] if padded != hidden else [])
    else:
        assert results[: len(received)] == received
        held = results[len(received) :]
        if name == "dispatch_like" and not by_rank:
            # The kernel's inputs are x, and the rows and counts of the handle's routes. For few
            # tokens, this rank's choices are an input too. All further operands are workspace.
            own_choices = ((num_tokens * model["top_k"],), num_tokens * model["top_k"] * 4)
            num_inputs = 3 + (operands[1] == own_choices)
        else:
            senders = 8 * num_tokens if name in memory.LOCAL else num_tokens
            # The second operand is the choices.
            assert operands[1][1] == senders * model["top_k"] * 4
            num_inputs = 2
        if name in ("dispatch", "group_by_expert") and not by_rank:
            per_rank = model["num_experts"] // 8
            # These results describe the layout and belong to the caller.
            of_layout = [((per_rank,), per_rank * 4)] * 2 + [((1,), 4)] * 2
            assert held[2:6] == of_layout
            held = [*held[:2], *held[6:]]
        held += operands[num_inputs:]
        if padded != hidden or (wire_dtype is not None and output == "dequantized"):
            held += received
        if padded != hidden:
            held += operands[:1]
    counted = memory.workspace_bytes(name, "pallas", dtype=dtype, **way, **model)
    assert sum(size for _, size in held) == sum(counted.values())


def test_the_kernels_need_little():
    """Dispatch must need almost no workspace, and dispatch and combine together at most 16 MiB."""
    dispatch = memory.workspace_bytes("dispatch", "pallas", **MODEL)
    combine = memory.workspace_bytes("combine", "pallas", **MODEL)
    assert sum(dispatch.values()) < 0.2 * MIB
    assert sum(dispatch.values()) + sum(combine.values()) <= 16 * MIB


@on_cpus
@pytest.mark.parametrize(
    ("name", "layout", "dtype", "wire_dtype", "num_hosts"),
    quick(
        [
            *((*case[:3], None, num_hosts) for case in CASES for num_hosts in (2, 4)),
            ("dispatch", "expert", "bfloat16", "float8_e4m3fn", 2),
            ("dispatch_like", "expert", "bfloat16", "float8_e4m3fn", 2),
        ],
        (*CASES[2][:3], None, 4),
        (*CASES[4][:3], None, 4),
        ("dispatch", "expert", "bfloat16", "float8_e4m3fn", 2),
    ),
)
def test_the_exchange_between_hosts_holds_what_xla_says(
    name, layout, dtype, wire_dtype, num_hosts, monkeypatch
):
    """On several hosts, XLA must hold 0.6 to 1.5 times the counted bytes."""
    if jax.__version_info__ < (0, 11) and name != "dispatch":
        if dtype == "bfloat16" or name == "combine_grad":
            pytest.skip("XLA of JAX 0.10 also holds sums of bfloat16, and products, in float32")
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", str(8 // num_hosts))
    model, way = model_of(SHAPES[1]), dict(layout=layout, wire_dtype=wire_dtype)
    held, _ = held_by(name, "two_level", model, dtype, **way)
    options = dict(num_hosts=num_hosts, dtype=dtype, **way)
    buffers = memory.workspace_bytes(name, "xla", **options, **model)
    counted = sum(buffers.values())
    if layout == "rank" and name in ("combine", "dispatch_grad"):
        counted -= buffers["sums for and of other hosts"] // 2
    if wire_dtype is not None:
        assert buffers["received rows"] == model["capacity"] * model["hidden"] * 33 // 32
    assert 0.6 * counted <= held <= 1.5 * counted


def test_of_several_hosts_no_buffer_has_the_rows_of_all_ranks():
    """On 8 hosts of 8 ranks, a rank must hold the tokens of 23 ranks with XLA, not of 64."""
    model = dict(num_tokens=128, hidden=7168, num_experts=256, top_k=8, num_ranks=64, capacity=1152)
    one = memory.workspace_bytes("dispatch_like", "xla", **model)
    two = memory.workspace_bytes("dispatch_like", "xla", num_hosts=8, **model)
    row = 7168 * 2
    assert one["gathered tokens"] == 64 * 128 * row
    assert two["gathered tokens"] == 2 * 8 * 128 * row and two["rows of the rail"] == 7 * 128 * row
    kernels = memory.workspace_bytes("dispatch_like", "pallas", num_hosts=8, **model)
    assert kernels == {"rows of the rail": 8 * 128 * row}
    half = memory.workspace_bytes("combine", "xla", num_hosts=8, host_capacity=64, **model)
    assert half["sums for and of other hosts"] == 8 * 64 * row
    assert half["returned sums, by token"] == 7 * 128 * row
    many = dict(model, num_tokens=4096, capacity=36864)
    kernels = memory.workspace_bytes("dispatch_like", "pallas", num_hosts=8, **many)
    assert kernels == {"rows of the rail": 2 * 4096 * row}
    two = memory.workspace_bytes("dispatch_like", "pallas", num_hosts=2, **many)
    assert two == {"rows of the rail": 4096 * row}


@on_cpus
@pytest.mark.parametrize("name", ["dispatch_like", "combine_grad"])
def test_of_several_hosts_xla_holds_the_rows_of_one_after_the_other(name, monkeypatch):
    """On 4 hosts of 2 ranks, XLA must not hold the rows of all 8 ranks at once."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("XLA of JAX 0.10 for CPUs makes one kernel of the turns, over their barriers")
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "2")
    model = model_of((8, 64, 1024, 1, 32, 16))
    held, _ = held_by(name, "two_level", model, "float32", layout="expert", wire_dtype=None)
    assert held < 8 * 64 * 1024 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(operation="gather"), "operation must be one of .* 'gather'"),
        (dict(layout="row"), "layout must be one of .* 'row'"),
        (dict(wire_dtype="int8"), "wire_dtype must be None or float8_e4m3fn"),
        (dict(wire_dtype="float8_e4m3fn", hidden=200), "hidden has 200 columns"),
        (dict(implementation="nccl"), "implementation must be one of .* 'nccl'"),
        (dict(output="bits"), "output must be .* 'bits'"),
        (dict(output="quantized"), 'output="quantized" needs a wire_dtype'),
        (dict(num_tokens=0), "num_tokens must be at least 1, but is 0"),
        (dict(num_ranks=7), "num_experts must be a positive multiple of num_ranks.* 256 for 7"),
        (dict(host_capacity=0), "host_capacity must be at least 1, but is 0"),
        (dict(num_hosts=3), "num_hosts must divide the 8 ranks, but is 3"),
        (dict(num_ranks=8.0), "num_ranks must be a static integer, but is 8.0"),
        (dict(capacity=0), "capacity must be at least 1, but is 0"),
        (dict(capacity=-1), "capacity must be at least 1, but is -1"),
        (dict(expert_alignment=0), "expert_alignment must be at least 1, but is 0"),
        (dict(dtype="foo"), "dtype must be a floating dtype, but is 'foo'"),
        (dict(dtype="int32"), "dtype must be a floating dtype, but is 'int32'"),
        (
            dict(operation="combine", wire_dtype="float8_e4m3fn", output="quantized"),
            'output must be "dequantized" for combine: only a dispatch returns quantized rows',
        ),
        (dict(operation="sum_by_token"), 'layout must be "rank" for sum_by_token'),
        (
            dict(operation="group_by_expert", layout="rank", wire_dtype="float8_e4m3fn"),
            "wire_dtype must be None for group_by_expert",
        ),
        (dict(implementation="pallas", hidden=70000), "cannot run: a row of 70016 .* too long"),
        (dict(implementation="pallas", top_k=300), "cannot run: .* 300 choices"),
        (dict(implementation="pallas", num_experts=4096), "cannot run: .* 4096 experts"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"operation": "dispatch", "implementation": "xla", **MODEL, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        memory.workspace_bytes(**arguments)


def test_alignment_makes_a_dropless_buffer_larger():
    def held(alignment: int) -> int:
        return memory.workspace_bytes("dispatch", "xla", expert_alignment=alignment, **MODEL)[
            "choice of each row"
        ]

    assert held(16) - held(1) == 4 * (
        dropless_capacity(8 * 128 * 8, 32, 16) - dropless_capacity(8 * 128 * 8, 32, 1)
    )


@on_cpus
@pytest.mark.parametrize("layout", memory.LAYOUTS)
@pytest.mark.parametrize("name", memory.OPERATIONS)
def test_results_are_as_large_as_xla_says(name, layout):
    """The counted bytes of an operation's results must be those that XLA allocates for them."""
    if name in memory.LOCAL and layout != "rank":
        pytest.skip("of the rank-major layout")
    model, way = model_of(SHAPES[1]), dict(layout=layout, wire_dtype=None)
    _, given = held_by(name, "xla", model, "bfloat16", **way)
    counted = sum(memory.result_bytes(name, "xla", **way, **model).values())
    assert counted <= given <= 1.05 * counted + 64
