"""Lets kernels communicate with other ranks: puts, signals, waits, the low-latency protocol."""
