"""Tests of the emulator of emitted code: what it computes, and what it refuses."""

from __future__ import annotations

import re

import jax.numpy as jnp
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


def test_threads_meet_at_a_barrier():
    block = emulator()
    (shared,), thread = block.shared, block.mosaic.thread()
    block.llvm.store(thread * np.uint32(2), word(block, shared, thread))
    block.mosaic.block_barrier()
    other = block.llvm.load(WORD, word(block, shared, np.uint32(63) - thread))
    np.testing.assert_array_equal(other[:, 0], 2 * (63 - np.arange(64)))


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


def test_every_reader_of_a_word_counts():
    block = emulator()
    (shared,), thread = block.shared, block.mosaic.thread()
    first = word(block, shared, thread * np.uint32(0))
    block.llvm.load(WORD, first)
    with block.mosaic.when(block.mosaic.equal(thread, block.mosaic.i32(63))):
        with pytest.raises(AssertionError, match="no barrier between two warps"):
            block.llvm.store(thread, first)


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


def test_only_active_threads_store():
    block = emulator()
    memory, thread = Memory(np.zeros(64, np.uint32)), block.mosaic.thread()
    with block.mosaic.when(block.mosaic.below(thread, block.mosaic.i32(5))):
        block.llvm.store(block.mosaic.i32(7), word(block, memory, thread))
    np.testing.assert_array_equal(memory.bytes.view(WORD), [7] * 5 + [0] * 59)


def test_turns_are_computed_together():
    block = emulator()
    memory = Memory(np.zeros(128, np.uint32))
    with block.mosaic.repeat(2) as turn:
        at = block.arith.addi(turn * np.uint32(64), block.mosaic.thread())
        block.llvm.store(at, word(block, memory, at))
    np.testing.assert_array_equal(memory.bytes.view(WORD), np.arange(128))


def test_lanes_exchange_words():
    block = emulator()
    thread = block.mosaic.thread()
    np.testing.assert_array_equal(block.mosaic.warp_max(thread)[:, 0], [31] * 32 + [63] * 32)
    np.testing.assert_array_equal(block.mosaic.shuffle(thread, 4)[:, 0], np.arange(64) ^ 4)


def test_instructions_of_packed_numbers():
    block = emulator()

    def packed(*numbers):
        return np.asarray(numbers, jnp.bfloat16).view(np.uint32)[:, None]

    def asm(text, *words):
        found = block.mosaic.asm(text, "", *words)
        return found.view(jnp.bfloat16).astype(np.float32).ravel().tolist()

    zero = np.uint32([[0]])
    clean = asm("fma.rn.bf16x2 $0, $1, $2, $1;", packed(-3, np.inf), zero)
    assert clean[0] == -3 and np.isnan(clean[1])
    text = "max.xorsign.abs.bf16x2 $0, $1, $2;"
    assert asm(text, packed(-3, np.nan), packed(2, -5)) == [-3, -5]
    with pytest.raises(NotImplementedError, match=re.escape("sin.approx")):
        block.mosaic.asm("sin.approx.f32 $0, $1;", "", zero)
