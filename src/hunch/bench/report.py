"""A report for people and programs: a table, JSON, CSV, Markdown, and its findings in sentences."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

from rich import box
from rich.table import Table

from hunch.bench import analysis
from hunch.bench.envelope import OPEN, Envelope, envelope
from hunch.bench.environment import busy_words, machine_of
from hunch.bench.intervals import spread
from hunch.bench.metrics import figures, token_rate_ratio
from hunch.bench.records import Report

MILLISECONDS = ("first_token", "per_token", "gap", "end_to_end")
SHORTEST = 0.1  # seconds of plain decoding below which savings are not reported
# column -> heading of the table for people
HEADINGS = {
    "method": "method",
    "tokens_per_pass": "tokens per pass",
    "accepted": "accepted",
    "tokens_per_second": "tok/s",
    "speedup": "speed-up",
    "first_token": "first token, ms (P50, P99)",
    "per_token": "per token, ms (P50, P99)",
    "cpu_per_token": "CPU ms per token",
    "goodput": "goodput, req/s",
    "energy_per_token": "J per token",
    "identical": "identical",
}


def rows(report: Report, limits: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """One flat row per run: its point, all its figures, its speed-up, whether texts are equal."""
    found = []
    for run in (run for run in report.runs if run.rounds):
        row: dict[str, Any] = {"method": run.method, **run.point}
        row |= figures(run, limits)
        row["spread"] = spread([one.tokens_per_second for one in run.rounds if one.seconds])
        base = analysis.base_of(report, run)
        interval = analysis.speedup(base, run) if base is not None else None
        if interval is not None:
            is_base = run is base
            row["speedup"] = 1.0 if is_base else interval.value
            row["speedup_low"] = 1.0 if is_base else interval.low
            row["speedup_high"] = 1.0 if is_base else interval.high
        speeds = [figures(one)["tokens_per_second"] for one in (run, base) if one is not None]
        is_known = len(speeds) == 2 and all(speeds)
        row["token_rate_ratio"] = token_rate_ratio(*speeds) if is_known else None
        equal = analysis.num_equal(report, run)
        if equal is not None:
            row["num_equal"], row["num_compared"] = equal
            row["identical"] = equal[0] == equal[1]
        row["time_saved"] = analysis.time_saved(report, run)
        row["is_server"] = bool(report.settings.get("urls"))
        found.append(row)
    return found


def _shown(report: Report, found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Columns that say something about this report."""
    some = list(found)
    is_server = any(row.get("is_server") for row in some)
    is_alone = not is_server and all(run.point.get("concurrency") == 1 for run in report.runs)
    is_speculative = any(row.get("drafted") for row in some)
    wanted = {
        "tokens_per_pass": is_speculative,
        "accepted": is_speculative,
        "first_token": not is_alone,
        "per_token": not is_alone,
        "cpu_per_token": any("cpu_per_token" in row for row in some),
        "goodput": any("goodput" in row for row in some),
        "energy_per_token": any(row.get("energy_per_token") for row in some),
        "identical": any("identical" in row for row in some),
    }
    return [name for name in HEADINGS if wanted.get(name, True)]


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row.get(name)
    if name == "method":
        return analysis.label(row["method"])
    if name == "accepted":
        return f"{row['accepted']} of {row['drafted']}" if row.get("drafted") else "-"
    if name == "identical":
        if value is None:
            return "-"
        count = f"{row['num_equal']} of {row['num_compared']}"
        if row.get("is_server"):  # another engine may round differently, which is no fault
            return count
        return "yes" if value else f"NO ({count})"
    if value is None:
        return "-"
    if name == "tokens_per_second":
        return f"{value:,.1f}" + (f" ±{row['spread']:.0%}" if row.get("spread") else "")
    if name == "speedup":
        low, high = row["speedup_low"], row["speedup_high"]
        return f"{value:.2f}x" + (f" [{low:.2f}, {high:.2f}]" if low < high else "")
    if name == "cpu_per_token":
        return f"{1e3 * value:.1f}"
    if name in MILLISECONDS:
        p50, p99 = value["p50"], value["p99"]
        return "-" if p50 is None else f"{1e3 * p50:,.1f}, {1e3 * p99:,.1f}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)


