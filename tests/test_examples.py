"""Tests of the example programs, from nothing to text: train, kill, resume, export, decode.

Programs are started as a user does, with small models. Wrong flags are tested in this process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.processes import HANG_SECONDS, environment_of_program, free_address
from support.selection import quick

from jax_ep import checkpoints
from jax_ep.checkpoints.safetensors import INDEX
from jax_ep.models import generation, launch, published
from jax_ep.models.config import PUBLISHED

ROOT = Path(__file__).parents[1]
STEPS = 24
SMALL = "--model=tiny --num_layers=1 --seq_len=32".split()
TRAIN = *SMALL, f"--decay_steps={STEPS}", "--learning_rate=4e-3", "--eval_batches=4"
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


@pytest.fixture(autouse=True)
def no_ambient_mesh():
    """Ends the mesh that a program in this process has set."""
    yield
    jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def start(program: Path | str, *flags: object, **env: str) -> subprocess.Popen:
    # The program must not inherit the XLA flags and devices of this process.
    env = {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | env
    return subprocess.Popen(
        [sys.executable, program, *map(str, flags)],
        env=environment_of_program(fast=True, **env),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_training(*flags: object, **env: str) -> subprocess.Popen:
    return start(ROOT / "examples" / "train_qwen3_moe.py", *TRAIN, *flags, **env)


UNTIL = """
import os, signal, sys

sys.path.insert(0, "examples")
import train_qwen3_moe
from jax_ep.models.metrics_log import MetricsLog

write, last = MetricsLog.write, int(sys.argv.pop(1))


def write_until(self, step, metrics):
    write(self, step, metrics)
    if "loss" in metrics and step == last:
        os.kill(os.getpid(), signal.SIGKILL)


MetricsLog.write = write_until
train_qwen3_moe.main(sys.argv[1:])
"""


def start_training_until(step: int, *flags: object, **env: str) -> subprocess.Popen:
    """Starts a training that kills itself when it has reported a step, while it runs the next."""
    return start("-c", UNTIL, step, *TRAIN, *flags, **env)


def decode(*flags: object, **env: str) -> str:
    return finish(start(ROOT / "examples" / "decode_qwen3_moe.py", *flags, **env))


def finish(process: subprocess.Popen) -> str:
    """Waits until the program has ended; returns what it printed."""
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, output
    return output


def train(*flags: object, **env: str) -> str:
    return finish(start_training(*flags, **env))


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(folder) if "loss" in record]


def tokens_of(output: str) -> str:
    return re.search(r"first sequence: \[(.*)\]", output)[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """Trains without interruption, with the program copied into an empty folder.

    Returns the folder, and what the program printed.
    """
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(ROOT / "examples" / "train_qwen3_moe.py", folder)
    flags = [
        f"--steps={STEPS}",
        f"--metrics_file={folder}/metrics.jsonl",
        "--eval_every=12",
        f"--tensorboard_dir={folder}/board",
        f"--profile_dir={folder}/profile",
        f"--trace={folder}/trace.npz",
    ]
    return folder, finish(start(folder / "train_qwen3_moe.py", *TRAIN, *flags))


def saved_in(folder: Path) -> list[str]:
    """Returns the flags of a run like `trained`, with checkpoints in a folder."""
    return [
        f"--steps={STEPS}",
        f"--checkpoint_dir={folder}",
        "--checkpoint_every=4",
        "--eval_every=12",
        f"--trace={folder}/trace.npz",
    ]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Trains until the run kills itself after step 8; returns the folder of checkpoints."""
    folder = tmp_path_factory.mktemp("killed")
    process = start_training_until(8, *saved_in(folder))
    printed, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == -signal.SIGKILL, printed
    return folder


@pytest.fixture(scope="module")
def exported(killed, tmp_path_factory) -> tuple[Path, str]:
    """Continues the killed run, where it can on another mesh, and exports the model.

    Returns the folder, in which the model is "model", and what the program printed.
    """
    folder = tmp_path_factory.mktemp("exported") / "run"
    shutil.copytree(killed, folder)
    flags = [*saved_in(folder), f"--export_dir={folder}/model", "--export_dtype=float32"]
    if jax.device_count() % 4 == 0:
        flags += ["--expert_parallel=2", "--tensor_parallel=2"]
    return folder, train(*flags)


