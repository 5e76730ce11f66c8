"""Reads from a compiled program's text what its collectives send between hosts."""

from __future__ import annotations

import re

import numpy as np

_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    r"|ragged-all-to-all|collective-broadcast)(?P<start>-start)?\("
)
_SHAPE = re.compile(r"\b(pred|[a-z]+?(\d+)(?:e\d\w*)?)\[([\d,]*)\]")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def received_from_other_hosts(text: str, host_of: list[int]) -> int:
    """Returns the largest number of bytes that one device receives from devices of other hosts."""
    received = np.zeros(len(host_of), np.int64)
    for line in text.splitlines():
        if (found := _COLLECTIVE.search(line)) is None:
            continue
        kind = found["kind"]
        assert kind in ("all-gather", "all-to-all", "collective-permute"), line
        assert not found["start"], f"sizes of asynchronous collectives are not known: {line}"
        num_bytes = _num_bytes(found["result"])
        if kind == "collective-permute":
            for source, target in _pairs(line):
                received[target] += num_bytes * (host_of[source] != host_of[target])
            continue
        for group in _groups(line):
            part = num_bytes // len(group)
            for rank in group:
                received[rank] += part * sum(host_of[other] != host_of[rank] for other in group)
    return int(received.max())


def _num_bytes(result: str) -> int:
    total = 0
    for kind, bits, shape in _SHAPE.findall(result):
        size = 1 if kind == "pred" else int(bits) // 8
        total += size * int(np.prod([int(n) for n in shape.split(",") if n], dtype=np.int64))
    return total


def _pairs(line: str) -> list[list[int]]:
    text = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    assert text is not None, line
    return _lists(text[1])


def _groups(line: str) -> list[list[int]]:
    if text := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return _lists(text[1])
    iota = _IOTA.search(line[line.index("replica_groups=") :])
    assert iota is not None, line
    shape, dims = (tuple(map(int, iota[i].split(","))) for i in (1, 2))
    numbers = np.arange(np.prod(dims)).reshape(dims)
    if iota[3]:
        numbers = numbers.transpose(tuple(map(int, iota[3].split(","))))
    return numbers.reshape(shape).tolist()


def _lists(text: str) -> list[list[int]]:
    return [[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]


def collective_kinds(text: str) -> set[str]:
    """Returns the kinds of collectives in a compiled program's text, such as "all-to-all"."""
    return {found["kind"] for found in map(_COLLECTIVE.search, text.splitlines()) if found}
