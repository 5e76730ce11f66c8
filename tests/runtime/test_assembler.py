"""Tests, on reports of both assemblers, what `jax_ep.runtime.assembler` reads in them."""

from __future__ import annotations

import ctypes

import jax
import pytest

from jax_ep.runtime import assembler
from jax_ep.runtime.assembler import NVJITLINK, PTXAS, Kernel

BY_PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'row_tiles_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for row_tiles_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 2 barriers, 8 bytes cumulative stack size
ptxas info    : Compile time = 17.902 ms
"""
BY_NVJITLINK = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility \
across compilation units.
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the function 'gated_mosaic_gpu_kernel'
ptxas warning : Registers are spilled to local memory in function 'gated_mosaic_gpu_kernel', 2132 \
bytes spill stores, 2132 bytes spill loads
ptxas info    : Compiling entry function 'gated_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for gated_mosaic_gpu_kernel
ptxas         .     448 bytes stack frame, 2132 bytes spill stores, 2140 bytes spill loads
ptxas info    : Used 166 registers, used 16 barriers, 17 bytes smem
info    : Function properties for 'gated_mosaic_gpu_kernel':
info    : used 166 registers, used 16 barriers, 448 stack, 0 bytes smem, 552 bytes cmem[0]
"""
C7509 = """
ptxas info    : (C7509) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to the presence of Extern calls in the function 'row_tiles_mosaic_gpu_kernel'
"""


def test_reports_of_both_assemblers_are_read():
    assert assembler.reported(BY_PTXAS) == [Kernel("row_tiles", 28, 0, False)]
    assert assembler.reported(BY_NVJITLINK) == [Kernel("gated", 166, 2132, True)]
    assert assembler.reported(C7509 + BY_PTXAS + BY_NVJITLINK) == [
        Kernel("row_tiles", 28, 0, True),
        Kernel("gated", 166, 2132, True),
    ]
    assert assembler.author(BY_PTXAS) == PTXAS
    assert assembler.author(BY_NVJITLINK) == NVJITLINK


@pytest.mark.parametrize(
    ("jax_version", "where", "name"),
    [
        ((0, 11, 2), "/lib/" + assembler.NVJITLINK_FILE, PTXAS),
        ((0, 12, 0), None, PTXAS),
        ((0, 12, 0), assembler.NVJITLINK_FILE, NVJITLINK),
        ((0, 12, 0), "/packages/lib/" + assembler.NVJITLINK_FILE, NVJITLINK),
    ],
)
def test_libnvjitlink_is_used_by_a_jax_that_can_where_it_is_found(
    jax_version, where, name, monkeypatch, tmp_path
):
    class Library:
        def __init__(self, path):
            if path != where:
                raise OSError(path)

        def nvJitLinkVersion(self, major, minor):
            major._obj.value, minor._obj.value = 13, 5

    monkeypatch.setattr(jax, "__version_info__", jax_version)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(assembler, "_folders", lambda: [assembler.Path("/packages")])
    assert assembler.name() == name
    if name == NVJITLINK:
        assert assembler.version() == "13.5"