@pytest.mark.slow
def test_training_learns_evaluates_and_reports(trained):
    folder, output = trained
    records = metrics_of(folder)
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(STEPS))
    losses = losses_of(folder)
    assert losses[0] > 5 and np.mean(losses[-3:]) < losses[0] - 1
    rates = [record["rate"] for record in steps]
    assert rates[0] == 0 and max(rates) == pytest.approx(4e-3) and rates[-1] < 1e-3
    for record in steps:
        # Each of the B * S tokens makes K choices.
        assert np.sum(record["expert_counts"]) == 8 * 32 * 2 and record["num_dropped"] == 0
    evaluated = [record for record in records if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == [12, STEPS]
    assert evaluated[1]["eval_loss"] == pytest.approx(losses[-1], abs=0.5)
    assert f"step {STEPS}: held-out loss {evaluated[1]['eval_loss']:.4f} nats/token" in output

    # The first step, which is slower, has no line, and the second tells what is left.
    line = r"^step (\d+)/24: loss [\d.]+, 0 dropped, [\d,]+ tokens/s, \d+:\d+:\d+ left$"
    assert re.findall(line, output, re.M) == ["2", "10", "20", "24"]
    assert next(folder.glob("board/events*")).stat().st_size > 1000
    assert list(folder.glob("profile/plugins/profile/*/*.xplane.pb"))
    with np.load(folder / "trace.npz") as arrays:
        topk_idx = arrays["topk_idx"]
    # The axes are batches, layers, B * S tokens, and K choices.
    assert topk_idx.shape == (4, 1, 8 * 32, 2) and 0 <= topk_idx.min() <= topk_idx.max() < 8


@pytest.mark.slow
def test_a_killed_run_ends_with_the_losses_of_one_never_killed(trained, killed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    output = train(*saved_in(folder))
    # The checkpoint of step 8 was begun when that of step 4 was complete.
    assert int(re.search(r"step (\d+) of", output)[1]) in (4, 8)
    assert (folder / "metrics.jsonl").read_text() == (trained[0] / "metrics.jsonl").read_text()


@on_cpus
@pytest.mark.slow
def test_a_killed_run_goes_on_on_another_mesh(trained, exported):
    folder, output = exported
    assert "on 8 x cpu (2 data x 2 expert x 2 tensor)" in output
    assert int(re.search(r"step (\d+) of", output)[1]) in (4, 8)
    np.testing.assert_allclose(losses_of(folder), losses_of(trained[0]), rtol=1e-2)


@on_cpus
@pytest.mark.slow
def test_training_goes_on_on_other_meshes(trained, tmp_path):
    folder = f"--checkpoint_dir={tmp_path}"
    train("--steps=2", folder)
    train("--steps=4", folder, "--expert_parallel=2", "--tensor_parallel=2", "--remat=experts")
    np.testing.assert_allclose(losses_of(tmp_path), losses_of(trained[0])[:4], rtol=1e-4)
    # Each microbatch has its own load-balance loss, so the next losses agree only roughly.
    flags = "--fsdp=2", "--expert_parallel=2", "--tensor_parallel=2", "--microbatches=2"
    train("--steps=6", folder, *flags)
    np.testing.assert_allclose(losses_of(tmp_path), losses_of(trained[0])[:6], rtol=1e-2)
    train("--steps=7", folder, **ONE_DEVICE)
    assert len(losses_of(tmp_path)) == 7


@pytest.mark.slow
def test_an_exported_model_is_evaluated_and_decoded(exported):
    folder, output = exported
    again = train("--steps=0", f"--checkpoint={folder}/model", "--num_layers=1", "--model=tiny")
    loss = r"held-out loss ([\d.]+) nats"
    want = float(re.findall(loss, output)[-1])
    assert float(re.search(loss, again)[1]) == pytest.approx(want, abs=2e-4)

    flags = f"--checkpoint={folder}/model", "--text=The built-in function ", "--steps=8"
    decoded = decode(*flags)
    assert re.search("'The built-in function ' -> '.+'", decoded)
    assert re.search(r"prefill [\d.]+ ms: [\d,]+ tokens/s", decoded)
    assert re.search(r"a step reads [\d.e-]+ GB on a device \(2.0 experts in a layer\)", decoded)
    if jax.default_backend() == "cpu":
        options = "--loop=host", "--chunk=5", "--padding=right"
        assert tokens_of(decode(*flags, *options, **ONE_DEVICE)) == tokens_of(decoded)
    assert "in float8_e4m3fn" in decode(*flags, "--quantized=float8", **ONE_DEVICE)


@pytest.mark.slow
def test_transformers_reads_an_exported_model(exported):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = exported[0] / "model"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), output_loading_info=True
    )
    model = model.float()
    assert not info["missing_keys"] and not info["unexpected_keys"]

    prompts = [list(b"A class "), list(b"The built-in function ")]
    tokens, mask = generation.padded(prompts)
    length = tokens.shape[1]
    mesh = jax.make_mesh((1,), ("expert",), (AxisType.Auto,))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        config, loaded = published.load_decoder(folder, mesh, np.float32)
        cache = generation.empty_cache(config, len(prompts), length, np.float32, mesh)
        logits, _ = generation.prefill(config, loaded, tokens, mask, cache, length)
    for prompt, got in zip(prompts, logits, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0, -1]
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4)

    prompt = prompts[1]
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    text = f"--prompt={','.join(map(str, prompt))}"
    found = tokens_of(decode(f"--checkpoint={folder}", text, "--steps=8", **ONE_DEVICE))
    assert found.split(", ") == [str(token) for token in out[0, len(prompt) :].tolist()]


