"""Tests of `python -m jax_ep bench` for the exchange: what it times, checks and reports."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import meshes
from support.selection import quick

import jax_ep.cli
from jax_ep import reference
from jax_ep.bench import baselines, operations, report, timing
from jax_ep.bench import exchange as bench
from jax_ep.runtime import availability

IMPLEMENTATIONS = ["xla"] if availability.unavailable_reason() else ["xla", "pallas"]


def make_work(num_ranks: int, dtype=jnp.float32, hidden=24, **kwargs) -> operations.Work:
    topk_idx = operations.uniform_routing(num_ranks * 6, 16, 3, seed=5)
    capacity = operations.rows_needed(topk_idx, num_ranks, 16, kwargs.get("expert_alignment", 1))
    return operations.Work(topk_idx, num_ranks, 16, hidden, jnp.dtype(dtype), capacity, **kwargs)


def run_step(part, num_ranks: int):
    loop = timing.Loop(part.prepare, part.step, part.arrays, meshes.expert_mesh(num_ranks), 10)
    return jax.device_get((loop.state, loop.outputs()))


@pytest.mark.parametrize("name", quick([*operations.OPERATIONS], "dispatch", "combine"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
def test_an_operation_agrees_with_the_reference_and_only_then(name, num_ranks, implementation):
    work = make_work(num_ranks, expert_alignment=4)
    operation = operations.make_operation(name, work, implementation, seed=1)
    state, outputs = run_step(operation, num_ranks)
    operation.check(state, outputs)

    leaves, structure = jax.tree.flatten(outputs)
    spoiled = [np.array(leaf) for leaf in leaves]
    spoiled[0][-1].reshape(-1, work.hidden)[3, 1] += 0.01
    with pytest.raises(AssertionError, match=f"1 of .* differ.*first at .{3}, 1."):
        operation.check(state, jax.tree.unflatten(structure, spoiled))


@pytest.mark.parametrize("name", quick([*operations.OPERATIONS], "dispatch"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("layout", "wire_dtype", "output"),
    quick(
        [
            ("rank", None, "dequantized"),
            ("rank", "float8_e4m3fn", "quantized"),
            ("expert", "float8_e4m3fn", "dequantized"),
            ("expert", "float8_e4m3fn", "quantized"),
        ],
        ("rank", "float8_e4m3fn", "quantized"),
        ("expert", "float8_e4m3fn", "dequantized"),
    ),
)
def test_so_does_it_in_another_layout_and_wire_dtype(
    name, implementation, layout, wire_dtype, output
):
    if wire_dtype and name not in operations.QUANTIZED:
        pytest.skip("nothing to quantize")
    num_ranks = min(4, len(jax.devices()))
    wire_dtype = wire_dtype and jnp.dtype(wire_dtype)
    work = make_work(num_ranks, hidden=128, layout=layout, wire_dtype=wire_dtype, output=output)
    operation = operations.make_operation(name, work, implementation, seed=1)
    state, outputs = run_step(operation, num_ranks)
    operation.check(state, outputs)
    leaves, structure = jax.tree.flatten(outputs)
    spoiled = [np.array(leaf) for leaf in leaves]
    spoiled[-1 if name == "round_trip" else 0][0, 0] = 77
    with pytest.raises(AssertionError, match="differ from the reference"):
        operation.check(state, jax.tree.unflatten(structure, spoiled))


@pytest.mark.parametrize("name", list(operations.DIRECTIONS))
@pytest.mark.slow
def test_so_does_it_with_a_capacity_between_hosts(name, monkeypatch):
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "2")
    work = make_work(4, num_hosts=2, host_capacity=4)
    operation = operations.make_operation(name, work, "two_level", seed=1)
    state, outputs = run_step(operation, 4)
    operation.check(state, outputs)
    unlimited = dataclasses.replace(work, host_capacity=None)
    with pytest.raises(AssertionError, match="differ from the reference"):
        operations.make_operation(name, unlimited, "two_level", seed=1).check(state, outputs)


@pytest.mark.parametrize("name", baselines.BASELINES)
@pytest.mark.parametrize("direction", quick(["out", "back"], "out"))
def test_a_baseline_moves_the_rows_it_says(name, direction):
    if baselines.unavailable_reason(name, jax.default_backend()):
        pytest.skip(f"{name} cannot run here")
    case = make_work(4).case()
    baseline = baselines.BASELINES[name](case, direction)
    state, outputs = run_step(baseline, 4)
    baseline.check(state, outputs)
    spoiled = np.array(outputs)
    spoiled.reshape(-1)[3] += 1
    with pytest.raises(AssertionError, match="off by up to 1"):
        baseline.check(state, spoiled)
    assert not np.allclose(outputs[0], outputs[1]) or name.startswith("all_gather")


def test_wire_rows_are_those_of_the_reference():
    work = make_work(4)
    case = work.case()
    crossing = set()
    for source, routes in enumerate(work.routes()):
        for token, choice in np.ndindex(*routes.ranks.shape):
            if routes.ranks[token, choice] != source:
                crossing.add((source, token, routes.ranks[token, choice]))
    assert case.wire_rows() == len(crossing) / 4
    assert case.pairs().sum() == work.topk_idx.size
    needed = reference.dispatch(
        [np.zeros((6, 1))] * 4, np.split(work.topk_idx, 4), num_experts=16, expert_alignment=8
    )
    assert operations.rows_needed(work.topk_idx, 4, 16, 8) == max(r.rows_needed for r in needed)


def test_nothing_is_hoisted_out_of_the_loop():
    mesh = meshes.expert_mesh(2)
    x = np.ones((2, 8), np.float32)
    loop = timing.Loop(lambda x: x, lambda x: (lax.psum(3 * x, "expert"), x + 1), (x,), mesh, 10)
    text = loop.compiled.as_text()
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*{\n(.*?)^}", text, re.S | re.M))
    (body,) = re.findall(r"while\(.*body=%?([\w.\-]+)", text)
    called = re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", computations[body])
    assert any("all-reduce" in computations[name] for name in (body, *called))
    np.testing.assert_array_equal(loop.outputs()[0], np.full((2, 1, 8), 6))
    wall = loop.wall_time(repeats=2)
    assert 0 < wall.low <= wall.median <= wall.high


TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "put" } }
  event_metadata { key: 2 value { id: 2 name: "Memset" } }
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 }
    events { metadata_id: 1 offset_ps: 20000000 duration_ps: 14000000 }
  }
  lines {
    name: "Stream #14(MemcpyD2D)"
    events { metadata_id: 2 offset_ps: 15000000 duration_ps: 2000000 }
  }
  lines {
    name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 34000000 }
  }
}
planes { name: "/device:GPU:1" }
planes { name: "/host:CPU" lines { name: "Stream" events { duration_ps: 5 } } }
"""


