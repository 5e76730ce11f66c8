"""Tests of the emulator of emitted code: what it computes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from support.emitted import Emulator, Memory, VectorType

WORD = np.dtype(np.uint32)


def emulator(num_threads=64):
    """Returns the emulator of a thread block with one shared word for each thread."""
    found = Emulator(num_threads)
    found.shared = [Memory(np.zeros(num_threads, np.uint32), is_shared=True)]
    return found


def word(block, memory, index):
    return block.mosaic.element_pointer(block.mosaic.pointer(memory), index, WORD)


@pytest.mark.parametrize("reads_first", [False, True])
def test_warps_must_meet_between_accesses(reads_first):
    block = emulator()
    (shared,), thread = block.shared, block.mosaic.thread()
    accesses = [
        lambda: block.llvm.store(thread, word(block, shared, thread)),
        lambda: block.llvm.load(WORD, word(block, shared, np.uint32(63) - thread)),
    ]
    first, second = accesses[::-1] if reads_first else accesses
    first()
    with pytest.raises(AssertionError, match="no barrier between two warps"):
        second()


def test_threads_may_only_store_equal_numbers_to_one_place():
    block = emulator()
    memory, thread = Memory(np.zeros(64, np.uint32)), block.mosaic.thread()
    half = word(block, memory, thread % np.uint32(32))
    block.llvm.store(thread % np.uint32(32), half)
    with pytest.raises(AssertionError, match="different numbers"):
        block.llvm.store(thread, half)


@pytest.mark.parametrize("name", ["block_barrier", "warp_max", "shuffle"])
def test_warps_act_as_a_whole(name):
    block = emulator()
    arguments = {"warp_max": [block.mosaic.thread()], "shuffle": [block.mosaic.thread(), 1]}
    with block.mosaic.when(block.mosaic.below(block.mosaic.thread(), block.mosaic.i32(5))):
        with pytest.raises(AssertionError, match="all"):
            getattr(block.mosaic, name)(*arguments.get(name, []))


@pytest.mark.parametrize(
    ("index", "message"), [(np.uint32(1), "not aligned"), (np.uint32(64), "out of bounds")]
)
def test_bad_addresses_are_refused(index, message):
    block = emulator()
    pair = block.mosaic.vector_type(2, WORD)
    assert isinstance(pair, VectorType)
    at = word(block, block.shared[0], block.mosaic.thread() * np.uint32(0) + index)
    with pytest.raises(AssertionError, match=message):
        block.llvm.load(pair, at, alignment=8)
