"""Addresses of symmetric memory: the GPUs' heaps, and the offsets within a heap.

A *domain* is a set of GPUs of one host that can access each other's memory. A GPU has the same
number in every process. The *heap* of GPU g, which kernels of all GPUs of the domain access, begins
at address `BASE + g * STRIDE` in every process. It starts with a header of 64-bit little-endian
words, which the process that owns the GPU writes once, before any kernel runs. Kernels use the
rest, whose initial contents `contents` defines.

XLA allocates arrays from its GPU's *memory pool*. An array at the address a in the process of GPU g
is at the address `a + header[DELTA + g]`, modulo 2**64, for another GPU with this header. This
holds if a lies in the part of g's pool that g's process shares: `header[POOL_START] <= a <
header[POOL_START] + header[POOL_BYTES]`, with g's header.

Imports neither JAX nor Pallas.
"""

MAX_GPUS = 16
BASE = 0x2A00_0000_0000
# The heap of GPU g + 1 begins this many bytes after the heap of GPU g. No heap is larger.
STRIDE = 1 << 30

HEADER_BYTES = 64 * 1024
WORD64_BYTES = 8

# Indices of 64-bit words in a heap's header. From DELTA on, there is a word for each of MAX_GPUS.
MAGIC = 0
POOL_START = 1
POOL_BYTES = 2
DELTA = 8

# The version of this memory layout.
VERSION = 6
# The header's first word: the characters "jax_ep", then the version.
MAGIC_VALUE = 0x6A61785F65700000 + VERSION

# The words POOL_START and POOL_BYTES of each header, if one process has all GPUs of the domain. All
# GPUs can then access every address of the process, so this pool contains every address.
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
# CALLS [MAX_GPUS, MAX_BLOCKS]: counts the calls that the heap's GPU has made with each peer. Each
# thread block of a kernel has its own counter for each peer. No other GPU accesses the counters.
CALLS = HEADER_BYTES
# SIGNALS [SIGNAL_KINDS, MAX_BLOCKS, MAX_GPUS]: for each kind of signal, each thread block of the
# heap's GPU and each peer, the last signal that the block has received from the peer.
SIGNALS = CALLS + WORD64_BYTES * MAX_GPUS * MAX_BLOCKS
# ADDRESSES [MAX_GPUS, MAX_BUFFERS]: the addresses of each peer's buffers, which the peer sent in
# its last call with the heap's GPU.
ADDRESSES = SIGNALS + WORD64_BYTES * SIGNAL_KINDS * MAX_BLOCKS * MAX_GPUS
# VALUES [2, MAX_GPUS, MAX_VALUES]: the 32-bit values that each peer sent. A 64-bit word holds a
# value and the number of the call in which it was sent. Even calls use the first half of the array,
# and odd calls the second.
VALUES = ADDRESSES + WORD64_BYTES * MAX_GPUS * MAX_BUFFERS
# TILES: the memory of the low-latency protocol, up to the heap's end: 32-bit call counters, and
# then the tile buffers.
TILES = VALUES + WORD64_BYTES * 2 * MAX_GPUS * MAX_VALUES

# The sentinel of the low-latency protocol: each 32-bit word of a tile buffer holds it until a
# tile's word arrives there. As float32 it is a NaN that arithmetic never produces.
EMPTY = 0xFFFFFFFF
# At most this many warpgroups of a kernel may send tiles by the low-latency protocol.
MAX_WORKERS = 512
# At most this many GPUs may send tiles to each other by the low-latency protocol.
MAX_LOW_LATENCY_GPUS = 8
NUM_COUNTERS = MAX_WORKERS * MAX_LOW_LATENCY_GPUS
TILE_BYTES = 2048
# A tile buffer has room for a tile, and for a note, of one byte, from each of the sender's 128
# threads: which of the thread's words equalled the sentinel and were replaced (see `low_latency`).
TILE_BUFFER_BYTES = TILE_BYTES + 128


def num_senders(num_gpus: int) -> int:
    """Returns for how many sending GPUs a heap has tile buffers: all other GPUs of a kernel."""
    return max(min(num_gpus, MAX_LOW_LATENCY_GPUS) - 1, 1)


def tiles_of_channel(num_gpus: int) -> int:
    """Returns how many tiles a warpgroup may send to each peer in one call."""
    # In a domain of more than 4 GPUs, a heap has buffers for more senders, so fewer for each.
    return 4 if num_gpus <= 4 else 2


def num_tile_buffers(num_gpus: int) -> int:
    """Returns the number of tile buffers in a heap, for even and odd calls."""
    return 2 * num_senders(num_gpus) * MAX_WORKERS * tiles_of_channel(num_gpus)


def contents(num_gpus: int) -> list[tuple[int, int, int]]:
    """Returns a heap's contents before any kernel runs: ranges (offset, 32-bit fill, bytes)."""
    buffers = TILES + 4 * NUM_COUNTERS
    return [(0, 0, buffers), (buffers, EMPTY, TILE_BUFFER_BYTES * num_tile_buffers(num_gpus))]


def heap_bytes(num_gpus: int) -> int:
    """Returns the bytes of a GPU's heap, which stays allocated until its process ends."""
    offset, _, size = contents(num_gpus)[-1]
    return offset + size
