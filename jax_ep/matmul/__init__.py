"""Implements grouped matmuls, which multiply each group of rows by the group's own matrix.

`api` has the public function, `grouped_matmul`. Each backend has its own module.
"""
