"""How kernels reach other ranks: puts, signals, waits, the low-latency protocol, and their PTX."""
