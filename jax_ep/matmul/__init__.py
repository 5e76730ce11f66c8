"""Grouped matmuls, which multiply each group of rows by the group's own matrix; see `api`."""
