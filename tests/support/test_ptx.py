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


def test_a_barrier_is_found_unless_threads_have_met_again():
    for barrier in (BARRIER, "{ .reg .b32 t; add.u32 t, %r9, 8; bar.sync t, 256; }"):
        assert divided_barriers(kernel(some=barrier)) == ["@%p1 bra $L__BB0_2;"]
    assert divided_barriers(kernel(all=BARRIER)) == []


@pytest.mark.parametrize(("operand", "found"), [("%r2", ["@%p1 bra $L__BB0_2;"]), ("%r9", [])])
def test_a_result_of_inline_ptx_in_braces_varies_as_its_operands(operand, found):
    inline = f"{{ .reg .b32 own; add.u32 own, {operand}, 1; mov.b32 %r3, own; }}"
    condition = f"{inline}\n    setp.ne.b32 %p1, %r3, 0;"
    assert divided_barriers(kernel(condition, some=BARRIER)) == found
