"""Tests of `python -m jax_ep bench layer`: all layers compute the same, and its report is right."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from support import meshes

import jax_ep.cli
from jax_ep.bench import layer as bench_layer
from jax_ep.bench import layer_baselines
from jax_ep.bench.layer_baselines import BASELINES, LAYERS
from pallas_kernels.formats import Float8

PLAIN = ("all_gather+psum_scatter", "all_gather+all_to_all")
SHAPE = bench_layer.Shape(hidden=128, mlp_dim=64, num_experts=8, top_k=3)


def ragged_all_to_all_of_plain_collectives(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Computes `lax.ragged_all_to_all` from other collectives, for backends that lack it."""
    rank = lax.axis_index(axis_name)
    sent = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sizes, places = (lax.all_gather(array, axis_name) for array in sent)
    index = jnp.arange(operand.shape[0])
    for source in range(lax.axis_size(axis_name)):
        row = index - starts[source, rank]
        mine = (row >= 0) & (row < sizes[source, rank])
        place = jnp.where(mine, places[source, rank] + row, output.shape[0])
        output = output.at[place].set(operands[source], mode="drop")
    return output


@pytest.fixture
def ragged_anywhere(monkeypatch):
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all_of_plain_collectives)


def run_layers(num_ranks: int, capacity_factor: float, names):
    """Runs the layers `names` forward and backward, each on the same tokens.

    Returns:
        Layer name -> its output and gradients, stacked by rank; and the experts' load, a dict with
        the capacity of the receive buffer.
    """
    mesh = meshes.expert_mesh(num_ranks)
    state = bench_layer.make_state(SHAPE, 20, mesh, seed=3)
    config, load = bench_layer.make_config(SHAPE, state, mesh, capacity_factor)
    rows = load["capacity"]
    steps = {name: bench_layer.make_step(name, "forward_backward", config, rows) for name in names}

    def on_rank(state):
        state = jax.tree.map(lambda leaf: leaf[0], state)
        outputs = {name: step(state) for name, step in steps.items()}
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    spec = PartitionSpec("expert")
    run = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run)(state), load


@pytest.fixture(scope="module")
def own_outputs():
    outputs, _ = run_layers(min(2, len(jax.devices())), 1.125, ["jax_ep"])
    return outputs["jax_ep"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "capacity_factor"), [(4, 1.125)])
def test_all_layers_are_one_layer(num_ranks, capacity_factor, ragged_anywhere):
    outputs, load = run_layers(num_ranks, capacity_factor, LAYERS)
    assert load["rows"] == 60 and load["rows_needed"] >= 60
    own = outputs.pop("jax_ep")
    assert len(own) == len(bench_layer.OUTPUTS)
    for name, theirs in outputs.items():
        bench_layer.agree(name, theirs, "jax_ep", own)


@pytest.mark.slow
def test_every_output_has_something_to_compare(own_outputs):
    for what, array in zip(bench_layer.OUTPUTS, own_outputs, strict=True):
        array = np.asarray(array, np.float32)
        assert np.isfinite(array).all(), what
        assert np.mean(array != 0) > 0.8, what


@pytest.mark.slow
def test_the_buffer_for_any_routing_is_that_of_the_layer():
    outputs, load = run_layers(min(2, len(jax.devices())), 0, ["jax_ep", PLAIN[0]])
    assert load["capacity"] == 60 * min(2, len(jax.devices()))
    bench_layer.agree(PLAIN[0], outputs[PLAIN[0]], "jax_ep", outputs["jax_ep"])