@pytest.mark.slow
def test_experts_in_float8_train_alike(trained, tmp_path):
    for name in ("matmul_dtype", "wire_dtype"):
        folder = tmp_path / name
        train("--steps=8", f"--metrics_file={folder}/metrics.jsonl", f"--{name}=float8_e4m3fn")
        found, want = losses_of(folder), losses_of(trained[0])[:8]
        np.testing.assert_allclose(found, want, rtol=0.03)
        assert found != want


@pytest.mark.slow
def test_files_of_tokens_and_of_text_are_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "tokens.npy", rng.integers(1, 64, 4000).astype(np.uint16))
    (tmp_path / "text.txt").write_text("a small text " * 100)
    (tmp_path / "held.txt").write_text("another text " * 40)
    files = (
        f"--data={tmp_path}/tokens.npy,{tmp_path}/text.txt",
        "--eval_data",
        tmp_path / "held.txt",
    )
    output = train("--steps=2", *files, "--document_end=0", **ONE_DEVICE)
    assert "step 2: held-out loss" in output


# --------------------------------------------------------------------------- several processes


def start_two_processes(
    *flags: object, starts: Sequence[Callable[..., Any]] = (start_training, start_training)
) -> list[subprocess.Popen]:
    """Starts the training program in 2 processes with 4 CPU devices each, on one mesh."""
    flags = f"--coordinator={free_address()}", "--num_processes=2", *flags
    return [own(f"--process_id={i}", *flags, **FOUR_DEVICES) for i, own in enumerate(starts)]


@on_cpus
@pytest.mark.slow
def test_two_processes_train_and_write_the_model_of_one(trained, tmp_path):
    """One process must continue the checkpoint of two; each must write its own experts."""
    flags = f"--checkpoint_dir={tmp_path}/run", f"--export_dir={tmp_path}/model"
    first, second = map(finish, start_two_processes("--steps=3", *flags))
    assert "on 8 x cpu (1 data x 8 expert)" in first and "step 3: held-out loss" in first
    for text in ("step", "loss", "Error"):
        assert text not in second, second
    files = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]
    of_expert = [files[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(8)]
    assert set(of_expert[:4]).isdisjoint(of_expert[4:])
    train("--steps=3", f"--checkpoint_dir={tmp_path}/run", f"--export_dir={tmp_path}/again")
    one, two = (checkpoints.load_model(tmp_path / name) for name in ("again", "model"))
    jax.tree.map(np.testing.assert_array_equal, (one.moe, one.weights), (two.moe, two.weights))
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(trained[0])[:3], rtol=1e-5)


@on_cpus
@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_both_resume_exactly(tmp_path):
    flags = f"--checkpoint_dir={tmp_path}", "--checkpoint_every=2"
    metrics_file = tmp_path / "metrics.jsonl"
    starts = start_training, functools.partial(start_training_until, 5)
    endless = "--steps=1000000", "--heartbeat_seconds=300"
    first, second = start_two_processes(*endless, *flags, starts=starts)
    output, _ = first.communicate(timeout=HANG_SECONDS)
    printed, _ = second.communicate(timeout=HANG_SECONDS)
    assert second.returncode == -signal.SIGKILL, printed
    assert first.returncode not in (0, None)
    # The message depends on who notices first: gloo, the collectives library for CPUs, may abort.
    reasons = "another task died|another process ended first|gloo::EnforceNotMet"
    assert re.search(reasons, output), output

    # The first process reported steps 0 to 3 before it launched step 5.
    before = metrics_file.read_text().splitlines()[:4]
    assert len(before) == 4
    saved = max((int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()), default=0)
    outputs = map(finish, start_two_processes(f"--steps={max(saved, 5) + 1}", *flags))
    assert f"step {saved} of" in "".join(outputs)
    assert metrics_file.read_text().splitlines()[:4] == before


