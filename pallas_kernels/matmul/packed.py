"""Numbers as they lie in memory, packed in 32-bit words: magnitudes, and conversion to float32.

Each function emits code of one thread. Until kernels that quantize know a block's scale, they keep
numbers packed, which takes half of the registers for numbers of 16 bits. One instruction handles
both numbers of a word.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.matmul.quantized_tiles import load_words

# PTX's names of the numbers of a word.
_PTX_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Packed:
    """Numbers of a dtype in 32-bit words: one float32, or two bfloat16 or float16, low half first.

    Attributes:
      dtype: bfloat16, float16 or float32.
    """

    dtype: Any

    @property
    def size(self) -> int:
        """Returns the number of bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    def load(self, pointer: Value, count: int) -> list[Value]:
        """Loads the words with `count` adjacent numbers: one word, two, or a multiple of four."""
        return load_words(pointer, count * self.size // 4)

    def numbers(self, word: Value) -> list[Value]:
        """Converts the numbers of a word to float32."""
        f32 = mosaic.float_type()
        if self.size == 4:
            return [arith.bitcast(f32, word)]
        if self.dtype == jnp.bfloat16:
            halves = arith.shli(word, mosaic.i32(16)), arith.andi(word, mosaic.i32(0xFFFF0000))
            return [arith.bitcast(f32, half) for half in halves]
        pair = llvm.bitcast(mosaic.vector_type(2, mosaic.element_type(self.dtype)), word)
        return [arith.extf(f32, llvm.extractelement(pair, mosaic.i32(i))) for i in range(2)]

    def without_infinities(self, word: Value) -> Value:
        """Returns the word with NaN in place of infinities."""
        # x * 0 + x is x, or NaN if x is not finite.
        return self._emit("fma.rn.{type} $0, $1, $2, $1;", word, mosaic.i32(0))

    def largest(self, words: Sequence[Value]) -> Value:
        """Returns the float32 bits of the largest magnitude of the numbers in `words`.

        NaN is ignored; if nothing else is there, the result is 0. No number may be infinite.
        """
        # Up to four maxima, so that few instructions wait for the one before them.
        parts = (functools.reduce(self._larger, words[i::4]) for i in range(min(4, len(words))))
        total = functools.reduce(self._larger, parts, mosaic.i32(0))
        word = mosaic.integer_type(32)
        both = [arith.bitcast(word, number) for number in self.numbers(total)]
        bits = [arith.andi(each, mosaic.i32(0x7FFFFFFF)) for each in both]
        return functools.reduce(arith.maxui, bits)

    def _larger(self, a: Value, b: Value) -> Value:
        """Returns the numbers of larger magnitude of two words, with any sign, ignoring NaN."""
        return self._emit("max.xorsign.abs.{type} $0, $1, $2;", a, b)

    def _emit(self, text: str, *words: Value) -> Value:
        constraints = ",".join(["=r"] + ["r"] * len(words))
        text = text.format(type=_PTX_TYPES[jnp.dtype(self.dtype).name])
        return llvm.inline_asm(mosaic.integer_type(32), list(words), text, constraints)


BFLOAT16 = Packed(jnp.bfloat16)
