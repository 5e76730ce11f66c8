"""Tests of the baseline "torch" of `bench matmul`, with a module in PyTorch's place.

The module computes in NumPy, and fails if it is called in another way than PyTorch's kernels need.
"""

from __future__ import annotations

import importlib.util
import json
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_ep.cli
from jax_ep.bench import matmul as bench_matmul
from jax_ep.bench import matmul_torch
from jax_ep.bench.matmul_operations import Case, small_operands
from jax_ep.bench.matmul_torch import TorchLoop
from jax_ep.matmul.backend import Problem

CASE = Case("blocks", 96, 256, 128, 3, 80, slow=True)
FAKE = """
    import time, types

    import ml_dtypes
    import numpy as np

    bfloat16, float8_e4m3fn = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
    float32, int32 = np.float32, np.int32


    class Tensor(np.ndarray):
        to = np.ndarray.astype
        transpose = np.ndarray.swapaxes

        def float(self):
            return self.astype(np.float32)

        def norm(self):
            return np.linalg.norm(self)


    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = time.perf_counter()

        def elapsed_time(self, other):
            return (other.time - self.time) * 1e3


    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda: None)
    generator = np.random.default_rng(0)


    def manual_seed(seed):
        pass


    def tensor(values, device, dtype=float32):
        assert device == "cuda"
        return np.asarray(values).astype(dtype).view(Tensor)


    def randn(*shape, device, dtype):
        return tensor(generator.standard_normal(shape), device, dtype)


    def ones(*shape, device, dtype):
        return tensor(np.ones(shape), device, dtype)


    def zeros(*shape, device):
        return tensor(np.zeros(shape), device)


    def product(a, b, offs):
        assert offs.dtype == int32 and offs.shape == (len(b),) and offs[-1] == len(a)
        assert a.flags.c_contiguous and a.shape[1] == b.shape[1]
        starts = [0, *offs[:-1]]
        parts = [a[i:j].float() @ b[l].float() for l, (i, j) in enumerate(zip(starts, offs))]
        return np.concatenate(parts).view(Tensor).to(bfloat16)


    def _grouped_mm(a, b, *, offs):
        assert a.dtype == b.dtype == bfloat16
        # The operand of dlhs is what the product's is, transposed.
        assert b.flags.c_contiguous == (b.shape[1] >= b.shape[2])
        return product(a, b, offs)


    def _scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
        assert a.dtype == b.dtype == float8_e4m3fn and b.swapaxes(1, 2).flags.c_contiguous
        assert scale_a.dtype == scale_b.dtype == float32
        assert scale_a.shape == (len(a),) and scale_b.shape == (len(b), b.shape[2])
        assert out_dtype == bfloat16 and use_fast_accum
        return product(a, b, offs)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that makes a text the module torch of processes that are started."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda text: (tmp_path / "torch.py").write_text(textwrap.dedent(text))


def torch_loop(op: str = "product", has_float8: bool = False) -> TorchLoop:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("one",))
    return TorchLoop(CASE, op, has_float8, [5, 0, 75], mesh, iterations=2)


def test_it_is_measured_checked_and_compared(install, monkeypatch, tmp_path, capsys):
    install(FAKE)
    for name, value in (("CASES", (CASE,)), ("SMALL_CASES", (CASE,))):
        monkeypatch.setattr(bench_matmul, name, value)
    small = list(small_operands(jnp.bfloat16))[-2:-1]
    monkeypatch.setattr(bench_matmul, "small_operands", lambda dtype: small)
    monkeypatch.setattr(matmul_torch, "unavailable_reason", lambda problem: None)
    path = tmp_path / "out.json"
    command = ["jax_ep", "bench", "matmul", "--iterations=2", "--repeats=2", "--device_timer=none"]
    command += ["--check", "--implementations=", "--baselines=torch", "--ops=product,dlhs,drhs"]
    command += ["--matmul_dtype=none,float8_e4m3fn", f"--json={path}"]
    assert jax_ep.cli.main(command) == 0, capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    found = {(row["op"], row["matmul_dtype"], row["implementation"]): row for row in rows}
    # PyTorch has no drhs, so that nothing is left to compare the dense matmul with.
    assert len(found) == len(rows) and set(found) == {
        (op, dtype, name)
        for op in ("product", "dlhs")
        for dtype in ("none", "float8_e4m3fn")
        for name in ("dense", "torch")
    }
    for row in rows:
        if row["implementation"] == "torch":
            assert row["checked"] and row["share_of_dense"] > 0
            flops = 2 * 80 * 256 * 128
            assert row["tflops"] == pytest.approx(flops / row["wall"]["median_us"] * 1e-6)
            assert ("speedup_of_float8" in row) == (row["matmul_dtype"] != "none")


@pytest.mark.parametrize("has_float8", [False, True])
@pytest.mark.parametrize("op", matmul_torch.OPERATIONS)
def test_check_sees_a_wrong_group(op, has_float8, install):
    for offset, wrong in ((0, False), (1, True)):
        # A wrong kernel reads the row before each row.
        install(FAKE.replace("a[i:j].float()", f"np.roll(a, {offset}, 0)[i:j].float()"))
        loop = torch_loop(op, has_float8)
        try:
            if wrong:
                with pytest.raises(AssertionError, match=r"group 0 is off by 1\.\de\+00"):
                    loop.check([0, 1, 2])
            else:
                loop.check([0, 1, 2])
                times = loop.device_time(3)
                assert 0 < times.low <= times.median <= times.high and times.timer == "events"
                assert loop.run() > 0
        finally:
            loop.close()
        assert loop._process.returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "raise ImportError('libcudart is missing\\nand more')",
            "ImportError: libcudart is missing",
        ),
        (
            FAKE.replace("def _grouped_mm", "def other"),
            "AttributeError: module 'torch' has no attribute '_grouped_mm'",
        ),
        ("import os; os._exit(3)", "PyTorch's process ended with status 3"),
    ],
)
def test_what_fails_in_the_process_is_told(text, message, install):
    install(text)
    loop = torch_loop()
    try:
        with pytest.raises(RuntimeError) as raised:
            loop.run()
        assert str(raised.value) == message
        with pytest.raises(RuntimeError, match="ended with status [13]"):
            loop.run()
    finally:
        loop.close()


def test_it_says_where_it_cannot_run(install, monkeypatch):
    def reason(platform="cuda", dtype=jnp.bfloat16):
        return matmul_torch.unavailable_reason(Problem((128, 128), dtype, platform))

    assert "not float16" in reason(dtype=jnp.float16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reason() == "the package torch is not installed (pip install torch)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert reason("cpu") == "its kernels are for NVIDIA GPUs, and this program is for cpu"
    for text, found in (
        (FAKE, None),
        ("def manual_seed(seed): raise RuntimeError('no CUDA')", "RuntimeError: no CUDA"),
    ):
        install(text)
        matmul_torch._failure.cache_clear()
        assert reason() == reason(dtype=jnp.float8_e4m3fn) == found
    matmul_torch._failure.cache_clear()
