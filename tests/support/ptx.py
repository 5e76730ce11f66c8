"""Finds barriers in PTX that only some threads of a warp reach.

LLVM does not know Mosaic's warpgroup barriers and may copy a barrier into both sides of a branch.
If threads of one warp then wait at different copies, the warp hangs or is not synchronized.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"(\$L\w+):")
_JUMP = re.compile(r"(?:@!?(%p\d+) )?bra(?:\.uni)? (\$L\w+);")
_INSTRUCTION = re.compile(r"(?:@!?%p\d+ )?([\w.:]+) (.*);")
# Inline PTX in braces, whose registers without % are its own.
_BRACED = re.compile(r"\{ (.*)\}")
_REGISTER = re.compile(r"%(?:rd|rs|r|p|f)\d+|%tid\.x")
_NUMBER = re.compile(r"\d+")
_BARRIER = re.compile(r"\bbar(rier)?\.")
_WARP = 32


def divided_barriers(ptx: str) -> list[str]:
    """Returns the branches at which threads of one warp may diverge ahead of a barrier."""
    lines = [" ".join(line.split("//")[0].split()) for line in ptx.splitlines()]
    lines = [line for line in lines if line]
    varying = _varying(lines)
    blocks, places = _blocks(lines)
    following = [_following(i, blocks, places) for i in range(len(blocks))]
    certain = _certain(following)
    found = []
    for i, block in enumerate(blocks):
        jump = _JUMP.match(block[-1]) if block else None
        if jump is None or jump[1] not in varying:
            continue
        apart, ahead = set(), list(following[i])
        # Collect the blocks that only some threads run, until all threads have met again.
        while ahead:
            j = ahead.pop()
            if j not in apart and j not in certain[i]:
                apart.add(j)
                ahead += following[j]
        if any(_BARRIER.search(line) for j in apart for line in blocks[j]):
            found.append(block[-1])
    return found


def _varying(lines: list[str]) -> set[str]:
    """Returns the registers whose values may differ between the threads of a warp."""
    varying, before = {"%tid.x"}, 0
    while len(varying) > before:
        before = len(varying)
        for line in lines:
            if braced := _BRACED.match(line):
                used = set(_REGISTER.findall(braced[1]))
                # Any register of the line may be written, so all of them count as varying.
                if varying.intersection(used):
                    varying |= used
                continue
            instruction = _INSTRUCTION.match(line)
            if instruction is None or _JUMP.match(line):
                continue
            name, arguments = instruction.groups()
            result, *operands = _REGISTER.findall(arguments) or [""]
            stores = name.startswith(("st", "bar", "red", "cp", "fence", "mbarrier", "shfl"))
            if not stores and varying.intersection(operands) and not _of_warps(name, arguments):
                varying.add(result)
    return varying


def _of_warps(name: str, arguments: str) -> bool:
    """Returns whether an instruction has one result for a warp though it reads the thread index."""
    last = arguments.rsplit(",", 1)[-1].strip()
    if not _NUMBER.fullmatch(last):
        return False
    number = int(last)
    if name.startswith("shr"):
        return 2**number >= _WARP
    if name.startswith("and.b"):
        return number % _WARP == 0
    if name.startswith(("setp.lt", "setp.ge")):
        return number % _WARP == 0
    return name.startswith(("setp.gt", "setp.le")) and (number + 1) % _WARP == 0


def _blocks(lines: list[str]) -> tuple[list[list[str]], dict[str, int]]:
    """Returns the kernel's basic blocks, and for each label the index of the block it begins."""
    blocks: list[list[str]] = [[]]
    places = {}
    for line in lines:
        if label := _LABEL.match(line):
            blocks.append([])
            places[label[1]] = len(blocks) - 1
            continue
        blocks[-1].append(line)
        if _JUMP.match(line) or line.startswith("ret"):
            blocks.append([])
    return blocks, places


def _following(i: int, blocks: list[list[str]], places: dict[str, int]) -> list[int]:
    """Returns the indices of the basic blocks that may run right after basic block i."""
    last = blocks[i][-1] if blocks[i] else ""
    after = [i + 1] if i + 1 < len(blocks) and not last.startswith("ret") else []
    if jump := _JUMP.match(last):
        return [*(after if jump[1] else []), places[jump[2]]]
    return after


def _certain(following: list[list[int]]) -> list[set[int]]:
    """Returns, for each basic block, the other blocks through which every path to the end goes."""
    everything = set(range(len(following)))
    certain = [everything] * len(following)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(following))):
            ways = [certain[j] for j in following[i]]
            new = {i}.union(set.intersection(*ways)) if ways else {i}
            if new != certain[i]:
                certain[i], changed = new, True
    return [blocks - {i} for i, blocks in enumerate(certain)]
