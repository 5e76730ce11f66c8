"""The text that the examples train on.

It is CPython's language reference (`pydoc_data.topics`): about half a megabyte of English that
comes with Python and differs a little between Python versions. One byte of it is one token.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the text as bytes (uint8): the first nine tenths to train, the rest to validate."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = np.frombuffer(text, np.uint8)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def windows(data: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns sequences of seq_len + 1 bytes of `data`, one from each index in `starts`, int32."""
    return data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def unigram_entropy(data: np.ndarray) -> float:
    """Returns the entropy of single bytes, in nats: the lowest loss of a model without context."""
    counts = np.bincount(data)
    p = counts[counts > 0] / len(data)
    return float(-np.sum(p * np.log(p)))
