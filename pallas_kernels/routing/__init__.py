"""Pallas Mosaic GPU kernel of the MoE router: top-k experts, their weights, and softmax."""
