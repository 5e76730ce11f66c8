"""Implements grouped matmuls, which multiply each group of rows by the group's own matrix.

`api` has the public function, `grouped_matmul`. It calls `unquantized`, `weight_only` or `float8`,
by the types of its operands. Their primitives, made by `primitives`, select a backend: `pallas`,
`tokamax`, `blocks`, `loop` or `xla`.
"""
