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
# The heap of GPU g + 1 begins this many bytes after the heap of GPU g. No heap is larger.
STRIDE = 1 << 30

HEADER_BYTES = 64 * 1024
WORD64_BYTES = 8

# The indices of 64-bit words in a heap's header. DELTA is the first of MAX_GPUS words: word DELTA +
# g is what the heap's GPU adds to an address in the process of GPU g, to access the memory there.
MAGIC = 0
POOL_START = 1
POOL_BYTES = 2
DELTA = 8

# The version of this memory layout.
VERSION = 6
# The header's first word: the characters "jax_ep", then the version.
MAGIC_VALUE = 0x6A61785F65700000 + VERSION

# (POOL_START, POOL_BYTES) of every heap's header if one process has all GPUs of the domain. It
# covers all addresses, since all are then valid on all GPUs.
ANY_ADDRESS = (0, 1 << 63)

# Limits of a kernel in symmetric memory: the numbers of thread blocks, of buffers that peers
# access, of 32-bit values that a rank sends to a peer in a call, and of kinds of signals.
MAX_BLOCKS = 2048
MAX_BUFFERS = 4
MAX_VALUES = 4096
SIGNAL_KINDS = 2
# A signal is a 64-bit word. Its lowest COUNT_BITS bits hold a count, and its other bits hold the
# number of the call in which it was sent.
COUNT_BITS = 20

# The following constants are byte offsets of arrays in a heap. The arrays consist of 64-bit words,
# which are zero at first. They have room for MAX_GPUS, so that the offsets in a compiled program do
# not depend on the machine.
# CALLS [MAX_GPUS, MAX_BLOCKS]: how many calls this GPU has made with each peer. Each block of a
# kernel has a counter of its own, and only the heap's own GPU accesses it.
CALLS = HEADER_BYTES
# SIGNALS [SIGNAL_KINDS, MAX_BLOCKS, MAX_GPUS]: the last signal of each kind that each block of this
# GPU has received from each peer.
SIGNALS = CALLS + WORD64_BYTES * MAX_GPUS * MAX_BLOCKS
# ADDRESSES [MAX_GPUS, MAX_BUFFERS]: the addresses of each peer's buffers, which the peer sent in
# its last call with this GPU.
ADDRESSES = SIGNALS + WORD64_BYTES * SIGNAL_KINDS * MAX_BLOCKS * MAX_GPUS
# VALUES [2, MAX_GPUS, MAX_VALUES]: the 32-bit values that each peer sent, each in a word with the
# number of its call. Even calls use the first half of the array, and odd calls the second.
VALUES = ADDRESSES + WORD64_BYTES * MAX_GPUS * MAX_BUFFERS
# TILES: the memory of the low-latency protocol, up to the heap's end: 32-bit call counters, and
# then the tile buffers.
TILES = VALUES + WORD64_BYTES * 2 * MAX_GPUS * MAX_VALUES

# The sentinel of the low-latency protocol: a 32-bit word of a tile that has not arrived. The word
# is a NaN that arithmetic never produces.
EMPTY = 0xFFFFFFFF
# At most this many warpgroups of a kernel may send tiles by the low-latency protocol.
MAX_WORKERS = 512
# At most this many GPUs may send tiles to each other by the low-latency protocol.
MAX_LOW_LATENCY_GPUS = 8
NUM_COUNTERS = MAX_WORKERS * MAX_LOW_LATENCY_GPUS
TILE_BYTES = 2048
# A tile buffer has room for a tile, and for one byte from each of the sender's 128 threads: a note
# on which words of the tile were replaced (see `sentinel_words`).
TILE_BUFFER_BYTES = TILE_BYTES + 128


def num_senders(num_gpus: int) -> int:
    """Returns the number of GPUs that can send tiles to a GPU: a heap has tile buffers for each.

    It is the number of other GPUs of the domain of `num_gpus`, but at least 1 and at most 7.
    """
    return max(min(num_gpus, MAX_LOW_LATENCY_GPUS) - 1, 1)


def tiles_of_channel(num_gpus: int) -> int:
    """Returns how many tiles a warpgroup may send to each peer in one call: 4 or 2.

    It is 2 if the domain has more than 4 GPUs, because a heap then has buffers for more senders.
    """
    return 4 if num_gpus <= 4 else 2


def num_tile_buffers(num_gpus: int) -> int:
    """Returns the number of tile buffers in a heap.

    There are two sets, for even and odd calls, of `tiles_of_channel` buffers for each of
    MAX_WORKERS warpgroups of each sending GPU.
    """
    return 2 * num_senders(num_gpus) * MAX_WORKERS * tiles_of_channel(num_gpus)


def contents(num_gpus: int) -> list[tuple[int, int, int]]:
    """Returns what a heap contains before any kernel runs.

    The result is a list of (byte offset, 32-bit word, number of bytes). Each entry describes a
    range of the heap that is filled with copies of the word.
    """
    buffers = TILES + 4 * NUM_COUNTERS
    return [(0, 0, buffers), (buffers, EMPTY, TILE_BUFFER_BYTES * num_tile_buffers(num_gpus))]


def heap_bytes(num_gpus: int) -> int:
    """Returns the bytes of a GPU's heap, which stays allocated until its process ends."""
    offset, _, size = contents(num_gpus)[-1]
    return offset + size
