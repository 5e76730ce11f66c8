"""What `bench` measured, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

_COLUMNS = (
    ("op", "op"),
    ("tokens", "tokens"),
    ("ranks", "ranks"),
    ("dtype", "dtype"),
    ("layout", "layout"),
    ("wire", "wire_dtype"),
    ("implementation", "implementation"),
    ("device us", "device_us"),
    ("slowest", "slowest_us"),
    ("wall us", "wall_us"),
    ("low..high", "wall_range"),
    ("wire MB", "wire_mb"),
    ("logical GB/s", "logical_gb_per_s"),
    ("wire GB/s", "wire_gb_per_s"),
    ("of link", "link_fraction"),
    ("vs ragged", "speedup_over_ragged"),
)
_DEFAULTS = {"layout": "expert", "wire_dtype": "none"}
_TEXT = ("op", "dtype", "layout", "wire_dtype", "implementation")


def table(rows: Sequence[Row]) -> str:
    """Fixed-width text; a column that says nothing in any row is left out."""
    cells = [[_cell(row, key) for _, key in _COLUMNS] for row in rows]
    nothing = [("", _DEFAULTS.get(key, "")) for _, key in _COLUMNS]
    kept = [i for i in range(len(_COLUMNS)) if any(line[i] not in nothing[i] for line in cells)]
    lines = [[_COLUMNS[i][0] for i in kept], *([line[i] for i in kept] for line in cells)]
    out = aligned(lines, [_COLUMNS[i][1] in _TEXT for i in kept])
    failures = [f"{name(row)}: {row['error']}" for row in rows if row.get("error")]
    blind = sorted({row["device_error"] for row in rows if row.get("device_error")})
    failures += [f"no device time: {error}" for error in blind]
    return "\n".join(out + ([""] + failures if failures else []))


def aligned(lines: Sequence[Sequence[str]], text_columns: Sequence[bool]) -> list[str]:
    """Lines of cells as lines of text: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out = []
    for line in lines:
        padded = [
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(line, widths, text_columns, strict=True)
        ]
        out.append("  ".join(padded).rstrip())
    return out


def plot(rows: Sequence[Row], path: str) -> None:
    """Time over tokens, one panel per operation, one line per (implementation, ranks, dtype)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if not row.get("error")]
    operations = list(dict.fromkeys(row["op"] for row in measured)) or ["nothing measured"]
    figure, axes = plt.subplots(
        1, len(operations), figsize=(5 * len(operations), 4.5), squeeze=False, sharey=True
    )
    for axis, operation in zip(axes[0], operations, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in (row for row in measured if row["op"] == operation):
            label = ", ".join([f"{row['ranks']} ranks", row["dtype"], *_way(row)])
            lines.setdefault(label, []).append((row["tokens"], row["wall"]["median_us"]))
        for label, points in lines.items():
            tokens, times = zip(*sorted(points), strict=True)
            axis.plot(tokens, times, marker="o", label=label)
        axis.set(title=operation, xlabel="tokens per rank", xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
        if lines:
            axis.legend(fontsize="x-small")
    axes[0][0].set_ylabel("in-loop wall time, us")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cell(row: Row, key: str) -> str:
    wall, device = row.get("wall") or {}, row.get("device") or {}
    value: Any
    if key == "wall_us":
        value = wall.get("median_us")
    elif key == "wall_range":
        return f"{wall['low_us']:.1f}..{wall['high_us']:.1f}" if wall else "failed"
    elif key == "device_us":
        value = device.get("median_us")
    elif key == "slowest_us":
        value = device.get("slowest_us")
    elif key == "wire_mb":
        value = row["wire_bytes"] / 1e6 if "wire_bytes" in row else None
    else:
        value = row.get(key)
    if value is None:
        return ""
    if key == "link_fraction":
        return f"{value:.0%}"
    if key == "speedup_over_ragged":
        return f"{value:.1f}x"
    if key.endswith("_us"):
        return f"{value:.1f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def name(row: Row) -> str:
    """The case that a row is of."""
    case = f"{row['op']}, {row['tokens']} tokens, {row['ranks']} ranks, {row['dtype']}"
    return ", ".join([case, *_way(row)])


def _way(row: Row) -> list[str]:
    """The implementation, and what else is not as usual."""
    unusual = [row[key] for key, usual in _DEFAULTS.items() if row.get(key, usual) != usual]
    return [*unusual, row["implementation"]]