@on_cpus
@pytest.mark.slow
def test_a_process_whose_flag_is_wrong_ends_at_once():
    waiting, failing = start_two_processes("--steps=3", "--eval_data=/none.txt")
    for process in (waiting, failing):
        output, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 1 and "Traceback" not in output, output
        assert "--eval_data=/none.txt" in output and "of 2 failed, see above" in output


# --------------------------------------------------------------------------------- optimizer


def test_only_matrices_decay_and_gradients_are_clipped():
    program = example("train_qwen3_moe")
    flags = "--schedule=constant --warmup_steps=0 --learning_rate=0.5 --weight_decay=0.25"
    optimizer, _ = program.optimizer_of(program.parse([*flags.split(), "--clip_norm=2"]))
    params = {name: np.ones((2, 2), np.float32) for name in ("wi_0", "wi_0_bias")}
    params["norm"] = np.ones(2, np.float32)
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), state, params)
    want = {"wi_0": np.full((2, 2), -0.125), "wi_0_bias": np.zeros((2, 2)), "norm": np.zeros(2)}
    jax.tree.map(np.testing.assert_array_equal, updates, want)

    for scale, norm in ((100, 2), (0.01, 0.01 * 10**0.5)):
        grads = jax.tree.map(lambda x, scale=scale: x * scale, params)
        _, after = optimizer.update(grads, state, params)
        moments = optax.tree_utils.tree_get(after, "mu")  # a tenth of the gradients
        assert optax.global_norm(moments) == pytest.approx(norm / 10)


# ------------------------------------------------------------------------------- wrong flags


TRAINING_FLAGS = {
    "number": (["--capacity_factor=-1"], "capacity_factor: '-1' is not a number from 1e-09"),
    "unknown": (["--step=3"], "unrecognized arguments: --step=3"),
    "data": (["--data=/none.npy"], "data=/none.npy: .*No such file"),
    "vocabulary": (["--vocab=64"], "data=None: the small text must have token ids below 64"),
    "evaluation": (["--eval_data=/none.txt"], "eval_data=/none.txt: .*No such file"),
    "length": (["--seq_len=1000000"], "data must have a file of 1000001 tokens"),
    "float8": (
        ["--tensor_parallel=2", "--matmul_dtype=float8_e4m3fn"],
        "matmul_dtype.*whole blocks of 128 x 128",
    ),
    "ranks": (["--tensor_parallel=3"], "tensor_parallel: .*must divide the 8 devices, but is 3"),
    "choices": (["--num_experts_per_token=9"], "num_experts_per_token: .*9"),
    "batch": (["--microbatches=3", "--batch_size=8"], "batch_size=8 must be a multiple of 24"),
    "processes": (["--num_processes=2"], "coordinator must be given together with --num_processes"),
    "process": (
        ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
        "process_id must be below --num_processes=2",
    ),
    "coordinator": (
        ["--coordinator=host", "--num_processes=1", "--process_id=0"],
        "coordinator must be HOST:PORT, but is host",
    ),
    "checkpoint": (["--checkpoint=/none"], "checkpoint: /none must hold config.json"),
    "document": (["--document_end=256"], "document_end must be below 256, but is 256"),
    "head": (["--head_dim=7"], "head_dim: head_dim must be even, but is 7"),
    "folder": (["--checkpoint_dir=/dev/null/run"], "checkpoint_dir: .* but /dev/null is none"),
    "export": (["--export_dir=/dev/null"], "export_dir: must be a folder to write to"),
    "file": (["--trace=/dev"], "trace: must be a file, but is the folder /dev"),
    "biases": (["--bias_rate=0.1", "--export_dir=out"], "bias_rate must be 0 with --export_dir"),
}


