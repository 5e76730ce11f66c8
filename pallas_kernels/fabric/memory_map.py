"""Defines the addresses of symmetric memory: the GPUs' heaps, and the offsets within a heap.

A *domain* is a set of GPUs of one host that can access each other's memory. A GPU has the same
number in every process. Each GPU has a *heap*, which kernels of all GPUs of the domain access. The
heap of GPU g begins at address `BASE + g * STRIDE` in every process. It starts with a header of
64-bit little-endian words, which the process that owns the GPU writes once, before any kernel runs.
The kernels use the rest of the heap; `contents` defines its initial contents.

XLA allocates arrays from its GPU's *memory pool*. Let an array have the address a in the process of
GPU g. Another GPU accesses the array at the address `a + header[DELTA + g]`, modulo 2**64, with the
other GPU's header. This is valid if a lies in the part of g's pool that g's process shares:
`header[POOL_START] <= a < header[POOL_START] + header[POOL_BYTES]`, with g's header.

Imports neither JAX nor Pallas.
"""

MAX_GPUS = 16
BASE = 0x2A00_0000_0000
# The address difference of consecutive GPUs' heaps, larger than any heap.
STRIDE = 1 << 30

HEADER_BYTES = 64 * 1024
WORD64_BYTES = 8

# The indices of the header's 64-bit words. From DELTA on there are MAX_GPUS words, one for each GPU
# of the domain.
MAGIC = 0
POOL_START = 1
POOL_BYTES = 2
DELTA = 8

# The version of this memory layout.
VERSION = 6
# The header's first word: the characters "jax_ep", then the version.
MAGIC_VALUE = 0x6A61785F65700000 + VERSION

# The (start, bytes) of the memory pools if one process has all GPUs of the domain. All addresses
# are then valid on all GPUs.
ANY_ADDRESS = (0, 1 << 63)

# Limits of a kernel that uses symmetric memory: its thread blocks, the buffers that peers access,
# the values that a rank sends to a peer in a call, and the kinds of signal.
MAX_BLOCKS = 2048
MAX_BUFFERS = 4
MAX_VALUES = 4096
SIGNAL_KINDS = 2
# A signal is a 64-bit word. Its low bits, this many, hold a count, and the others the number of the
# call.
COUNT_BITS = 20

# Byte offsets in a heap of arrays of 64-bit words, which are zero at first. The arrays have room
# for MAX_GPUS, so that the offsets in a compiled program do not depend on the machine.
# CALLS [MAX_GPUS, MAX_BLOCKS]: the number of calls with each peer; only the heap's own GPU uses it.
CALLS = HEADER_BYTES
# SIGNALS [SIGNAL_KINDS, MAX_BLOCKS, MAX_GPUS]: the last signal from each peer to each block.
SIGNALS = CALLS + WORD64_BYTES * MAX_GPUS * MAX_BLOCKS
# ADDRESSES [MAX_GPUS, MAX_BUFFERS]: the addresses of each peer's buffers in its last call.
ADDRESSES = SIGNALS + WORD64_BYTES * SIGNAL_KINDS * MAX_BLOCKS * MAX_GPUS
# VALUES [2, MAX_GPUS, MAX_VALUES]: the values from each peer, for odd and even calls.
VALUES = ADDRESSES + WORD64_BYTES * MAX_GPUS * MAX_BUFFERS
# TILES: the memory of the low-latency protocol, call counters and then tile buffers.
TILES = VALUES + WORD64_BYTES * 2 * MAX_GPUS * MAX_VALUES

# The sentinel of the low-latency protocol: a 32-bit word of a tile that has not arrived. The word
# is a NaN that arithmetic never produces.
EMPTY = 0xFFFFFFFF
# At most this many warpgroups of a kernel send tiles.
MAX_WORKERS = 512
# At most this many GPUs send tiles to each other.
MAX_LOW_LATENCY_GPUS = 8
NUM_COUNTERS = MAX_WORKERS * MAX_LOW_LATENCY_GPUS
TILE_BYTES = 2048
# A buffer has a tile, and a byte from each of the sender's 128 threads (see `sentinel_words`).
TILE_BUFFER_BYTES = TILE_BYTES + 128


def num_senders(num_gpus: int) -> int:
    """Returns how many GPUs a heap has tile buffers for: all other GPUs of a domain, at most 7.

    `num_gpus` is the number of GPUs in the domain. The result is at least 1.
    """
    return max(min(num_gpus, MAX_LOW_LATENCY_GPUS) - 1, 1)


def tiles_of_channel(num_gpus: int) -> int:
    """Returns how many tiles a warpgroup may send to each peer in one call: 4 or 2.

    It is 2 in a domain of more than 4 GPUs, where a heap has buffers for more senders.
    """
    return 4 if num_gpus <= 4 else 2


def num_tile_buffers(num_gpus: int) -> int:
    """Returns the number of tile buffers in a heap: two sets for each warpgroup of each sender."""
    return 2 * num_senders(num_gpus) * MAX_WORKERS * tiles_of_channel(num_gpus)


def contents(num_gpus: int) -> list[tuple[int, int, int]]:
    """Returns a heap's initial contents as a list of (byte offset, 32-bit word, number of bytes).

    Each entry is a range of the heap that is filled with copies of the word.
    """
    buffers = TILES + 4 * NUM_COUNTERS
    return [(0, 0, buffers), (buffers, EMPTY, TILE_BUFFER_BYTES * num_tile_buffers(num_gpus))]


def heap_bytes(num_gpus: int) -> int:
    """Returns the bytes of a GPU's heap, which stays allocated until its process ends."""
    offset, _, size = contents(num_gpus)[-1]
    return offset + size
