"""Defines the number formats of rows in transit, of checkpoints, and of matmuls.

- `FLOAT8_ROWS`: float8_e4m3fn, with a float32 scale for each 128 consecutive numbers of a row.
- `FLOAT8_MATRICES`: float8_e4m3fn, with a float32 scale for each block of 128 rows x 128 columns.
- `MXFP4`: float4_e2m1, two in a byte, with a power-of-two scale for each 32 consecutive numbers of
  a row.

`jax_ep.quantize` stores an array in a format, and returns a `jax_ep.QuantizedArray`. `Float8.of`
makes formats of other blocks, scales and float8 dtypes; `Transposed.of` makes a format that stores
the transpose of each matrix. NaN and infinities become NaN in every format.
"""

# docs/api/formats.md has the scales' formulas, bounds of errors, and where platforms' bits differ.

from jax_ep.formats.quantized_array import QuantizedArray as QuantizedArray
from jax_ep.formats.quantized_array import Transposed as Transposed
from jax_ep.formats.quantized_array import quantize as quantize
from pallas_kernels.formats import FLOAT8_MATRICES as FLOAT8_MATRICES
from pallas_kernels.formats import FLOAT8_ROWS as FLOAT8_ROWS
from pallas_kernels.formats import MXFP4 as MXFP4
from pallas_kernels.formats import PLAIN as PLAIN
from pallas_kernels.formats import Float8 as Float8
from pallas_kernels.formats import Format as Format
from pallas_kernels.formats import MXFloat4 as MXFloat4
from pallas_kernels.formats import Plain as Plain
from pallas_kernels.formats import RowFormat as RowFormat