def example(name: str) -> Any:
    """Imports an example program as a module."""
    if (folder := str(ROOT / "examples")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def refused(program: str, *flags: str) -> str:
    with pytest.raises(SystemExit) as found:
        example(program).main(list(flags))
    return str(found.value)


@pytest.mark.needs_devices(8)
@on_cpus
@pytest.mark.parametrize(("flags", "message"), quick(TRAINING_FLAGS, "float8"))
def test_a_wrong_flag_of_training_ends_in_one_line_that_names_it(flags, message):
    said = refused("train_qwen3_moe", *SMALL, *flags)
    assert "\n" not in said and re.match(f"(--)?{message}", said), said


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("hidden must be left out for tiny, but is 64.", "hidden"),
        ("tiny/config.json must have vocab_size", "checkpoint"),
        ("'hidden' is in no file of tiny", "hidden"),
        ("[Errno 13] Permission denied: '{cwd}/run/3'", "checkpoint_dir"),
        ("run/metrics.jsonl must be a file of metrics", "checkpoint_dir"),
        ("run/own.jsonl must be a file of metrics of hidden", "metrics_file"),
        ("it is no runner, tiny-ish", None),
        ("/elsewhere/hidden-1.safetensors and hidden.json are cut off", None),
    ],
)
def test_the_flag_that_an_error_names_first_is_blamed(text, flag):
    args = Namespace(checkpoint="tiny/", checkpoint_dir="run", metrics_file="run/own.jsonl")
    text = text.format(cwd=Path.cwd())
    assert launch.blamed_flag(text, args, ["hidden"], vars(args)) == flag


@on_cpus
def test_a_size_of_a_checkpoint_is_blamed_and_not_its_path(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(PUBLISHED["tiny"]))
    monkeypatch.chdir(tmp_path)
    said = refused("train_qwen3_moe", "--checkpoint=tiny", "--hidden=64")
    assert said == "--hidden: hidden must be left out for tiny, but is 64."


def test_a_coordinator_that_cannot_be_reached_is_named(monkeypatch):
    def initialize(*_, **__):
        raise RuntimeError("it is\nsilent")

    def look_up(host, _):
        if host != "::1":
            raise OSError("not known")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(launch.socket, "getaddrinfo", look_up)
    for address, message in (
        ("[::1]:1", "=[::1]:1: it is silent"),
        ("[::1]:65536", " must be HOST:PORT, but is [::1]:65536"),
        ("nowhere:1", "=nowhere:1: not known"),
    ):
        with pytest.raises(SystemExit, match=re.escape(f"--coordinator{message}")):
            launch.run(lambda: None, coordinator=address, num_processes=1, process_id=0)


@pytest.mark.parametrize(
    ("variables", "each"),
    [
        ({}, 8),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 4),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "16"}, 1),
    ],
)
def test_processes_that_a_cluster_started_share_the_cpu_devices(variables, each, monkeypatch):
    for name in ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    set_to = {}
    monkeypatch.setattr(launch.jax.config, "update", set_to.__setitem__)
    monkeypatch.setitem(launch.jax.config.values, "jax_num_cpu_devices", -1)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    launch.run(lambda: None, cpu_devices=8)
    assert set_to["jax_num_cpu_devices"] == each


DECODING_FLAGS = {
    "files": (["--quantized=keep"], "quantized=keep needs a --checkpoint"),
    "numbers": (["--matmul_dtype=float8_e4m3fn"], "matmul_dtype needs --quantized"),
    "held": (
        ["--matmul_dtype=float8_e4m3fn", "--quantized=mxfp4", "--model=tiny-gpt-oss"],
        "matmul_dtype=float8_e4m3fn needs experts held so, not as mxfp4",
    ),
    "vocabulary": (["--prompt=1,256"], "prompt must be token ids below 256, but is"),
    "text": (["--text="], "text must not be empty"),
}


@pytest.mark.needs_devices(2)
@on_cpus
@pytest.mark.parametrize(("flags", "message"), quick(DECODING_FLAGS, "files"))
def test_a_wrong_flag_of_decoding_ends_in_one_line_that_names_it(flags, message):
    said = refused("decode_qwen3_moe", *flags)
    assert "\n" not in said and re.match(f"(--)?{message}", said), said


@on_cpus
def test_random_experts_without_whole_blocks_cannot_be_quantized(monkeypatch):
    sizes = {"hidden_size": 64}
    monkeypatch.setitem(PUBLISHED, "tiny", PUBLISHED["tiny"] | sizes)
    said = refused("decode_qwen3_moe", "--quantized=float8")
    assert "\n" not in said and re.match("--quantized=float8: .* 128 x 128", said), said


@pytest.mark.slow
def test_a_run_goes_on_only_with_its_own_flags(tmp_path):
    folder = f"--checkpoint_dir={tmp_path}"
    train("--steps=2", folder, **ONE_DEVICE)
    for flags, message in (
        (["--seed=1", "--steps=2"], "--seed=1 must be 0 to go on with the run in"),
        (["--steps=1"], "--steps=1 must be 2 to go on with"),
    ):
        output, _ = (process := start_training(folder, *flags, **ONE_DEVICE)).communicate()
        assert process.returncode == 1 and message in output and "Traceback" not in output, output
