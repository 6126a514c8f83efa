"""Figures as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hunch.bench.measure import Measured


def as_table(measured: dict[str, Measured]) -> Table:
    """Methods as rows; the first is what the others are compared with."""
    base = next(iter(measured.values()))
    table = Table(
        "method", "passes", "tokens per pass", "accepted", "tok/s", "speed-up", "identical"
    )
    for name, one in measured.items():
        table.add_row(
            name,
            str(one.steps),
            f"{one.tokens_per_pass:.2f}",
            f"{one.accepted} of {one.drafted}" if one.drafted else "-",
            f"{one.tokens_per_second:.1f}",
            f"{one.tokens_per_second / base.tokens_per_second:.2f}x",
            "yes" if one.is_equal else "NO",
        )
    return table


def as_json(measured: dict[str, Measured]) -> dict[str, Any]:
    base = next(iter(measured.values()))
    return {
        name: {
            "passes": one.steps,
            "tokens": one.num_tokens,
            "tokens_per_pass": one.tokens_per_pass,
            "drafted": one.drafted,
            "accepted": one.accepted,
            "tokens_per_second": one.tokens_per_second,
            "speedup": one.tokens_per_second / base.tokens_per_second,
            "identical": one.is_equal,
        }
        for name, one in measured.items()
    }
