"""Pallas Mosaic GPU kernel of the MoE router: each token's top-k experts, weights, and softmax."""