def test_a_trace_is_read_by_device_and_stream():
    profile = jax.profiler.ProfileData.from_text_proto(TRACE)
    (launches,) = timing.launches_by_device(profile)
    assert launches == [("put", 10.0), ("Memset", 2.0), ("put", 14.0)]
    time = timing.summarize_by_rank([launches], calls=2)
    # In two calls, "put" took 10 and 14 microseconds, so 12 per call. The one memset took 2, so 1.
    assert time.median == time.slowest == pytest.approx(13.0)
    assert time.by_kernel == {"put": 12.0, "Memset": 1.0}


def test_the_slowest_rank_is_the_one_with_the_largest_median():
    fast, slow = [("put", 1.0), ("put", 2.0), ("put", 3.0)], [("put", 2.0), ("put", 9.0)] * 3
    time = timing.summarize_by_rank([fast, slow], calls=3)
    # On the slow rank, a call has two launches of "put", of 2 and 9 microseconds.
    assert time.slowest == 11.0
    assert time.median == pytest.approx((3.0 + 11.0) / 2)
    assert time.by_kernel == {"put": (2.0 + 11.0) / 2}


def test_launches_of_unknown_rank_are_summed_by_kernel():
    launches = [("put", 4.0), ("put", 6.0), ("put", 5.0), ("put", 100.0), ("setup", 2.0)]
    time = timing.summarize_mixed(launches, calls=2, num_ranks=2)
    assert time.median == pytest.approx(5.5 + 0.5)
    assert list(time.by_kernel) == ["put", "setup"]


def test_what_the_loop_itself_runs_is_taken_off_every_device_time():
    time = timing.summarize_by_rank([[("put", 10.0), ("count", 1.0), ("put", 14.0)]], calls=2)
    less = time.without(0.5)
    assert (less.median, less.low, less.high) == (12.0, 10.0, 14.0)
    assert (less.slowest, less.of_loop, less.by_kernel) == (12.0, 0.5, time.by_kernel)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU's profiler")
