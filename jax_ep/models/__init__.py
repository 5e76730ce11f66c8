"""A decoder with MoE blocks, Qwen3-MoE or GPT-OSS, which examples train and benchmarks time."""