def table_cells(
    report: Report, limits: Mapping[str, float] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the table for people."""
    found = rows(report, limits)
    axes, columns = analysis.varied_axes(report.points()), _shown(report, found)
    lines = [
        [*(str(row.get(axis, "-")) for axis in axes), *(_cell(name, row) for name in columns)]
        for row in found
    ]
    return [*axes, *(HEADINGS[name] for name in columns)], lines


def as_table(
    report: Report, limits: Mapping[str, float] | None = None, width: int | None = None
) -> Table:
    """A table for a terminal; if that is too narrow, the least important columns are left out."""
    headings, lines = table_cells(report, limits)
    for name in ("energy_per_token", "accepted", "per_token", "tokens_per_pass", "first_token"):
        if width is None or _room(_sizes(headings, lines)) <= width:
            break
        if HEADINGS[name] in headings:
            place = headings.index(HEADINGS[name])
            headings = headings[:place] + headings[place + 1 :]
            lines = [line[:place] + line[place + 1 :] for line in lines]
    sizes = _sizes(headings, lines)
    if width is not None:  # a method's name is never cut short, but folded if it must be
        place = headings.index("method")
        size, over = sizes[place], max(0, _room(sizes) - width)
        sizes[place] = max(min(size, 12), size - over)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, size in zip(headings, sizes, strict=True):
        table.add_column(fill(heading, size), width=size, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def _sizes(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column; headings are wrapped between words."""
    words = [max(heading.split(), key=len) for heading in headings]
    return [max(map(len, column)) for column in zip(words, *lines, strict=True)]


def _room(sizes: Sequence[int]) -> int:
    """The width of a whole line: each column has a space on both sides and a line to the next."""
    return sum(sizes) + 3 * len(sizes) - 1


def as_markdown(report: Report, limits: Mapping[str, float] | None = None) -> str:
    """A table for a README, with the machine, the commit and the command under it."""
    tables = [table_cells(report, limits)]
    if analysis.load_axis(report) is not None:
        tables.append(load_cells(report))
    text: list[str] = []
    for headings, lines in tables:
        text += ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
        text += ["| " + " | ".join(line) + " |" for line in lines] + [""]
    where = report.environment
    text += [f"{machine_of(where)}; hunch {where.get('hunch')}, commit {where.get('commit')}:", ""]
    text += [f"    {where.get('command')}", ""]
    text += [f"- {line}" for line in findings(report)]
    return "\n".join(text).rstrip() + "\n"


def load_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table with a column per load: speed-ups, and `auto` among them.

    Other axes have their first value, as in the plots.
    """
    axis = analysis.load_axis(report)
    assert axis is not None
    first = report.points()[0]
    points = sorted(
        (p for p in report.points() if {**p, axis: None} == {**first, axis: None}),
        key=lambda point: float(point[axis]),
    )
    found = analysis.speedups(report)
    starts = {
        one.method: one
        for one in analysis.inversions(report)
        if one.others.items() <= first.items()
    }
    lines = []
    for method, some in found.items():
        cells = [next((f"{i.value:.2f}x" for p, i in some if p == point), "-") for point in points]
        at = starts[method].at
        lines.append([analysis.label(method), *cells, "-" if at is None else f"{at:.3g}"])
    beside = {repr(one.point): one for one in envelope(report)}
    of_auto = [beside.get(repr(point)) for point in points]
    if any(of_auto):
        ratios = [
            "-" if one is None else f"{one.words} ({analysis.label(one.best)})" for one in of_auto
        ]
        lines.append(["`auto` against the fastest other", *ratios, ""])
        verdicts = ["-" if one is None else _decided(one) for one in of_auto]
        lines.append(["within 2%", *verdicts, ""])
    return [
        analysis.LOAD_AXES[axis],
        *(f"{point[axis]:g}" for point in points),
        "costs time from",
    ], lines


def _decided(one: Envelope) -> str:
    """Whether `auto` is within 2%, and by how many rounds."""
    return f"{one.verdict}, {one.num_rounds} rounds" if one.num_rounds > 1 else "one round"


def as_csv(report: Report, limits: Mapping[str, float] | None = None) -> str:
    """Every figure of every run, flat: percentiles and positions become columns."""
    flat = [dict(_flat(row)) for row in rows(report, limits)]
    names = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from ((f"{prefix}{name}.{place}", one) for place, one in enumerate(value, 1))
        else:
            yield prefix + name, value


def as_json(report: Report, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The whole report and, beside it, its figures."""
    return {
        **report.to_json(),
        "figures": rows(report, limits),
        "envelope": [one.to_json() for one in envelope(report)],
        "findings": findings(report),
    }


def findings(report: Report) -> list[str]:
    """The findings, in sentences."""
    sentences = [*_inversions(report), *_auto(report)]
    if len(report.points()) == 1:
        sentences += _saved(report)
    made_up = [run.method for run in report.runs if run.method.startswith("synthetic")]
    if made_up:
        sentences.append(
            f"{', '.join(dict.fromkeys(made_up))}: SYNTHETIC, what is accepted was wished for; it "
            "shows the engine's speed, no drafter's. Requests ran once before: their answers are "
            "the drafts"
        )
    errors = [answer for run in report.runs for answer in run.errors()]
    if errors:
        many = "request" if len(errors) == 1 else "requests"
        sentences.append(f"{len(errors)} {many} failed; the first: {errors[0].error}")
    if any(len(run.rounds) == 1 for run in report.runs) and len(report.methods()) > 1:
        sentences.append(
            "one round does not show how rounds differ, so it decides nothing; --repeats 4 may"
        )
    return sentences + busy_words(report.environment)


def _inversions(report: Report) -> list[str]:
    """Where each method starts to cost time, for each value of the axes other than the load."""
    sentences = []
    for one in analysis.inversions(report):
        others = [axis for axis in analysis.varied_axes(report.points()) if axis != one.axis]
        sentences.append(f"{one}{analysis.in_brackets(one.others, others)}")
    return sentences


def _saved(report: Report) -> list[str]:
    """The time saved by the clock, and by the engine's own metrics."""
    sentences = []
    for run in report.runs:
        found = analysis.time_saved(report, run) if len(run.rounds) > 1 else None
        if found is not None and found["by_engine"] and (found["plain"] or 0.0) >= SHORTEST:
            sentences.append(
                f"{analysis.label(run.method)} saved {found['by_clock']:.2f} s of "
                f"{found['plain']:.2f} s by the clock; its engine counts {found['by_engine']:.2f} s"
            )
    return sentences


def _auto(report: Report) -> list[str]:
    """`auto` beside the fastest other method at every point, and whether it is within 2% of it."""
    found = envelope(report)
    axes = analysis.varied_axes(report.points())
    sentences = []
    for one in found:
        where = analysis.in_brackets(one.point, axes)
        speed = f"auto{where}: {one.words} of the speed of {analysis.label(one.best)}"
        if one.num_rounds == 1:
            sentences.append(f"{speed} in one round")
            continue
        more = " (give more --repeats)" if one.verdict == OPEN else ""
        sentences.append(f"{speed} over {one.num_rounds} rounds; within 2%: {one.verdict}{more}")
    found = [one for one in found if one.num_rounds > 1]
    below = [analysis.describe_point(one.point, axes) for one in found if one.is_below_plain]
    if below:
        sentences.append(f"auto is SLOWER than plain decoding at {'; '.join(below)}")
    elif found:
        sentences.append("auto is never slower than plain decoding beyond noise and 2%")
    return sentences
