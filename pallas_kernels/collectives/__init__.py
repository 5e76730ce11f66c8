"""GPU kernels for the collectives all-reduce, all-gather, reduce-scatter and all-to-all."""
