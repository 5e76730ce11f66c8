"""Dispatch and combine: `api` is where to start reading."""
