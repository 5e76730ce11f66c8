"""Dispatches tokens to their experts' ranks and combines the experts' outputs; start at `api`."""
