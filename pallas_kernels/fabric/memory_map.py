"""Maps symmetric memory: the addresses of the GPUs' heaps, and the offsets within a heap.

A *domain* is the GPUs of a host that address each other, with the same numbers in every process.
Each GPU has a *heap*; that of GPU g begins at `BASE + g * STRIDE` in every process. A heap starts
with a header of 64-bit little-endian words, which the owner's process writes once, before any
kernel runs. The rest belongs to the kernels; `contents` says what it holds at first.

XLA's arrays lie in the *pool* of their GPU. An array that GPU g's process knows by address a is
reached from another GPU at the address `a + header[DELTA + g]`, modulo 2**64, with the header of
that other GPU. This holds if a lies in the shared part of g's pool: if
`header[POOL_START] <= a < header[POOL_START] + header[POOL_BYTES]`, with g's own header.

Imports neither JAX nor Pallas.
"""

MAX_GPUS = 16
BASE = 0x2A00_0000_0000
STRIDE = 1 << 30  # larger than any heap

HEADER_BYTES = 64 * 1024
WORD64_BYTES = 8

# The indices of the header's 64-bit words.
MAGIC = 0
POOL_START = 1
POOL_BYTES = 2
DELTA = 8  # the first of MAX_GPUS words, one for each GPU of the domain

VERSION = 6  # the version of this map
MAGIC_VALUE = 0x6A61785F65700000 + VERSION  # the characters "jax_ep", then the version

# The (start, bytes) of every pool in a domain of one process, where all GPUs share all addresses.
ANY_ADDRESS = (0, 1 << 63)

# Offsets in a heap of the kernels' data, which is zero at first. Sizes are those for MAX_GPUS, so
# that offsets in a program do not depend on the machine.
MAX_BLOCKS = 2048  # the most thread blocks of a kernel
MAX_BUFFERS = 4  # the most buffers of a kernel that peers access
MAX_VALUES = 4096  # the most values that a rank sends to a peer in a call
SIGNAL_KINDS = 2  # the most kinds of signal of a kernel
COUNT_BITS = 20  # the low bits of a signal hold a count, the other 44 the number of the call
CALLS = HEADER_BYTES  # [MAX_GPUS, MAX_BLOCKS]: calls with each peer so far; this GPU's own
SIGNALS = CALLS + WORD64_BYTES * MAX_GPUS * MAX_BLOCKS  # [SIGNAL_KINDS, MAX_BLOCKS, MAX_GPUS]
ADDRESSES = SIGNALS + WORD64_BYTES * SIGNAL_KINDS * MAX_BLOCKS * MAX_GPUS  # [MAX_GPUS, MAX_BUFFERS]
VALUES = ADDRESSES + WORD64_BYTES * MAX_GPUS * MAX_BUFFERS  # [2 sets, MAX_GPUS, MAX_VALUES]
TILES = VALUES + WORD64_BYTES * 2 * MAX_GPUS * MAX_VALUES  # memory of the low-latency protocol

# Memory of the low-latency protocol (`low_latency`): counters of calls, then buffers
# that tiles arrive in.
EMPTY = 0xFFFFFFFF  # the sentinel: a 32-bit word that has not arrived; arithmetic makes no such NaN
MAX_WORKERS = 512  # the most warpgroups of a kernel that send tiles
MAX_LOW_LATENCY_GPUS = 8  # the most GPUs that send tiles to each other
NUM_COUNTERS = MAX_WORKERS * MAX_LOW_LATENCY_GPUS
TILE_BYTES = 2048
TILE_BUFFER_BYTES = TILE_BYTES + 128  # a tile, and a note of one byte from each of 128 threads


def num_senders(num_gpus: int) -> int:
    """Returns how many GPUs send tiles to a GPU: all others, up to MAX_LOW_LATENCY_GPUS - 1."""
    return max(min(num_gpus, MAX_LOW_LATENCY_GPUS) - 1, 1)


def tiles_of_channel(num_gpus: int) -> int:
    """Returns how many tiles a worker may send to a peer in one call.

    That is 4, or 2 in a domain of more than 4 GPUs, where a heap has buffers for more senders.
    """
    return 4 if num_gpus <= 4 else 2


def num_tile_buffers(num_gpus: int) -> int:
    """Returns how many tile buffers a heap has: two sets for each worker of each GPU that sends."""
    return 2 * num_senders(num_gpus) * MAX_WORKERS * tiles_of_channel(num_gpus)


def contents(num_gpus: int) -> list[tuple[int, int, int]]:
    """Returns a heap's initial contents, as runs of (offset, repeated 32-bit word, bytes)."""
    buffers = TILES + 4 * NUM_COUNTERS
    return [(0, 0, buffers), (buffers, EMPTY, TILE_BUFFER_BYTES * num_tile_buffers(num_gpus))]


def heap_bytes(num_gpus: int) -> int:
    """Returns the bytes of a GPU's heap, which it keeps for as long as the process lives."""
    offset, _, size = contents(num_gpus)[-1]
    return offset + size
