"""The figures of cpu_peers.py as tables, with the ratios that matter."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any]) -> None:
    console = Console()
    for table in tables(report):
        console.print(table)
    if "equal" in report:
        word = "the same tokens as hunch/off" if report["equal"] else "OTHER TOKENS than hunch/off"
        console.print(f"hunch's methods wrote {word}; answers that differ: {_counts(report)}")


def tables(report: dict[str, Any]) -> list[Table]:
    """One table per part that was measured."""
    makers = {"decode": _decode, "curve": _curve, "fidelity": _fidelity}
    made = [make(report[name]) for name, make in makers.items() if report.get(name)]
    rows = _others(report)
    if rows:
        table = Table("figure", "hunch", "against", "ratio", title="other figures")
        for row in rows:
            table.add_row(*row)
        made.append(table)
    return made


def _counts(report: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in report["num_different"].items() if count)


def _decode(speeds: dict[str, dict[str, float]]) -> Table:
    """Tokens per second; in brackets against the same engine without speculation."""
    sets = list(dict.fromkeys(name for found in speeds.values() for name in found))
    table = Table("engine", *sets, title="decoding, tok/s (and times the same engine's off)")
    for engine, found in speeds.items():
        plain = speeds.get(engine.partition("/")[0] + "/off", {})
        cells = [
            f"{found[name]:.1f} ({found[name] / plain[name]:.2f})" if name in found else "-"
            for name in sets  # an engine's off is measured wherever its other methods are
        ]
        table.add_row(engine, *cells)
    if "hunch/off" in speeds and "llama.cpp/off" in speeds:
        ours, theirs = speeds["hunch/off"], speeds["llama.cpp/off"]
        both = ours.keys() & theirs.keys()
        ratios = [f"{ours[name] / theirs[name]:.2f}" if name in both else "-" for name in sets]
        table.add_row("hunch/off : llama.cpp/off", *ratios)
    return table


def _curve(curve: dict[str, dict[str, float]]) -> Table:
    unit = curve["llama.cpp"]["1"]
    title = "one pass, ms (and times llama.cpp's one-row pass)"
    table = Table("rows", *curve, title=title)
    for rows in curve["llama.cpp"]:
        cells = [f"{found[rows]:.1f} ({found[rows] / unit:.2f})" for found in curve.values()]
        table.add_row(rows, *cells)
    return table


def _fidelity(fidelity: dict[str, dict[str, float]]) -> Table:
    table = Table("engine", "mean KL", "top-1 agreement", title="against float32")
    for engine, found in fidelity.items():
        table.add_row(engine, f"{found['kl']:.5f}", f"{100 * found['top1']:.2f} %")
    return table


def _others(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for key, name in (("prefill", "prefill, tok/s"), ("batch8", "8 at once, tok/s")):
        if key in report:
            ours, theirs = report[key]["hunch"], report[key]["llama.cpp"]
            rows.append((name, f"{ours:.0f}", f"llama.cpp {theirs:.0f}", f"{ours / theirs:.2f}"))
    if "sampling" in report:
        ours, base = report["sampling"]["sampled"], report["sampling"]["greedy"]
        name = "T=0.8, top_p=0.95, tok/s"
        rows.append((name, f"{ours:.0f}", f"greedy {base:.0f}", f"{ours / base:.2f}"))
    if "start" in report:
        seconds = report["start"]["first_token_seconds"]
        rows.append(("start to first token, s", f"{seconds:.2f}", "after import torch", ""))
        ours, size = report["memory"]["bytes"] / 1e6, report["memory"]["file_bytes"] / 1e6
        name = "peak memory at 2k tokens, MB"
        rows.append((name, f"{ours:.0f}", f"the file {size:.0f}", f"{ours / size:.2f}"))
    return rows