@pytest.mark.parametrize("what", bench_layer.OUTPUTS)
def test_check_sees_one_wrong_row_of_any_output(what, own_outputs):
    expected = own_outputs
    spoiled = [np.array(array) for array in expected]
    index = bench_layer.OUTPUTS.index(what)
    # `row` is a view of one row of the output, so writing to it changes the output.
    row = spoiled[index].reshape(-1, spoiled[index].shape[-1])[5]
    row *= np.asarray(1.25, row.dtype)
    bench_layer.agree("spoiled", expected, "jax_ep", expected)
    with pytest.raises(AssertionError, match=f"{what} of spoiled .* jax_ep in 1 of"):
        bench_layer.agree("spoiled", spoiled, "jax_ep", expected)
    row[:] = np.nan
    with pytest.raises(AssertionError, match="in 1 of"):
        bench_layer.agree("spoiled", spoiled, "jax_ep", expected)


def bench(*args: str) -> int:
    ranks = min(2, len(jax.devices()))
    small = ("--tokens=8", "--hidden=64", "--mlp_dim=64", "--num_experts=8", "--top_k=2")
    loop = ("--iterations=2", "--repeats=2", "--device_timer=none")
    return jax_ep.cli.main(["jax_ep", "bench", "layer", *small, *loop, f"--ranks={ranks}", *args])


@pytest.mark.slow
def test_bench_layer_measures_every_case_and_writes_them(tmp_path, capsys):
    files = tmp_path / "out.json", tmp_path / "out.png"
    status = bench(
        "--shapes=mixtral",
        f"--baselines={','.join(PLAIN)}",
        f"--json={files[0]}",
        f"--plot={files[1]}",
    )
    out = capsys.readouterr().out
    assert status == 0, out
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["direction"], row["implementation"]) for row in rows] == [
        (direction, name) for direction in bench_layer.DIRECTIONS for name in ("jax_ep", *PLAIN)
    ]
    for row in rows:
        seconds = row["wall"]["median_us"] * 1e-6
        assert not row["checked"] and row["wall"]["low_us"] <= row["wall"]["median_us"]
        assert row["tokens_per_s"] == pytest.approx(row["ranks"] * 8 / seconds)
        passes = 1 if row["direction"] == "forward" else 3
        flops = passes * 8 * 2 * 6 * 64 * 64
        assert row["tflops_per_rank"] == pytest.approx(flops / seconds / 1e12)
        # The experts' weights alone need so many bytes.
        assert row["peak_bytes"] > 3 * 8 // row["ranks"] * 64 * 64 * 2
        assert "speedup_over_ragged" not in row
    for direction in bench_layer.DIRECTIONS:
        plain = [r for r in rows if r["direction"] == direction and r["implementation"] in PLAIN]
        assert max(row["speedup_over_xla"] for row in plain) == 1.0
    lines = out.splitlines()
    (header,) = (line for line in lines if line.startswith("shape"))
    for column in ("wall us", "tokens/s", "TFLOP/s/rank", "peak MiB", "vs (b)"):
        assert column in header
    # The columns are left out, since neither was measured.
    assert "vs (a)" not in header and "exchange us" not in header
    assert sum(line.startswith("mixtral  ") for line in lines) == len(rows)
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_check_fails_the_layer_that_differs_and_no_other(monkeypatch, tmp_path, capsys):
    def with_a_row_too_large(topk_idx, config, capacity):
        way = layer_baselines.gather_and_scatter(topk_idx, config, capacity)
        return way._replace(send=lambda x: way.send(x).at[3].multiply(2))

    name = "all_gather+psum_scatter"
    spoiled = dataclasses.replace(BASELINES[name], exchange=with_a_row_too_large)
    monkeypatch.setitem(LAYERS, name, spoiled)
    path = tmp_path / "out.json"
    args = ("--shapes=qwen3-moe", "--directions=forward", f"--baselines={','.join(PLAIN)}")
    assert bench("--check", f"--json={path}", *args) == 1
    error = f"AssertionError: out of {name} differs from that of jax_ep"
    assert f"qwen3-moe, forward, {name}: {error}" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("error", "")[: len(error)] for row in rows] == ["", error, ""]
    # Without --check, nobody compares the outputs, so the command must not fail.
    assert bench(*args) == 0