def test_a_call_of_nothing_takes_no_device_time():
    mesh = meshes.expert_mesh(min(2, len(jax.devices())))
    loop = timing.Loop(None, lambda state: state, jnp.zeros((mesh.size, 1)), mesh, 20)
    device = loop.device_time(2)
    assert abs(device.median) < 1
    assert device.of_loop >= 0


def test_a_table_leaves_out_what_was_not_measured():
    good = {
        "op": "dispatch", "tokens": 8, "ranks": 2, "dtype": "float32", "implementation": "xla",
        "wall": {"median_us": 12.34, "low_us": 12.0, "high_us": 13.0}, "device": None,
        "wire_bytes": 1e6, "logical_gb_per_s": 1.5, "wire_gb_per_s": 0.5,
    }  # fmt: skip
    bad = {key: good[key] for key in ("op", "tokens", "ranks", "dtype")}
    bad |= {"implementation": "pallas", "error": "ValueError: no"}
    text = "\n".join(report.table(bench.ExchangeBench.columns, [good, bad]))
    assert "12.3" in text and "floor" not in text and "device" not in text
    assert "checked" not in text and "rows" not in text and "layout" not in text
    assert "failed" in text


def test_a_table_says_rows_and_checks():
    device = {"median_us": 3.0, "slowest_us": 3.5, "by_kernel_us": {"ep_dispatch": 2.5, "set": 0.5}}
    row = {
        "op": "dispatch", "tokens": 8, "ranks": 2, "dtype": "float32", "implementation": "pallas",
        "wall": {"median_us": 12.34, "low_us": 12.0, "high_us": 13.0}, "device": device,
        "rows": 17.0, "checked": True, "layout": "expert", "wire_dtype": "none",
    }  # fmt: skip
    plain = report.table(bench.ExchangeBench.columns, [row])
    assert plain[0].split()[4:8] == ["implementation", "checked", "rows", "device"]
    assert plain[1].split()[4:7] == ["pallas", "yes", "17"]
    assert len(plain) == 2
    assert report.kernels([row, row | {"device": None}], bench.name) == [
        "",
        "dispatch, 8 tokens, 2 ranks, float32, pallas: device us by kernel",
        "       2.5  ep_dispatch",
        "       0.5  set",
    ]
    assert "nothing saw" in report.kernels([row | {"device": None}], bench.name)[1]


ARGS = ("--tokens=4", "--num_experts=8", "--top_k=2", "--hidden=16", "--repeats=1")


@pytest.mark.parametrize(
    "ops",
    quick([["dispatch"], [*operations.OPERATIONS]], ["dispatch"]),
    ids=["dispatch", "all"],
)
def test_bench_measures_every_case_and_writes_them(ops, tmp_path, capsys):
    ranks = min(2, len(jax.devices()))
    files = tmp_path / "out.json", tmp_path / "out.png"
    status = jax_ep.cli.main([
        "jax_ep", "bench", *ARGS, "--check", "--implementations=xla", "--baselines=all_to_all",
        f"--ranks={ranks}", "--dtype=bfloat16", f"--json={files[0]}", f"--plot={files[1]}",
        "--iterations=10", f"--ops={','.join(ops)}",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["op"], row["implementation"]) for row in rows] == [
        (op, implementation)
        for op in ops
        if op not in operations.OF_RANK_MAJOR
        for implementation in ("xla", "all_to_all")
        if implementation == "xla" or op in operations.DIRECTIONS
    ]
    assert all(row["checked"] and row["wall"]["median_us"] > 0 for row in rows)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert len(out.strip().splitlines()) >= 2 + len(rows)


