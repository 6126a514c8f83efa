"""A report as one self-contained page: plots, table, environment and command; light and dark."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from typing import Any

from hunch.bench.environment import machine_of
from hunch.bench.plots import Chart, charts
from hunch.bench.records import Report
from hunch.bench.report import findings, table_cells

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #ffffff;
  --line: #d1d9e0; --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117;
  --line: #3d444d; --panel: #151b23; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(27rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; }
pre { background: var(--panel); padding: .8rem; border-radius: 6px; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.pairs td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.pairs td:first-child { white-space: nowrap; color: var(--soft); }
p.soft { color: var(--soft); }
"""
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0, "bytes"))


def as_html(report: Report, limits: Mapping[str, float] | None = None) -> str:
    where = report.environment
    model = where.get("model") or ", ".join(where.get("servers", []))
    points = "".join(f"<li>{escape(line)}</li>" for line in findings(report))
    plots = "".join(_figure(chart) for chart in charts(report, limits))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>hunch bench: {escape(str(model))}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(str(model))}</h1>"
        f'<p class="soft">{escape(machine_of(where))}, {escape(str(where.get("date")))}</p>'
        f"{f'<ul>{points}</ul>' if points else ''}"
        f'<div class="plots">{plots}</div>'
        f"<h2>Figures</h2>{_table(report, limits)}"
        '<p class="soft">Speed-up: time of plain decoding over the method\'s for the same '
        "requests, with 95% of a bootstrap over prompts. ±: half the range of the rounds. Every "
        "figure is defined in docs/metrics.md.</p>"
        f"<h2>Command</h2><pre>{escape(str(where.get('command')))}</pre>"
        f"<h2>Environment</h2>{_pairs(where)}"
        f"<h2>Settings</h2>{_pairs(report.settings)}"
        "</body></html>\n"
    )


def _figure(chart: Chart) -> str:
    light, dark = (
        "data:image/svg+xml;base64," + b64encode(chart.render(theme)).decode()
        for theme in ("light", "dark")
    )
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(chart.question)}"></picture></figure>'
    )


def _table(report: Report, limits: Mapping[str, float] | None) -> str:
    headings, lines = table_cells(report, limits)
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _pairs(values: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in values.items() if value not in (None, [], {})}
    kept.pop("command", None)  # it stands above
    rows = "".join(
        f"<tr><td>{escape(_words(name))}</td><td>{escape(_text(value, name))}</td></tr>"
        for name, value in kept.items()
    )
    return f'<table class="pairs">{rows}</table>'


def _words(name: str) -> str:
    return name.replace("num_", "").removesuffix("_bytes").replace("_", " ")


def _text(value: Any, name: str = "") -> str:
    """A value for people: bytes and shares with their units, large numbers in groups of three."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(key)} {_text(one, key)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_bytes"):
        unit, word = next((u, w) for u, w in BYTES if value >= u)
        return f"{value / unit:.3g} {word}"
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
