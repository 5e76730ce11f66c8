"""Random loads of experts, [layers, experts]: how many tokens choose each."""

from __future__ import annotations

import numpy as np


def random_loads(kind, layers, num_experts, rng):
    if kind == "zipf":
        ranks = np.stack([rng.permutation(num_experts) for _ in range(layers)])
        return 1e4 / (ranks + 1.0)
    if kind == "sparse":
        return rng.poisson(0.7, (layers, num_experts)).astype(float)
    return rng.lognormal(0, 1.2, (layers, num_experts))