@pytest.mark.slow
def test_bench_takes_layouts_and_wire_dtypes(tmp_path, capsys):
    file = tmp_path / "out.json"
    status = jax_ep.cli.main([
        "jax_ep", "bench", *ARGS, "--hidden=128", "--implementations=xla", "--baselines=",
        "--ranks=1", "--iterations=10",
        "--ops=dispatch,dispatch_grad,combine_grad,group_by_expert,sum_by_token",
        "--layouts=expert,rank", "--wire_dtype=none,float8_e4m3fn", "--output=quantized",
        "--check", f"--json={file}",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    rows = json.loads(file.read_text())["rows"]
    ways = [
        (op, layout, wire_dtype)
        for op in ("dispatch", "dispatch_grad", "combine_grad")
        for layout in ("expert", "rank")
        for wire_dtype in ("none", "float8_e4m3fn")
    ]
    assert [(row["op"], row["layout"], row["wire_dtype"]) for row in rows] == [
        *ways,
        ("group_by_expert", "rank", "none"),
        ("group_by_expert", "rank", "float8_e4m3fn"),
        ("sum_by_token", "rank", "none"),
    ]
    assert "layout" in out and "wire" in out and "checked" in out
    # 4 tokens choose 2 experts on one rank: 8 rows expert-major, 4 rows rank-major.
    assert {(row["op"], row["layout"]): row["rows"] for row in rows} == {
        ("dispatch", "expert"): 8, ("dispatch", "rank"): 4, ("dispatch_grad", "expert"): 8,
        ("dispatch_grad", "rank"): 4, ("combine_grad", "expert"): 8, ("combine_grad", "rank"): 4,
        ("group_by_expert", "rank"): 8, ("sum_by_token", "rank"): 8,
    }  # fmt: skip


@pytest.mark.slow
def test_a_gradient_travels_in_the_wire_dtype():
    work = make_work(2, hidden=128, wire_dtype=jnp.dtype("float8_e4m3fn"))
    for name in ("dispatch_grad", "combine_grad"):
        exact, rounded = (
            run_step(operations.make_operation(name, work, "xla", seed=1), 2)[1]
            for work in (dataclasses.replace(work, wire_dtype=None), work)
        )
        for plain, quantized in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
            assert not np.array_equal(plain, quantized)
            np.testing.assert_allclose(plain, quantized, atol=0.6)


def test_a_row_is_named_by_what_gathers_it():
    """A row of the report must name the implementation that really runs.

    XLA gathers float8 rows in group_by_expert, even if kernels do the exchange. So that operation
    must have one row "xla", and none for "pallas".
    """
    args = ["--layouts=rank", "--wire_dtype=float8_e4m3fn", "--output=quantized"]
    bench.FLAGS.parse("bench", args)
    try:
        for op, expected in (("group_by_expert", ["xla"]), ("dispatch", ["pallas", "xla"])):
            ways = bench._ways(op, ["pallas", "xla"], [])
            assert [way["implementation"] for way in ways] == expected
    finally:
        bench.FLAGS.parse("bench", [])


@pytest.fixture
def drawn(monkeypatch):
    """Collects the figures that are drawn and closed during a test."""
    from matplotlib import pyplot as plt

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def assert_all_is_explained(figure):
    """Asserts that the figure's one legend names everything that is drawn, outside of the panels.

    The title must fit the width of the figure.
    """
    figure.canvas.draw()
    (legend,) = figure.legends
    labels = {text.get_text() for text in legend.get_texts()}
    for axis in figure.axes:
        assert set(axis.get_legend_handles_labels()[1]) <= labels
        assert axis.get_legend() is None
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())
        assert all(line.get_label() in labels for line in axis.lines)
    title = figure._suptitle.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= figure.bbox.x1


def test_a_plot_labels_its_axes_in_plain_numbers(tmp_path, drawn):
    rows = [
        {
            "op": "dispatch", "tokens": tokens, "ranks": 2, "dtype": "bfloat16",
            "implementation": "xla", "wall": {"median_us": 3.0 * tokens}, "layout": "expert",
            "wire_dtype": "none", "hidden": 256, "num_experts": 256, "top_k": 8,
        }
        for tokens in (32, 128, 4096)
    ]  # fmt: skip
    exchange = bench.ExchangeBench()
    exchange.rows = rows
    exchange.draw(rows, str(tmp_path / "out.png"), "4 x GPU")
    (figure,) = drawn
    assert_all_is_explained(figure)
    assert figure._suptitle.get_text() == "Times of an exchange: H=256, E=256, K=8\n4 x GPU"
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["32", "128", "4096"]
    assert {"100", "200", "500", "1000"} <= {t.get_text() for t in axis.get_yticklabels()}
    every = [*axis.get_xticklabels(which="both"), *axis.get_yticklabels(which="both")]
    assert not any("times" in label.get_text() for label in every)


def test_bars_are_labelled_so_that_they_can_be_told_apart(tmp_path, drawn):
    heights = {"a": 141_234.0, "b": 137_482.0, "c": None, "d": 0.0123}
    rows = [{"name": name, "height": height} for name, height in heights.items()]
    report.bars(
        rows,
        str(tmp_path / "out.png"),
        title="Long " * 100,
        panel=lambda row: "one",
        group=lambda row: "all",
        bar=lambda row: row["name"],
        height=lambda row: row["height"],
        label="tokens/s",
    )
    (figure,) = drawn
    assert_all_is_explained(figure)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["141k", "137k", "failed", "0.0123"]
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert not any("e+" in text for text in ticks)


def test_a_line_across_a_plot_is_explained(tmp_path, drawn):
    report.lines(
        {"": {"balance": [(0.0, 1.5), (1.0, 1.2)]}},
        str(tmp_path / "out.png"),
        title="Load",
        x_label="step",
        y_label="load",
        logarithmic=False,
        mark=(0.5, "found from the steps to the left"),
    )
    assert_all_is_explained(drawn[0])
    (legend,) = drawn[0].legends
    assert "found from the steps to the left" in [text.get_text() for text in legend.get_texts()]


def test_a_reason_is_printed_once():
    rows = [{"op": op, "error": "ValueError: no"} for op in ("dispatch", "combine", "round_trip")]
    rows += [{"op": "other", "error": "TimeoutError: late"}, {"op": "well"}]
    assert report.notes(rows, lambda row: row["op"]) == [
        "",
        "dispatch and 2 more: ValueError: no",
        "other: TimeoutError: late",
    ]


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--layouts=row", "--layouts=row: 'row' is not one of expert, rank"),
        ("--wire_dtype=int8", "--wire_dtype=int8: 'int8' is not one of none, float8_e4m3fn"),
        ("--ops=dance", "--ops=dance: 'dance' is not one of dispatch"),
        ("--tokens=many", "--tokens=many: 'many' is not a positive integer below 2^31"),
        ("--tokens=0", "--tokens=0: '0' is not a positive integer"),
        ("--capacity_factor=inf", "--capacity_factor=inf: 'inf' is not a finite number"),
        ("--capacity_factor=nan", "--capacity_factor=nan: 'nan' is not a finite number"),
        ("--capacity_factor=-1", "--capacity_factor=-1: '-1' is not a finite number"),
        ("--capacity_factor=True", "--capacity_factor=True: 'True' is not a finite number"),
        ("--dtype=float4_e2m1fn", "--dtype=float4_e2m1fn: value should be one of"),
        ("--ranks=4096", "--ranks is 4096, but there are only "),
        ("--iterations=3", "iterations"),
        ("--implementations=pallas", "--implementations: pallas cannot run here: it needs NVIDIA"),
        ("--implementations=two_level", "--implementations: two_level cannot run here: "),
        (
            "--wire_dtype=float8_e4m3fn",
            "--wire_dtype needs a multiple of 128 as --hidden, but --hidden is 16",
        ),
        ("--top_k=9", "--top_k must be at most the 8 experts, but is 9"),
        ("--baselines= --implementations=", "nothing to measure: "),
        ("--output=quantized", "--output=quantized needs --wire_dtype=float8_e4m3fn"),
        (
            "--host_capacity=3",
            "--host_capacity needs two_level in --implementations",
        ),
        ("--json=/no/folder/out.json", "--json: cannot write '/no/folder/out.json': No such file"),
        ("--json=/", "--json: cannot write '/': Is a directory"),
        ("--plot=/no/folder/out.png", "--plot: cannot write '/no/folder/out.png'"),
        ("--plot=out.number", "--plot: 'out.number' does not end in one of"),
    ],
)
def test_bench_refuses_wrong_flags(arg, message, capsys):
    assert jax_ep.cli.main(["jax_ep", "bench", *ARGS, *arg.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.needs_devices(4)
def test_by_default_all_implementations_are_timed(monkeypatch, capsys, tmp_path):
    """Without a flag, every implementation must be timed, "two_level" too if ranks span hosts."""
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "2")
    path = tmp_path / "out.json"
    arguments = ["--ops=dispatch", "--baselines=", "--ranks=2,4", f"--json={path}"]
    assert jax_ep.cli.main(["jax_ep", "bench", *ARGS, *arguments]) == 0
    rows = json.loads(path.read_text())["rows"]
    two_level = {row["ranks"] for row in rows if row["implementation"] == "two_level"}
    assert two_level == {4} and {row["ranks"] for row in rows} == {2, 4}


@pytest.mark.parametrize("command", [["bench", *ARGS], ["bench", "layer"], ["bench", "balance"]])
def test_a_bad_number_of_devices_on_a_host_is_refused_at_once(command, monkeypatch, capsys):
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "0")
    assert jax_ep.cli.main(["jax_ep", *command]) == 2
    assert "JAX_EP_DEVICES_PER_HOST" in capsys.readouterr().err
