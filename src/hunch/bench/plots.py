"""Plots of a report, each of which answers one question; drawn by matplotlib, light and dark."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hunch.bench import analysis
from hunch.bench.intervals import Interval
from hunch.bench.metrics import figures
from hunch.bench.records import Report, Run
from hunch.errors import ConfigError

# Colours that colour-blind people can distinguish (Okabe and Ito); plain decoding is grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
MARKERS = "osD^vPX"
THEMES = {
    "light": {"ink": "#1f2328", "soft": "#8b949e", "paper": "#ffffff", "grid": "#e4e7ea"},
    "dark": {"ink": "#e6edf3", "soft": "#8b949e", "paper": "#0d1117", "grid": "#2a3038"},
}
AXIS_NAMES = {**analysis.LOAD_AXES, "context": "tokens of context"}
WIDE = 48  # letters of all names under an axis from which they are turned
Line = Sequence[tuple[float, Interval]]  # each with its x


def check_installed() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--html draws its plots with matplotlib: pip install matplotlib"
        ) from None


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: a question as its title, axes in plain words."""

    question: str
    draw: Callable[[Any, Mapping[str, str]], None]

    def render(self, theme: str = "light", form: str = "svg") -> bytes:
        from matplotlib.figure import Figure

        ink = THEMES[theme]
        with _style(ink):
            figure = Figure(figsize=(7.2, 3.9), layout="constrained")
            axes = figure.add_subplot()
            self.draw(axes, ink)
            axes.set_title(self.question, loc="left", fontsize=12, fontweight="bold", pad=12)
            out = io.BytesIO()
            metadata = {"Date": None} if form == "svg" else None
            figure.savefig(out, format=form, metadata=metadata, dpi=140)
        return out.getvalue()


