"""Tests, on PTX as LLVM writes it, the search for barriers that only some threads reach."""

from __future__ import annotations

import pytest

from support.ptx import divided_barriers

KERNEL = """
.visible .entry kernel(
)
{{
    mov.u32 	%r1, %tid.x;
    // begin inline asm
    mov.b32 %r2, %r1;

    // end inline asm
    {condition}
    @%p1 bra 	$L__BB0_2;
    {some}
    // begin inline asm
    ld.relaxed.sys.global.b64 %rd1, [%rd2];

    // end inline asm
$L__BB0_2:
    {all}
    ret;
}}
"""
FIRST = "and.b32 	%r3, %r2, 127;\n    setp.gt.u32 %p1, %r3, 0;"
BARRIER = "bar.sync %r89, 128;"


def kernel(condition: str = FIRST, **parts: str) -> str:
    return KERNEL.format(condition=condition, **({"some": "", "all": ""} | parts))


def test_a_barrier_that_some_threads_do_not_reach_is_found():
    assert divided_barriers(kernel(some=BARRIER)) == ["@%p1 bra $L__BB0_2;"]


def test_a_barrier_after_threads_have_met_is_none():
    assert divided_barriers(kernel(all=BARRIER)) == []


def test_copies_of_a_barrier_on_both_sides_are_found():
    """A barrier copied into both sides of a branch must be found."""
    both = f"{BARRIER}\n    bra.uni $L__BB0_3;\n$L__BB0_1:\n    {BARRIER}"
    text = kernel(some=both).replace("bra 	$L__BB0_2", "bra 	$L__BB0_1")
    text = text.replace("    ret;", "$L__BB0_3:\n    ret;")
    assert divided_barriers(text) == ["@%p1 bra $L__BB0_1;"]


@pytest.mark.parametrize(
    "condition",
    [
        # The shift computes the number of the thread's warpgroup, which is the same in a warp.
        "shr.u32 %r3, %r2, 7;\n    setp.ne.b32 %p1, %r3, 0;",
        "setp.gt.u32 %p1, %r2, 127;",
        "setp.lt.u32 %p1, %r2, 64;",
        "and.b32 %r3, %r2, 96;\n    setp.ne.b32 %p1, %r3, 0;",
        "ld.shared.b32 %r3, [%r4];\n    setp.ne.b32 %p1, %r3, 0;",
    ],
)
def test_whole_warps_may_part(condition):
    assert divided_barriers(kernel(condition, some=BARRIER)) == []


@pytest.mark.parametrize(("operand", "found"), [("%r2", ["@%p1 bra $L__BB0_2;"]), ("%r9", [])])
def test_a_result_of_inline_ptx_in_braces_varies_as_its_operands(operand, found):
    inline = f"{{ .reg .b32 own; add.u32 own, {operand}, 1; mov.b32 %r3, own; }}"
    condition = f"{inline}\n    setp.ne.b32 %p1, %r3, 0;"
    assert divided_barriers(kernel(condition, some=BARRIER)) == found