@pytest.mark.slow
def test_the_wire_dtype_is_of_our_layer_alone(monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    args = ("--shapes=mixtral", "--hidden=128", f"--baselines={PLAIN[0]}", "--check")
    assert bench(*args, "--wire_dtype=float8_e4m3fn", f"--json={path}") == 0
    out = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    wires = {row["implementation"]: row["wire_dtype"] for row in rows}
    assert wires == {PLAIN[0]: "none", "jax_ep": "float8_e4m3fn"}
    assert out.count("float8_e4m3fn  yes") == 2
    # Make the check allow for no rounding error. It must then fail, which shows that the rows are
    # really sent as float8.
    monkeypatch.setattr(Float8, "relative_error", 0.0)
    assert bench(*args, "--wire_dtype=float8_e4m3fn") == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", ["each_call", "once"])
def test_float8_is_measured_next_to_bfloat16(when, tmp_path, capsys):
    path = tmp_path / "out.json"
    args = "--shapes=mixtral", "--hidden=128", "--mlp_dim=128", f"--baselines={PLAIN[0]}", "--check"
    float8 = "--matmul_dtype=none,float8_e4m3fn", f"--quantize={when}"
    assert bench(*args, *float8, f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    names = [(row["implementation"], row["matmul_dtype"]) for row in rows]
    assert names == 2 * [("jax_ep", "none"), ("jax_ep", "float8_e4m3fn"), (PLAIN[0], "none")]
    for plain, row in (rows[:2], rows[3:5]):
        ratio = plain["wall"]["median_us"] / row["wall"]["median_us"]
        assert row["checked"] and row["speedup_of_float8"] == pytest.approx(ratio)
    assert "vs plain" in capsys.readouterr().out


def test_chunks_of_our_layer_are_measured_next_to_the_whole(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = "--shapes=mixtral", "--directions=forward", "--baselines=", "--check", "--tokens=256"
    assert bench(*args, "--token_chunks=1,4", "--capacity_factor=0", f"--json={path}") == 0
    out = capsys.readouterr().out
    whole, chunked = json.loads(path.read_text())["rows"]
    assert (whole["token_chunks"], chunked["token_chunks"]) == (1, 4)
    assert whole["checked"] and chunked["checked"]
    assert whole["capacity"] == 4 * chunked["capacity"] == 256 * 2 * whole["ranks"]
    assert 0 < chunked["temp_bytes"] < whole["temp_bytes"]
    (header,) = (line for line in out.splitlines() if line.startswith("shape"))
    assert "chunks" in header and "temp MiB" in header
    assert sum(line.startswith("mixtral  ") for line in out.splitlines()) == 2
    command = bench_layer.LayerBench()
    assert command.name(whole) == "mixtral, forward, jax_ep"
    assert command.name(chunked) == "mixtral, forward, jax_ep, 4 chunks"
    # The table of layers without chunks has neither column.
    header, *_ = command.table([whole])
    assert "chunks" not in header and "temp MiB" not in header and "peak MiB" in header


@pytest.mark.slow
def test_chunks_have_the_gradients_of_the_whole(tmp_path):
    path = tmp_path / "out.json"
    args = "--shapes=mixtral", "--directions=forward_backward", f"--baselines={PLAIN[1]}"
    # The last of three chunks of 8 tokens is not full.
    chunks = "--token_chunks=1,3", "--capacity_factor=0", "--check"
    assert bench(*args, *chunks, f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    names = [(row["implementation"], row["token_chunks"]) for row in rows]
    assert names == [("jax_ep", 1), ("jax_ep", 3), (PLAIN[1], 1)]
    assert all(row["checked"] for row in rows)


@pytest.mark.slow
def test_a_rematerialized_layer_is_measured_next_to_the_layer(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = "--shapes=mixtral", "--baselines=", "--check", "--remat=none,full"
    assert bench(*args, f"--json={path}") == 0
    forward, plain, remat = json.loads(path.read_text())["rows"]
    # A forward pass has nothing to compute again.
    assert (forward["direction"], forward["remat"]) == ("forward", "none")
    assert (plain["remat"], remat["remat"]) == ("none", "full")
    assert plain["direction"] == remat["direction"] == "forward_backward"
    assert plain["checked"] and remat["checked"]
    name = bench_layer.LayerBench().name
    assert name(plain) == "mixtral, forward_backward, jax_ep"
    assert name(remat) == "mixtral, forward_backward, jax_ep, remat"
    (header,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("shape"))
    assert "remat" in header and "temp MiB" in header


def test_a_rematerialized_layer_computes_the_forward_matmuls_twice():
    mesh = meshes.expert_mesh(1)
    state = bench_layer.make_state(SHAPE, 20, mesh, seed=3)
    config, load = bench_layer.make_config(SHAPE, state, mesh, 1.0)
    operands = jax.tree.map(lambda leaf: leaf[0], state)

    def matmuls(remat: str) -> int:
        step = bench_layer.make_step("jax_ep", "forward_backward", config, load["capacity"], remat)
        spec = PartitionSpec()
        run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return str(jax.make_jaxpr(run)(operands)).count("grouped_matmul")

    assert matmuls("full") > matmuls("none")


@pytest.mark.slow
def test_what_does_not_fit_is_a_row_that_says_what_it_needs(monkeypatch, tmp_path, capsys):
    check = bench_layer.LayerCase.check

    def out_of_memory(case, row, loop, shared):
        if row["implementation"] == PLAIN[0]:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand much more")
        check(case, row, loop, shared)

    monkeypatch.setattr(bench_layer.LayerCase, "check", out_of_memory)
    path = tmp_path / "out.json"
    names = f"--check --baselines={','.join(PLAIN)}".split()
    assert bench("--shapes=mixtral", "--directions=forward", *names, f"--json={path}") == 1
    out = capsys.readouterr().out
    assert f"{PLAIN[0]}: RuntimeError: RESOURCE_EXHAUSTED: Out of memory\n" in out
    (line,) = (line for line in out.splitlines() if " failed " in line)
    rows = json.loads(path.read_text())["rows"]
    assert [("wall" in row, row["peak_bytes"] > 0) for row in rows] == [
        (True, True), (False, True), (True, True),
    ]  # fmt: skip
    assert line.split()[-1] == f"{rows[1]['peak_bytes'] / 2**20:.0f}"


def test_what_cannot_start_in_time_is_reported(capsys):
    args = ("--shapes=mixtral", "--directions=forward", "--baselines=")
    assert bench(*args, "--seconds=0") == 1
    out = capsys.readouterr().out
    assert (
        "mixtral, forward, jax_ep: TimeoutError: not started, because --seconds=0 had passed" in out
    )


def test_speedups_are_over_the_fastest_of_their_own_work():
    def row(implementation, us, **work):
        work = {"shape": "mixtral", "tokens": 8, "ranks": 2, "direction": "forward"} | work
        return (
            {"matmul_dtype": "none", "token_chunks": 1, "remat": "none"}
            | work
            | {"implementation": implementation, "wall": {"median_us": us}}
        )

    own, other = row("jax_ep", 10.0), row("jax_ep", 10.0, tokens=16)
    float8 = row("jax_ep", 8.0, matmul_dtype="float8_e4m3fn")
    chunks = row("jax_ep", 16.0, token_chunks=4)
    float8_chunks = row("jax_ep", 10.0, matmul_dtype="float8_e4m3fn", token_chunks=4)
    alone = row("jax_ep", 9.0, matmul_dtype="float8_e4m3fn", token_chunks=2)
    failed = {key: own[key] for key in ("shape", "tokens", "ranks", "direction")}
    failed |= {"implementation": PLAIN[0], "error": "no"}
    bench_layer.compare([
        own, float8, chunks, float8_chunks, alone, other, failed,
        row(PLAIN[0], 30.0), row(PLAIN[1], 20.0),
        row(PLAIN[1], 1.0, direction="forward_backward"), row(bench_layer.RAGGED_DOT, 50.0),
    ])  # fmt: skip
    assert own["speedup_over_xla"] == 2.0
    assert own["speedup_over_ragged"] == 5.0
    assert float8["speedup_of_float8"] == 1.25 and "speedup_of_float8" not in own
    # Layers in chunks are compared with the baselines, too, but float8 with as many chunks only.
    assert chunks["speedup_over_xla"] == 1.25 and float8_chunks["speedup_over_xla"] == 2.0
    assert float8_chunks["speedup_of_float8"] == 1.6 and "speedup_of_float8" not in alone
    assert "speedup_over_xla" not in other and "speedup_over_xla" not in failed


def test_parts_of_the_device_time_are_known_by_their_kernels():
    by_kernel = {
        "ep_dispatch": 3.0,
        "ncclDevKernel_AllGather_RING_LL": 2.0,
        "void stream_executor::gpu::MultiGpuBarrierKernel": 1.0,
        "grouped_matmul_product": 5.0,
        "loop_multiply_fusion": 1.0,
    }
    device = {"by_kernel_us": by_kernel, "slowest_us": 12.5}
    parts = {"matmul_us": 5.0, "exchange_us": 6.0, "if_hidden_us": 7.5}
    assert bench_layer.parts_of(device) == parts
    del by_kernel["grouped_matmul_product"]
    parts = {"matmul_us": None, "exchange_us": 6.0, "if_hidden_us": None}
    assert bench_layer.parts_of(device) == parts


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--shapes=gpt-2", "--shapes=gpt-2: 'gpt-2' is not one of deepseek-v3"),
        ("--directions=sideways", "--directions=sideways: 'sideways' is not one of forward"),
        ("--baselines=nccl", "--baselines=nccl: 'nccl' is not one of all_gather+psum_scatter"),
        ("--implementations=nccl", "--implementations=nccl: 'nccl' is not one of jax_ep"),
        ("--num_experts=9", " ranks, but is 9 for deepseek-v3"),
        ("--shapes=", "--shapes=: name one value or more"),
        ("--tokens=many", "--tokens=many: 'many'"),
        ("--ranks=4096", "--ranks is 4096, but there are only "),
        ("--json=/no/folder/out.json", "--json: cannot write '/no/folder/out.json'"),
        ("--plot=/no/folder/out.png", "--plot: cannot write '/no/folder/out.png'"),
        (
            "--wire_dtype=float8_e4m3fn",
            "--wire_dtype needs H that is a multiple of 128, but deepseek-v3 has H=64",
        ),
        (
            "--implementations= --wire_dtype=float8_e4m3fn",
            "--wire_dtype needs jax_ep in --implementations",
        ),
        ("--token_chunks=0", "--token_chunks=0: '0' is not a positive integer"),
        ("--token_chunks=", "--token_chunks=: name one value or more"),
        ("--token_chunks=1,4", "--token_chunks above 1 needs --capacity_factor=0: "),
        (
            "--implementations= --token_chunks=1,4 --capacity_factor=0",
            "--token_chunks needs jax_ep in --implementations",
        ),
        ("--remat=some", "--remat=some: "),
        ("--implementations= --remat=full", "--remat needs jax_ep in --implementations"),
        ("--implementations= --baselines=", "nothing to measure"),
        ("--top_k=9", "--top_k must be at most the 8 experts, but is 9 for deepseek-v3"),
    ],
)
def test_bench_layer_refuses_wrong_flags(arg, message, capsys):
    assert bench(*arg.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["layer", "matmul", "collectives"])
def test_the_commands_of_two_words_are_reached(command, capsys):
    assert jax_ep.cli.main(["jax_ep", "bench", command, "--help"]) == 0
    assert f"usage: python -m jax_ep bench {command}" in capsys.readouterr().out