@contextmanager
def _style(ink: Mapping[str, str]) -> Iterator[None]:
    import matplotlib as mpl

    settings = {
        "font.family": "sans-serif", "font.size": 10.5, "svg.hashsalt": "hunch",
        "figure.facecolor": ink["paper"], "savefig.facecolor": ink["paper"],
        "axes.facecolor": ink["paper"], "axes.edgecolor": ink["soft"],
        "axes.labelcolor": ink["ink"], "text.color": ink["ink"],
        "axes.spines.top": False, "axes.spines.right": False,
        "xtick.color": ink["ink"], "ytick.color": ink["ink"],
        "axes.grid": True, "grid.color": ink["grid"], "grid.linewidth": 0.8,
        "legend.frameon": False, "axes.axisbelow": True, "lines.linewidth": 1.8,
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def charts(report: Report, limits: Mapping[str, float] | None = None) -> list[Chart]:
    """The plots that this report has data for."""
    axis = analysis.load_axis(report)
    found: list[Chart | None] = []
    if axis is not None:
        found.append(_speedup_by(report, axis))
        question, speed = "How many tokens does it deliver?", _figure("tokens_per_second")
        found.append(_by_load(report, axis, question, "tokens per second", speed, bottom=0))
        found.append(_latency(report, axis))
        if limits:
            found.append(_goodput(report, axis, limits))
    for other in ("temperature", "context"):
        if other in analysis.varied_axes(report.points()):
            found.append(_speedup_by(report, other))
            question = f"How good are the guesses, by {other}?"
            label, value = "tokens per pass of the target", _figure("tokens_per_pass")
            found.append(_by_load(report, other, question, label, value))
    if axis is None and not found:
        found += [_speedup_bars(report), _by_category(report), _waiting(report)]
    positions = _positions(report)
    return [chart for chart in [*found, positions] if chart is not None]


def _colour(report: Report, method: str, ink: Mapping[str, str]) -> tuple[str, str]:
    others = [name for name in report.methods() if name != analysis.plain_of(report)]
    if method not in others:
        return ink["soft"], "."
    place = others.index(method)
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def _number(value: Any) -> float:
    if isinstance(value, str):
        from hunch.bench.workloads import length_of

        return float(length_of(value))
    return float(value)


def _lines(report: Report, axis: str, value: Callable[[Run], Interval | None]) -> dict[str, Line]:
    """The points of each method along one axis, at the first value of other axes."""
    points = report.points()
    fixed = {name: points[0][name] for name in points[0] if name != axis}
    lines: dict[str, list[tuple[float, Interval]]] = defaultdict(list)
    for run in report.runs:
        if any(run.point.get(name) != one for name, one in fixed.items()) or axis not in run.point:
            continue
        found = value(run) if run.answers() else None
        if found is not None:
            lines[run.method].append((_number(run.point[axis]), found))
    return {method: sorted(line, key=lambda pair: pair[0]) for method, line in lines.items()}


def _draw_lines(axes: Any, ink: Mapping[str, str], report: Report, lines: dict[str, Line]) -> None:
    for method, line in lines.items():
        colour, marker = _colour(report, method, ink)
        x = [place for place, _ in line]
        value, low, high = zip(*((one.value, one.low, one.high) for _, one in line), strict=True)
        axes.plot(x, value, color=colour, marker=marker, markersize=5, label=analysis.label(method))
        if low != high:
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.legend(loc="best", fontsize=8.5)


def _load_axis(axes: Any, axis: str, lines: dict[str, Line], report: Report) -> None:
    values = sorted({x for line in lines.values() for x, _ in line})
    if axis in analysis.LOAD_AXES and len(values) > 2 and values[0] > 0:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{x:g}" for x in values])
    axes.minorticks_off()
    points = report.points()
    others = [name for name in analysis.varied_axes(points) if name != axis]
    axes.set_xlabel(AXIS_NAMES.get(axis, axis) + analysis.in_brackets(points[0], others))


def _speedup_by(report: Report, axis: str) -> Chart:
    plain = analysis.plain_of(report)

    def value(run: Run) -> Interval | None:
        base = analysis.base_of(report, run)
        return analysis.speedup(base, run) if base is not None and base is not run else None

    def draw(axes: Any, ink: Mapping[str, str]) -> None:
        lines = _lines(report, axis, value)
        axes.axhline(1.0, color=ink["soft"], linewidth=1.2, linestyle="--", label=plain)
        _draw_lines(axes, ink, report, lines)
        height = 9  # of a number above its point; each above the one before, as they stand close
        for inversion in analysis.inversions(report):
            if axis == inversion.axis and inversion.at is not None and not inversion.is_always:
                colour, _ = _colour(report, inversion.method, ink)
                axes.plot(
                    [inversion.at], [1.0], marker="o", markersize=9, markerfacecolor="none",
                    markeredgecolor=colour, markeredgewidth=1.6, linestyle="none",
                )  # fmt: skip
                axes.annotate(
                    f"{inversion.at:.3g}", (inversion.at, 1.0), textcoords="offset points",
                    xytext=(0, height), ha="center", fontsize=8.5, color=colour,
                )  # fmt: skip
                height += 11
        _load_axis(axes, axis, lines, report)
        axes.set_ylabel("times as fast as plain decoding")

    words = {
        "rate": "At which load does drafting pay?",
        "temperature": "Does it pay with sampling?",
        "context": "Does it hold for long contexts?",
    }
    return Chart(words.get(axis, "With how many requests at once does drafting pay?"), draw)


def _figure(name: str, percent: str | None = None) -> Callable[[Run], Interval | None]:
    def value(run: Run) -> Interval | None:
        found = figures(run)[name]
        if percent is not None:
            found = found[percent]
        return None if found is None else Interval(found, found, found)

    return value


def _by_load(
    report: Report,
    axis: str,
    question: str,
    label: str,
    value: Callable[[Run], Interval | None],
    more: Callable[[Any, Mapping[str, str]], None] | None = None,
    **bounds: float,
) -> Chart:
    """A line per method, over the axis that the report varies; `more` draws the rest."""

    def draw(axes: Any, ink: Mapping[str, str]) -> None:
        lines = _lines(report, axis, value)
        _draw_lines(axes, ink, report, lines)
        _load_axis(axes, axis, lines, report)
        axes.set_ylabel(label)
        if bounds:
            axes.set_ylim(**bounds)
        if more is not None:
            more(axes, ink)

    return Chart(question, draw)


def _latency(report: Report, axis: str) -> Chart:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def more(axes: Any, ink: Mapping[str, str]) -> None:
        slow = _lines(report, axis, _figure("end_to_end", "p99"))
        for method, line in slow.items():
            colour, _ = _colour(report, method, ink)
            x, values = zip(*((x, one.value) for x, one in line), strict=True)
            axes.plot(x, values, color=colour, linewidth=1.0, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.text(
            0.99, 0.02, "lines: half of the requests; dotted: 99 of 100", fontsize=8,
            transform=axes.transAxes, ha="right", color=ink["soft"],
        )  # fmt: skip

    question, label = "How long does a request take?", "seconds to the last token"
    return _by_load(report, axis, question, label, _figure("end_to_end", "p50"), more)


def _goodput(report: Report, axis: str, limits: Mapping[str, float]) -> Chart:
    def value(run: Run) -> Interval:
        found = 100 * figures(run, limits)["goodput_share"]
        return Interval(found, found, found)

    words = ", ".join(f"{n.replace('_', ' ')} {1e3 * s:g} ms" for n, s in limits.items())
    question, label = "How many requests are served in time?", f"% of requests within\n{words}"
    return _by_load(report, axis, question, label, value, bottom=0, top=104)


def _speedup_bars(report: Report) -> Chart:
    def draw(axes: Any, ink: Mapping[str, str]) -> None:
        found = {method: points[0][1] for method, points in analysis.speedups(report).items()}
        for place, (method, interval) in enumerate(reversed(found.items())):
            colour, _ = _colour(report, method, ink)
            error = [[interval.value - interval.low], [interval.high - interval.value]]
            axes.barh(place, interval.value, color=colour, height=0.6)
            axes.errorbar(interval.value, place, xerr=error, color=ink["ink"], capsize=3)
            axes.text(
                0.03, place, f"{interval.value:.2f}x", va="center", fontsize=9,
                color="#ffffff", fontweight="bold",
            )  # fmt: skip
        axes.set_yticks(range(len(found)), [analysis.label(name) for name in reversed(found)])
        axes.axvline(1.0, color=ink["soft"], linewidth=1.2, linestyle="--")
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("times as fast as plain decoding (95% interval over prompts)")

    return Chart("How much faster is each method?", draw)


def _by_category(report: Report) -> Chart | None:
    plain = analysis.plain_of(report)
    base = next((run for run in report.runs if run.method == plain), None)
    categories = list(dict.fromkeys(a.category for a in base.answers())) if base else []
    others = [run for run in report.runs if run is not base]
    if base is None or len(categories) < 2 or not others:
        return None

    def ratio(run: Run, category: str) -> float:
        sums = [
            sum(a.end_to_end for a in r.answers() if a.category == category) for r in (base, run)
        ]
        return sums[0] / sums[1] if sums[1] else 0.0

    def draw(axes: Any, ink: Mapping[str, str]) -> None:
        width = 0.8 / len(others)
        for place, run in enumerate(others):
            colour, _ = _colour(report, run.method, ink)
            x = [k - 0.4 + width * (place + 0.5) for k in range(len(categories))]
            axes.bar(x, [ratio(run, k) for k in categories], width * 0.92, color=colour,
                     label=analysis.label(run.method))  # fmt: skip
        axes.set_xticks(range(len(categories)), categories)
        if sum(map(len, categories)) > WIDE:
            axes.tick_params(axis="x", labelrotation=35)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        axes.axhline(1.0, color=ink["soft"], linewidth=1.2, linestyle="--")
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("times as fast as plain decoding")
        axes.legend(loc="upper left", fontsize=8.5, ncols=min(len(others), 4))
        axes.set_ylim(top=1.25 * max(ratio(run, k) for run in others for k in categories))

    return Chart("On which kind of text does it pay?", draw)


def _waiting(report: Report) -> Chart:
    def draw(axes: Any, ink: Mapping[str, str]) -> None:
        for run in report.runs:
            colour, _ = _colour(report, run.method, ink)
            times = sorted(a.end_to_end for a in run.answers())
            if times:
                shares = [100 * (place + 1) / len(times) for place in range(len(times))]
                axes.step(
                    times, shares, where="post", color=colour, label=analysis.label(run.method)
                )
        axes.set_xlabel("seconds to the last token")
        axes.set_ylabel("% of the answers are complete")
        axes.set_ylim(0, 104)
        axes.set_xlim(left=0)
        axes.legend(loc="lower right", fontsize=8.5)

    return Chart("How long does an answer take?", draw)


def _common_positions(run: Run) -> list[float]:
    """Acceptance at the positions that enough drafts reached to be meaningful."""
    guessed = run.counts().get("guessed_per_position") or [0]
    num_common = sum(count >= max(8, 0.05 * guessed[0]) for count in guessed)
    return list((figures(run).get("per_position") or [])[:num_common])


def _positions(report: Report) -> Chart | None:
    first = report.points()[0] if report.points() else {}
    found = {run.method: _common_positions(run) for run in report.runs if run.point == first}
    found = {method: shares for method, shares in found.items() if shares}
    if not found:
        return None

    def draw(axes: Any, ink: Mapping[str, str]) -> None:
        most = min(max(map(len, found.values())), 12)
        for method, shares in found.items():
            colour, marker = _colour(report, method, ink)
            some = [100 * share for share in shares[:most]]
            axes.plot(range(1, len(some) + 1), some, color=colour, marker=marker, markersize=5,
                      label=analysis.label(method))  # fmt: skip
        axes.set_xticks(range(1, most + 1))
        axes.set_ylim(0, 104)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("% of guesses accepted")
        axes.legend(loc="best", fontsize=8.5)

    return Chart("How far ahead are guesses right?", draw)
