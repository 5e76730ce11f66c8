"""Defines the number formats of rows in transit, of checkpoints, and of matmuls.

- `FLOAT8_ROWS`: float8_e4m3fn, with a float32 scale for each 128 consecutive numbers of a row.
- `FLOAT8_MATRICES`: float8_e4m3fn, with a float32 scale for each block of 128 rows x 128 columns.
- `MXFP4`: float4_e2m1, two in a byte, with a power-of-two scale for each 32 consecutive numbers of
  a row.

`jax_ep.quantize` stores an array in a format, and returns a `jax_ep.QuantizedArray`. `Float8.of`
makes formats of other blocks, scales and float8 dtypes; `Transposed.of` makes a format that stores
the transpose of each matrix. NaN and infinities become NaN in every format.

**Float8.** The blocks and scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). For a
block of numbers x, such as 128 consecutive numbers of one row,

    scale = max(largest finite |x| · (1 - 2^-22) / 448, 2^-117),
    value = float8_e4m3fn(x · (1 / scale)),

and the decoded number is value · scale. The factor 1 - 2^-22 keeps 448 · scale, the largest decoded
number, from exceeding the largest |x|. e4m3 has 3 bits of fraction, normal numbers from 2^-6 on,
and subnormal numbers every 2^-9, so

    |value · scale - x| <= max(2^-4 |x|, 2^-10 scale),

before the decoded number is rounded to the requested dtype. A block of zeros stays zeros, and the
largest numbers of a dtype of up to 32 bits do not overflow. In a block whose largest number is
below 448 · 2^-117, or 2.7e-33, the scale is 2^-117 and the error is at most 2^-127. float8_e4m3fn
has no infinity: NaN and infinities become NaN, and the other numbers of their block are encoded as
if these were absent. Scales of another dtype than float32 stay within its finite normal numbers,
and values that do not fit are clipped.

**Bits.** NumPy, XLA on CPUs, and the kernels give the same bits, with three exceptions. (1) XLA on
CPUs treats subnormal float32 values, below 2^-126, as zero. Such a value has an error of up to
2^-126, which may exceed the bound above. (2) XLA on GPUs divides approximately: 1 / scale may have
a relative error of 2^-22, so a value halfway between two numbers of e4m3 may be rounded to the
other number. The float8 rows that implementation="xla" sends from GPUs may differ from the kernels'
rows in such ties. (3) Where sums are sent, XLA may multiply by a scale and add to the sum over
ranks in a fused multiply-add, with one rounding; the kernels and `jax_ep.reference` round twice.

**MXFP4.** A block's scale is the largest power of two that is at most a quarter of the block's
largest magnitude. Magnitudes above 6 times the scale are stored as 6 times the scale. If a block
has NaN or an infinity, all of its numbers become NaN.
"""

from jax_ep.formats.quantized_array import QuantizedArray as QuantizedArray
from jax_ep.formats.quantized_array import Transposed as Transposed
from jax_ep.formats.quantized_array import quantize as quantize
from pallas_kernels.formats import FLOAT8_MATRICES as FLOAT8_MATRICES
from pallas_kernels.formats import FLOAT8_ROWS as FLOAT8_ROWS
from pallas_kernels.formats import PLAIN as PLAIN
from pallas_kernels.formats import Float8 as Float8
from pallas_kernels.formats import Format as Format
from pallas_kernels.formats import Plain as Plain
from pallas_kernels.formats import RowFormat as RowFormat
from pallas_kernels.mxfp4 import MXFP4 as MXFP4
from pallas_kernels.mxfp4 import MXFloat4 as MXFloat4
