"""Where symmetric memory is, and what the header of a GPU's heap says. Without Pallas or JAX.

A *domain* is the GPUs of a host that address each other, numbered from 0 in every process alike.
Each has a *heap*: that of GPU g begins at `BASE + g * STRIDE` in every process. It starts with a
header of 64-bit words, little-endian, which the owner's process writes once, before any kernel
runs. What follows is the kernels' own: zero, or as they ask.

An array of XLA's lies in its GPU's *pool*. Where GPU g's process knows it by address a, the GPUs
of this process reach it by address `a + header[DELTA + g]`, modulo 2**64, if a is in the part of
g's pool that is shared: `header[POOL_START] <= a < header[POOL_START] + header[POOL_BYTES]`, both
of g's own header.
"""

MAX_GPUS = 16
BASE = 0x2A00_0000_0000
STRIDE = 1 << 30  # more than any heap

HEADER_BYTES = 64 * 1024
WORD_BYTES = 8

# The header's words, by index.
MAGIC = 0
POOL_START = 1
POOL_BYTES = 2
DELTA = 8  # and MAX_GPUS words from there, one for each GPU of the domain

VERSION = 1  # of this layout
MAGIC_VALUE = 0x6A61785F65700000 + VERSION  # "jax_ep", and the version

# Of a domain of one process: every address of its GPUs is valid for all of them.
ANY_ADDRESS = (0, 1 << 63)

# What kernels keep in a heap, by offset, zero at first. Sizes are for MAX_GPUS, so that a program
# knows its places whatever the machine.
MAX_BLOCKS = 2048  # of a kernel
MAX_BUFFERS = 4  # of a kernel, that peers reach
MAX_WORDS = 4096  # that a rank sends to a peer at a time
NUM_CHANNELS = 2
CALLS = HEADER_BYTES  # [MAX_GPUS, MAX_BLOCKS]: calls with each peer so far; this GPU's own
SIGNALS = CALLS + WORD_BYTES * MAX_GPUS * MAX_BLOCKS  # [NUM_CHANNELS, MAX_BLOCKS, MAX_GPUS]
ADDRESSES = SIGNALS + WORD_BYTES * NUM_CHANNELS * MAX_BLOCKS * MAX_GPUS  # [MAX_GPUS, MAX_BUFFERS]
WORDS = ADDRESSES + WORD_BYTES * MAX_GPUS * MAX_BUFFERS  # [MAX_GPUS, MAX_WORDS]
TILES = WORDS + WORD_BYTES * MAX_GPUS * MAX_WORDS  # what tiles are polled in

# Tiles that a receiver polls, behind the counters of their channels: see `low_latency`.
EMPTY = 0xFFFFFFFF  # a 32-bit word that has not arrived; as a float a NaN, but none of arithmetic
MAX_WORKERS = 512  # warpgroups of a kernel that send tiles
MAX_SLOTS = 4  # tiles of a worker that are on their way to a peer at a time
MAX_DEVICES = 8  # GPUs that send tiles to each other
NUM_COUNTERS = MAX_WORKERS * MAX_DEVICES
TILE_BYTES = 2048
SLOT_BYTES = TILE_BYTES + 512  # a tile, and a note of each of its 128 threads


def num_slots(num_gpus: int) -> int:
    """Slots of a heap: two sets for each worker of each GPU."""
    return 2 * min(num_gpus, MAX_DEVICES) * MAX_WORKERS * MAX_SLOTS


def contents(num_gpus: int) -> list[tuple[int, int, int]]:
    """What a heap holds at first: runs of (offset, 32-bit word, bytes)."""
    slots = TILES + 4 * NUM_COUNTERS
    return [(0, 0, slots), (slots, EMPTY, SLOT_BYTES * num_slots(num_gpus))]


def heap_bytes(num_gpus: int) -> int:
    """What each GPU gives for as long as the process lives."""
    offset, _, size = contents(num_gpus)[-1]
    return offset + size
