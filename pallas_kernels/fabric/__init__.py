"""Communication between GPUs within a kernel: peer copies, signals, waits, low-latency protocol."""
