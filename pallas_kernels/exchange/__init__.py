"""GPU kernels for MoE dispatch and combine between ranks, and for their gradients."""
