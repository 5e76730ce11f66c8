"""Tests of the example programs, started as a user does, with small models."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support.examples import write_qwen3_moe
from support.processes import environment_of_program, free_address
from support.selection import quick

ROOT = Path(__file__).parents[1]
STEPS = 60
TINY = "--batch_size=8 --seq_len=32 --d_model=32 --num_layers=1 --num_heads=2 --mlp_dim=32".split()
ONE_DEVICE = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
}

FOUR_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
on_cpus = pytest.mark.skipif(jax.default_backend() == "gpu", reason="compares with a run on CPUs")


@pytest.fixture(scope="module", autouse=True)
def programs_compile_once(tmp_path_factory):
    """Lets example programs on CPUs share a compilation cache, since they mostly compile.

    Programs of several processes do not use it.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        yield


def start(program: str, *flags: object, **env: str) -> subprocess.Popen:
    return start_command([str(ROOT / "examples" / program)], *flags, **env)


def start_command(command: list[str], *flags: object, **env: str) -> subprocess.Popen:
    # The program must not inherit the XLA flags and devices of this process.
    env = {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | env
    return subprocess.Popen(
        [sys.executable, *command, *map(str, flags)],
        env=environment_of_program(fast=True, **env),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_training(*flags: object, **env: str) -> subprocess.Popen:
    return start("train_moe_lm.py", *TINY, "--plot=", *flags, **env)


def train(*flags: object, **env: str) -> str:
    return finish(start_training(*flags, **env))


def finish(process: subprocess.Popen) -> str:
    """Waits until the program has ended; returns what it printed."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses_of(path: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(path)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, str]:
    """Runs the training once without interruption; returns its folder and what it printed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = train(
        f"--steps={STEPS}", f"--metrics_file={folder}/metrics.jsonl", f"--plot={folder}/plot.png"
    )
    return folder, output


@pytest.mark.slow
def test_a_trace_holds_what_the_metrics_count(tmp_path):
    """The trace's choices must add up to the metrics' expert counts, in every step and block."""
    trace, metrics_file = tmp_path / "trace.npz", tmp_path / "metrics.jsonl"
    train("--steps=3", f"--trace={trace}", f"--metrics_file={metrics_file}")
    counts = np.array([record["expert_counts"] for record in read_metrics(metrics_file)])
    with np.load(trace) as arrays:
        topk_idx = arrays["topk_idx"]
    # The axes are steps, blocks, B * S tokens, and K choices.
    assert topk_idx.shape == (3, counts.shape[1], 8 * 32, 2)
    experts = np.arange(counts.shape[2])
    np.testing.assert_array_equal((topk_idx[..., None] == experts).sum(axis=(2, 3)), counts)


@pytest.mark.slow
def test_float8_trains_alike(tmp_path):
    """Float8 on the wire or in the experts must change the losses, but only slightly at first.

    pallas_kernels/TUNING.md has the losses of 300 steps.
    """
    losses = []
    for dtype in ("plain", "wire_dtype", "matmul_dtype"):
        path = tmp_path / f"{dtype}.jsonl"
        flags = [] if dtype == "plain" else [f"--{dtype}=float8_e4m3fn"]
        train("--steps=12", "--d_model=128", "--mlp_dim=128", f"--metrics_file={path}", *flags)
        losses.append([record["loss"] for record in read_metrics(path)])
    plain, *others = losses
    for found in others:
        np.testing.assert_allclose(found, plain, rtol=0.03)
        assert found != plain


@pytest.mark.slow
def test_training_learns_and_reports(uninterrupted):
    folder, output = uninterrupted
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(STEPS))
    losses = [record["loss"] for record in metrics]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1
    for record in metrics:
        assert record["num_dropped"] == 0
        # Each of the B * S tokens of a block makes K choices.
        assert np.sum(record["expert_counts"], axis=1).tolist() == [8 * 32 * 2]

    entropy = float(re.search(r"unigram entropy ([\d.]+) nats/byte", output)[1])
    loss, below = re.search(
        r"validation loss ([\d.]+) nats/byte, (-?[\d.]+)% below the unigram entropy", output
    ).groups()
    assert 3 < entropy < 3.5
    assert float(below) == pytest.approx(100 * (1 - float(loss) / entropy), abs=0.1)
    assert losses[-1] == pytest.approx(float(loss), abs=0.5)
    assert "--- sample" in output
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_killed_run_ends_with_the_losses_of_one_never_killed(uninterrupted, tmp_path):
    flags = f"--steps={STEPS}", f"--checkpoint_dir={tmp_path}", "--checkpoint_every=4"
    metrics_file = tmp_path / "metrics.jsonl"

    process = start_training(*flags)
    deadline = time.monotonic() + 200
    while not metrics_file.exists() or metrics_file.read_text().count("\n") < 11:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    # A kill may leave a half-written last line.
    with metrics_file.open("a") as file:
        file.write('{"step": 10, "lo')

    output = train(*flags)
    assert int(re.search(r"; step (\d+) of", output)[1]) in range(4, STEPS, 4)
    expected = (uninterrupted[0] / "metrics.jsonl").read_text()
    assert metrics_file.read_text() == expected

    # The checkpoint must also load on a single device, and allow more steps.
    train(f"--steps={STEPS + 1}", *flags[1:], **ONE_DEVICE)
    metrics = read_metrics(metrics_file)
    assert [record["step"] for record in metrics] == list(range(STEPS + 1))
    assert metrics[-1]["loss"] == pytest.approx(metrics[-2]["loss"], abs=0.5)

    process = start_training(*flags, "--seed=1")
    assert "holds a run with --seed=0, but this one has --seed=1" in process.communicate()[0]
    assert process.returncode == 1


@pytest.mark.slow
def test_training_says_how_well_it_uses_a_gpu(uninterrupted):
    """The utilization must be printed for a device whose peak is known.

    Here it is set to 10^6 FLOP/s.
    """
    program = """if True:
        import sys, jax
        sys.path.insert(0, "examples")
        import moe_lm, train_moe_lm
        from jax_ep.bench import peak
        count = moe_lm.training_flops_per_token
        peak.PEAK_BFLOAT16[jax.devices()[0].device_kind] = 1e6
        moe_lm.training_flops_per_token = lambda p: print("count", count(p)) or count(p)
        train_moe_lm.app.run(train_moe_lm.main)
    """
    output = finish(start_command(["-c", program], *TINY, "--plot=", "--steps=4"))
    # The weights that a token uses: embedding, norms, attention's matrices and scores, the gate,
    # and two of eight experts.
    used = 256 * 32 + 3 * 32 + 4 * 32 * 32 + 2 * 32 * 32 / 2 + 32 * 8 + 2 * 3 * 32 * 32
    assert float(re.search(r"count ([\d.]+)", output)[1]) == 6 * used
    tflops = float(re.search(r"model TFLOP/s of a device ([\d.e+-]+)", output)[1])
    utilization = float(re.search(r"model FLOP/s utilization ([\d.]+)%", output)[1])
    assert utilization == pytest.approx(tflops * 1e12 / 1e6 * 100, rel=1e-2)
    assert float(re.search(r"model TFLOP/s of a device ([\d.e+-]+)", uninterrupted[1])[1]) > 0
    # The peak of a CPU is unknown.
    if jax.default_backend() == "cpu":
        assert "utilization" not in uninterrupted[1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one device", "no expert parallelism"])
def test_first_loss_does_not_depend_on_the_mesh(uninterrupted, tmp_path, mesh):
    env = ONE_DEVICE if mesh == "one device" else {}
    train("--steps=1", f"--metrics_file={tmp_path}/m", "--expert_parallel=1", **env)
    (record,) = read_metrics(tmp_path / "m")
    first = read_metrics(uninterrupted[0] / "metrics.jsonl")[0]
    # On GPUs the example computes in bfloat16, less exactly.
    on_gpu = jax.default_backend() == "gpu"
    assert record["loss"] == pytest.approx(first["loss"], rel=1e-2 if on_gpu else 1e-5)
    if not on_gpu:
        assert record["expert_counts"] == first["expert_counts"]


@pytest.mark.slow
def test_decoding_does_not_depend_on_the_mesh():
    def decode(**env: str) -> list[str]:
        flags = "--steps=12", "--hidden=64", "--mlp_dim=64", "--context=8", "--vocab=128"
        output = finish(start("decode_moe.py", *flags, **env))
        assert re.search(r"median step [\d.]+ ms: [\d,]+ tokens/s", output)
        return re.search(r"first tokens of the first sequence: \[(.*)\]", output)[1].split(", ")

    tokens = decode()
    assert len(tokens) == 12 and len(set(tokens)) > 2
    # On GPUs, bfloat16 logits tie, and ties depend on the mesh.
    if jax.default_backend() == "cpu":
        assert decode(**ONE_DEVICE) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss"])
def test_a_published_kind_of_model_decodes_alike_on_any_mesh(model):
    """Random weights must give the same tokens on any mesh.

    tests/checkpoints/test_transformers.py tests the tokens of published models.
    """

    def decode(*flags: str, **env: str) -> str:
        flags = f"--random_weights={model}", "--steps=6", "--prompt=1,2,3,4,5", "--prompt=7", *flags
        output = finish(start("decode_qwen3_moe.py", *flags, **env))
        assert re.search(r"prefill [\d.]+ ms: [\d,]+ tokens/s", output)
        assert re.search(r"step [\d.]+ ms, mean of 5: [\d,]+ tokens/s", output)
        assert re.search(r"a step reads [\d.e-]+ GB on a device \([\d.]+ experts", output)
        return re.search(r"first sequence: \[(.*)\]", output)[1]

    tokens = decode("--batch_size=6")
    assert len(tokens.split(", ")) == 6
    # On GPUs, bfloat16 logits tie, and ties depend on the mesh.
    if jax.default_backend() == "cpu":
        flags = "--scan_layers", "--loop=host", "--chunk=2", "--padding=right"
        assert decode(*flags, **ONE_DEVICE) == tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    quick(
        {
            "blocks": (("--quantized=float8",), "--quantized=float8: .* whole blocks of 128 x 128"),
            "files": (("--quantized=keep",), "--quantized=keep needs a --checkpoint"),
            "numbers": (("--matmul_dtype=float8_e4m3fn",), "--matmul_dtype needs --quantized"),
        },
        "blocks",
    ),
)
def test_experts_that_cannot_be_quantized_are_refused(flags, message):
    process = start("decode_qwen3_moe.py", "--steps=1", *flags, **ONE_DEVICE)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert re.search(message, output), output


@pytest.mark.parametrize("prompt", quick(["1,256", "-1", "one"], "1,256"))
def test_a_prompt_of_ids_outside_the_vocabulary_is_refused(prompt):
    process = start("decode_qwen3_moe.py", "--steps=1", f"--prompt={prompt}", **ONE_DEVICE)
    output, _ = process.communicate(timeout=100)
    assert f"--prompt must be token ids from 0 to 255, but is {prompt}" in output
    assert process.returncode == 1


# ------------------------------------------------------------------- training a published model

TINY_QWEN3 = (
    "--model=tiny --hidden=32 --mlp_dim=32 --head_dim=8 --num_layers=1 --seq_len=32 --plot="
).split()


def train_qwen3(path: Path, *flags: object) -> list[dict]:
    """Trains with `flags` and `TINY_QWEN3`; returns the metrics of each step, read from `path`."""
    finish(start("train_qwen3_moe.py", *TINY_QWEN3, f"--metrics_file={path}", *flags))
    return read_metrics(path)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> list[dict]:
    """Trains for 30 steps, with the bias rate, the learning rate and the plot set by flags.

    Returns the metrics of each step.
    """
    folder = tmp_path_factory.mktemp("qwen3")
    flags = "--steps=30", "--bias_rate=0.01", "--learning_rate=4e-3", f"--plot={folder}/plot.png"
    metrics = train_qwen3(folder / "metrics.jsonl", *flags)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    return metrics


QWEN3_FLAGS = "--bias_rate=0.01", "--learning_rate=4e-3"


@pytest.mark.slow
def test_a_published_configuration_learns(qwen3):
    assert [record["step"] for record in qwen3] == list(range(30))
    losses = [record["loss"] for record in qwen3]
    assert losses[0] > 5 and np.mean(losses[-3:]) < losses[0] - 1
    # Each of the B * S tokens makes K choices.
    assert all(np.sum(record["expert_counts"]) == 8 * 32 * 2 for record in qwen3)


@on_cpus
@pytest.mark.slow
def test_training_goes_on_on_another_mesh(qwen3, tmp_path):
    """A run on 8 expert ranks must continue on other meshes, with microbatches and remat."""
    path, folder = tmp_path / "metrics.jsonl", f"--checkpoint_dir={tmp_path}/checkpoints"
    train_qwen3(path, "--steps=3", folder, *QWEN3_FLAGS)
    mesh = "--expert_parallel=2", "--tensor_parallel=2", "--remat=experts"
    metrics = train_qwen3(path, "--steps=5", folder, *QWEN3_FLAGS, *mesh)
    losses, expected = ([record["loss"] for record in found] for found in (metrics, qwen3[:5]))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    # Each microbatch has its own load-balance loss, so the next losses agree only roughly.
    mesh = "--fsdp=2", "--expert_parallel=2", "--tensor_parallel=2", "--microbatches=2"
    metrics = train_qwen3(path, "--steps=7", folder, *QWEN3_FLAGS, *mesh)
    losses, expected = ([record["loss"] for record in found] for found in (metrics, qwen3[:7]))
    np.testing.assert_allclose(losses, expected, rtol=1e-2)


@on_cpus
@pytest.mark.slow
def test_two_processes_train_a_published_configuration_as_one_does(qwen3, tmp_path):
    path, address = tmp_path / "metrics.jsonl", free_address()
    flags = *TINY_QWEN3, *QWEN3_FLAGS, "--steps=2", f"--metrics_file={path}"
    group = f"--coordinator={address}", "--num_processes=2"
    programs = [
        start("train_qwen3_moe.py", *flags, *group, f"--process_id={i}", **FOUR_DEVICES)
        for i in range(2)
    ]
    first, second = map(finish, programs)
    assert "on 8 x cpu (1 data x 8 expert)" in first and "tokens/s" not in second
    np.testing.assert_allclose(losses_of(path), [r["loss"] for r in qwen3[:2]], rtol=1e-5)


@pytest.mark.slow
def test_experts_in_float8_train_alike(tmp_path):
    flags = "--hidden=128", "--mlp_dim=128", "--steps=4"
    plain = train_qwen3(tmp_path / "plain.jsonl", *flags)
    float8 = train_qwen3(
        tmp_path / "float8.jsonl",
        *(*flags, "--matmul_dtype=float8_e4m3fn", "--wire_dtype=float8_e4m3fn"),
    )
    losses = [[record["loss"] for record in metrics] for metrics in (plain, float8)]
    np.testing.assert_allclose(*losses, rtol=0.03)
    assert losses[0] != losses[1]


PUBLISHED = """if True:
    import sys
    sys.path.insert(0, "examples")
    import decoder, qwen3_moe
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import AxisType, Mesh
    from jax_ep.bench import train_step
    from jax_ep.bench.decoder import Decoder

    folder = Path(sys.argv[1])
    tokens = np.random.default_rng(0).integers(256, size=(8, 9), dtype=np.int32)
    mesh = Mesh(jax.devices()[:1], ("expert",), axis_types=(AxisType.Auto,))
    config, published = decoder.load_model(folder, mesh, jnp.float32)
    cache = decoder.empty_cache(config, published, 8, 9, jnp.float32)
    everywhere = np.ones(tokens.shape, bool)
    expected = np.asarray(decoder.prefill(config, published, tokens, everywhere, cache, 9)[0])

    shape = (2, 2, 2) if jax.device_count() == 8 else (1, 1, 1)
    devices = np.array(jax.devices()[:np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    jax.set_mesh(mesh)
    model, optimizer = Decoder(qwen3_moe.read_config(folder), dtype=jnp.float32), optax.sgd(1.0)
    layout = train_step.make_layout(model, optimizer, mesh, 9)
    like = train_step.init_state(model, optimizer, layout, 9, only_shapes=True).params
    params = qwen3_moe.load_params(folder, like, mesh)
    logits, _ = jax.jit(model.apply)({"params": params}, tokens)
    np.testing.assert_allclose(logits[:, -1], expected, rtol=1e-3, atol=1e-3)
    print("logits agree, of deviation", np.std(expected))
"""


@on_cpus
@pytest.mark.slow
def test_the_trained_model_is_the_decoded_one(tmp_path):
    """The trained model and the decoded one must give equal logits for the same weights."""
    write_qwen3_moe(tmp_path)
    output = finish(start_command(["-c", PUBLISHED], tmp_path))
    assert float(re.search(r"agree, of deviation ([\d.]+)", output)[1]) > 0.3


@on_cpus
@pytest.mark.slow
def test_training_starts_from_published_weights(tmp_path):
    write_qwen3_moe(tmp_path)
    flags = f"--checkpoint={tmp_path}", "--num_layers=1", "--seq_len=32", "--plot=", "--steps=2"
    flags += "--fsdp=2", "--expert_parallel=4"
    output = finish(start("train_qwen3_moe.py", *flags, f"--metrics_file={tmp_path}/metrics.jsonl"))
    assert "in 1 layers" in output and len(read_metrics(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("flag", "message"),
    quick(
        {
            "ranks": ("--tensor_parallel=3", "must divide the number of devices, which is 8"),
            "fsdp": ("--fsdp=3", "must divide the 8 ranks that --tensor_parallel=1 leaves"),
            "batch": ("--microbatches=3", "--batch_size=8 must be a multiple of 24"),
            "data": ("--vocab=64", "must be token ids from 0 to 63"),
        },
        "batch",
    ),
)
@on_cpus
def test_training_refuses_flags_that_do_not_fit(flag, message):
    process = start("train_qwen3_moe.py", *TINY_QWEN3, flag)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and message in output and "Traceback" not in output, output


# ------------------------------------------------------------------- training in several processes


def start_two_processes(*flags: object) -> list[subprocess.Popen]:
    """Starts the training program in 2 processes with 4 CPU devices each, on one mesh."""
    address = free_address()
    flags = f"--coordinator={address}", "--num_processes=2", *flags
    return [start_training(f"--process_id={i}", *flags, **FOUR_DEVICES) for i in range(2)]


@on_cpus
@pytest.mark.slow
def test_two_processes_train_as_one_does(uninterrupted, tmp_path):
    """Two processes must give the losses of one, and one process must continue their checkpoint."""
    flags = f"--checkpoint_dir={tmp_path}", "--checkpoint_every=3"
    plot = tmp_path / "plot.png"
    first, second = map(finish, start_two_processes("--steps=6", f"--plot={plot}", *flags))
    assert "on 8 x cpu (1 data x 8 expert)" in first and "--- sample" in first
    assert "6/6" in first and "validation loss" in first and plot.exists()
    # Only the first process prints the progress and the report.
    for text in ("step", "sample", "loss", "Error"):
        assert text not in second, second

    metrics_file, expected = tmp_path / "metrics.jsonl", uninterrupted[0] / "metrics.jsonl"
    np.testing.assert_allclose(losses_of(metrics_file), losses_of(expected)[:6], rtol=1e-5)
    output = train("--steps=8", *flags)
    assert "step 6 of 8" in output
    np.testing.assert_allclose(losses_of(metrics_file), losses_of(expected)[:8], rtol=1e-5)


@on_cpus
@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_both_resume_exactly(tmp_path):
    flags = f"--checkpoint_dir={tmp_path}", "--checkpoint_every=2"
    metrics_file = tmp_path / "metrics.jsonl"
    first, second = start_two_processes("--steps=1000000", "--heartbeat_seconds=10", *flags)
    deadline = time.monotonic() + 250
    while not metrics_file.exists() or metrics_file.read_text().count("\n") < 5:
        assert first.poll() is None, first.communicate()[0]
        assert second.poll() is None, second.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.kill()
    output, _ = first.communicate(timeout=60)
    second.communicate()
    assert first.returncode not in (0, None)
    # The message depends on who notices first: gloo, the collectives library for CPUs, may abort.
    reasons = "another task died|another process ended first|gloo::EnforceNotMet"
    assert re.search(reasons, output), output

    before = metrics_file.read_text().splitlines()[:5]
    outputs = [finish(process) for process in start_two_processes("--steps=5", *flags)]
    (step,) = re.findall(r"; step (\d+) of 5", "".join(outputs))
    # Unless all five steps were saved before the kill, the resumed run has steps left.
    if int(step) < 5:
        assert int(step) in (2, 4)
    assert metrics_file.read_text().splitlines()[:5] == before


FAILING = """
import sys, time
sys.path.insert(0, "examples")
import jax, processes

def main(argv):
    print("on", jax.device_count(), "devices", flush=True)
    if jax.process_index():
        raise SystemExit("--batch_size=7 is odd")
    time.sleep(1000)

processes.run(main)
"""


@on_cpus
@pytest.mark.slow
def test_a_process_ends_at_once_where_a_flag_is_wrong_or_it_is_told_to_end():
    address = free_address()
    waiting, failing = (
        start_command(
            ["-c", FAILING], f"--coordinator={address}", "--num_processes=2", f"--process_id={i}",
            **FOUR_DEVICES,
        )
        for i in range(2)
    )  # fmt: skip
    output, _ = failing.communicate(timeout=100)
    assert "--batch_size=7 is odd\nprocess 1 of 2 failed" in output and "Traceback" not in output
    assert failing.returncode == 1
    assert waiting.stdout is not None and waiting.stdout.readline() == "on 8 devices\n"
    waiting.terminate()
    waiting.communicate(timeout=20)
    assert waiting.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_folder_of_checkpoints_that_cannot_be_used_is_named(tmp_path):
    folder = tmp_path / "run"
    (folder / "4" / "config").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("5\n")
    (tmp_path / "file").touch()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for flags, message in (
            ([f"--checkpoint_dir={folder}"], "another run uses this folder"),
            ([f"--checkpoint_dir={tmp_path}/file"], "/file: File exists"),
            ([f"--metrics_file={tmp_path}/metrics.jsonl"], "is not a metrics file of this program"),
            (["--trace=trace"], "--trace must end in .npz"),
        ):
            output, _ = (process := start_training(*flags)).communicate(timeout=100)
            assert process.returncode == 1 and message in output, output
    output, _ = (process := start_training(f"--checkpoint_dir={folder}")).communicate(timeout=100)
    assert process.returncode == 1 and "is an incomplete checkpoint, which lacks state" in output, (
        output
    )


@pytest.mark.slow
def test_a_process_needs_all_three_flags():
    program = "import sys; sys.path.insert(0, 'examples'); import processes; processes.run(print)"
    process = start_command(["-c", program], "--coordinator=localhost:1", "--process_id=0")
    output, _ = process.communicate(timeout=100)
    assert "give --num_processes too: a process needs --coordinator, " in output
    assert process.returncode == 1
