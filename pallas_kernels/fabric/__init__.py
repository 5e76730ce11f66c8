"""How kernels reach other ranks: put, signal, wait, polled tiles; and the PTX under them."""
