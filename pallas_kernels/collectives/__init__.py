"""GPU kernels of the collectives: all-reduce, all-gather, reduce-scatter, all-to-all."""
