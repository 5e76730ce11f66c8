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
