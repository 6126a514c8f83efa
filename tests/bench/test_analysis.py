"""Speed-ups, inversion points, the envelope and comparisons, on reports made by hand."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from hunch.bench import analysis, compare, intervals
from hunch.bench.envelope import YES, envelope
from hunch.bench.html import as_html
from hunch.bench.plots import charts
from hunch.bench.records import Answer, Report, Round, Run, load_report
from hunch.bench.report import as_csv, as_markdown, as_table, findings, rows
from hunch.errors import RequestError

# Times of plain decoding over each method's, at 1, 4 and 16 requests per second.
CURVES = {"off": (1.0, 1.0, 1.0), "long": (2.0, 1.1, 0.5), "auto": (2.0, 1.2, 1.0)}
RATES = (1.0, 4.0, 16.0)


def made(curves: dict[str, tuple[float, ...]] = CURVES, noise: float = 0.0) -> Report:
    """A sweep over rates: 12 prompts of 0.5 s by plain decoding, in two rounds."""
    chooser = random.Random(1)
    report = Report("sweep", {"model": "tiny", "urls": []}, {"cpu": "hand", "command": "hunch x"})
    for method, curve in curves.items():
        for rate, ratio in zip(RATES, curve, strict=False):
            rounds = []
            for _ in range(2):
                answers = [
                    Answer(
                        f"p{n}", ("chat", "code")[n % 2], 8, 40, n / rate, 0.1,
                        0.5 / ratio * (1 + noise * chooser.gauss(0, 1)), digest=f"d{n}",
                        num_passes=20, drafted=30, accepted=20,
                    )
                    for n in range(12)
                ]  # fmt: skip
                counts = {"guessed_per_position": [20, 10], "accepted_per_position": [15, 5]}
                rounds.append(Round(sum(a.end_to_end for a in answers), answers, counts))
            report.runs.append(Run(method, {"rate": rate, "temperature": 0.0}, rounds))
    return report


def test_speedups_are_ratios_of_the_same_requests() -> None:
    found = analysis.speedups(made())
    assert [interval.value for _, interval in found["long"]] == pytest.approx([2.0, 1.1, 0.5])


def test_the_inversion_point_lies_where_the_curve_crosses_one() -> None:
    by_method = {one.method: one for one in analysis.inversions(made())}
    # From 1.1 at 4 to 0.5 at 16: a sixth of the way, on a logarithmic axis.
    assert by_method["long"].at == pytest.approx(4 * 4 ** (0.1 / 0.6))
    assert by_method["auto"].at is None
    assert "costs time from 5.0" in str(by_method["long"])
    always = analysis.inversions(made({"off": (1, 1, 1), "bad": (0.9, 0.8, 0.7)}))
    assert always[0].is_always


def test_noise_is_no_inversion() -> None:
    report = made({"off": (1.0, 1.0, 1.0), "same": (1.0, 1.0, 0.995)}, noise=0.2)
    assert analysis.inversions(report)[0].at is None


def test_auto_is_held_against_the_fastest() -> None:
    points = envelope(made())
    assert [one.best for one in points] == ["long", "long", "off"]
    assert all(one.verdict == YES and not one.is_below_plain for one in points)
    slow = made({**CURVES, "auto": (2.0, 1.2, 0.9)})
    assert envelope(slow)[2].is_below_plain
    assert any("SLOWER" in line for line in findings(slow))


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("method", ["suffix:num_nodes=3:adaptive=false", "suffix,"])
def test_the_table_fits_a_terminal(width: int, method: str) -> None:
    """No heading and no figure is cut short."""
    report = made({"off": (1.0, 1.0), method: (1.31, 1.2)}, noise=0.3)
    out, limits = io.StringIO(), {"first_token": 0.5}
    Console(file=out, width=width).print(as_table(report, limits, width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for word in ("identical", "goodput,", "req/s", "speed-up", "suffix,", "yes"):
        assert word in text
    for row in rows(report)[2:]:
        low, high = row["speedup_low"], row["speedup_high"]
        assert f"{row['speedup']:.2f}x [{low:.2f}, {high:.2f}]" in text


def test_many_kinds_of_text_have_room_under_the_plot() -> None:
    report = made({"off": (1.0,), "ngram": (1.2,)})
    for run in report.runs:
        for answer in run.answers():
            answer.category = f"kind-{answer.id}"
    chart = next(one for one in charts(report) if "kind of text" in one.question)
    assert b"rotate(-35" in chart.render()


def test_a_slow_round_widens_the_interval() -> None:
    steady = intervals.ratio_of_sums([[1.0, 1.0, 1.0]] * 8, [[1.0, 1.0, 1.0]] * 8)
    shaken = intervals.ratio_of_sums([[1.0, 1.0, 3.0]] * 8, [[1.0, 1.0, 1.0]] * 8)
    assert steady is not None
    assert shaken is not None
    assert steady.low == steady.high == 1.0
    assert shaken.value == 1.0
    assert shaken.high > 1.5


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = made()
    report.save(path)
    again = load_report(path)
    assert again.settings == report.settings
    assert [row["speedup"] for row in rows(again)] == pytest.approx(
        [row["speedup"] for row in rows(report)], rel=1e-4
    )
    assert again.runs[0].rounds[0].counts == report.runs[0].rounds[0].counts
    path.write_text('{"format": "other"}')
    with pytest.raises(RequestError, match="not a report"):
        load_report(path)


def test_another_text_is_seen() -> None:
    report = made()
    assert analysis.is_all_equal(report)
    report.runs[-1].rounds[0].answers[3].digest = "other"
    assert not analysis.is_all_equal(report)
    assert rows(report)[-1]["num_equal"] == 23


def test_compare_says_what_changed_beyond_noise() -> None:
    before = made(noise=0.02)
    after = made({"off": (1.0, 1.0, 1.0), "long": (1.5, 1.1, 0.5)}, noise=0.02)
    changes = {(c.method, c.point["rate"]): c for c in compare.compare(before, after)}
    assert changes["long", 1.0].verdict == "slower"
    assert changes["off", 1.0].verdict == "same"
    assert changes["off", 1.0].num_same_text == 12
    found = compare.findings(list(changes.values()))
    assert found[0].startswith("slower beyond noise: long (rate 1.0")
    one = [change for change in changes.values() if change.point["rate"] == 1.0]
    assert compare.findings(one)[0] == "slower beyond noise: long"
    with pytest.raises(RequestError, match="in common"):
        compare.compare(made({"x": (1.0,)}), made({"y": (1.0,)}))


def test_no_name_is_cut_short_where_reports_are_compared() -> None:
    curves = {"off": (1.0, 1.0), "suffix:num_nodes=3:adaptive=false": (1.5, 1.1)}
    before, after = made(curves, noise=0.1), made(curves, noise=0.1)
    for run in (*before.runs, *after.runs):
        run.point = {"concurrency": int(run.point["rate"])}
    out = io.StringIO()
    Console(file=out, width=80).print(compare.as_table(compare.compare(before, after)))
    text = out.getvalue()
    assert "\u2026" not in text
    assert "suffix, fixed 3" in text


def test_the_page_is_one_file_with_light_and_dark_plots() -> None:
    report = made({name: curve[:2] for name, curve in CURVES.items()})
    report.environment |= {"memory_bytes": 25_274_793_984, "busy_share": 0.123}
    page = as_html(report)
    assert "http" not in page.replace("http://www.w3.org", "")
    assert len(charts(made(), {"end_to_end": 0.4})) == 5
    assert page.count("data:image/svg+xml;base64,") == 2 * 4
    assert "prefers-color-scheme: dark" in page
    assert page.count("hunch x") == 1, "the command once"
    assert "<td>memory</td><td>25.3 GB</td>" in page
    assert "12.3%" in page


def test_plots_of_one_point_and_of_temperatures() -> None:
    one = made({name: curve[:1] for name, curve in CURVES.items()})
    assert charts(one)[0].question == "How much faster is each method?"
    for run in (warm := made()).runs:
        run.point = {"concurrency": 1, "temperature": run.point["rate"]}
    questions = [chart.question for chart in charts(warm)]
    assert questions[0] == "Does it pay with sampling?"
    for chart in (*charts(one)[:2], charts(warm)[1]):
        assert chart.render("dark", "png").startswith(b"\x89PNG")


def test_csv_and_markdown_hold_every_run() -> None:
    lines = as_csv(made()).splitlines()
    assert len(lines) == 1 + 9
    assert "first_token.p99" in lines[0]
    assert "| 16.0 | long |" in as_markdown(made())


def test_markdown_has_a_column_for_every_load() -> None:
    text = as_markdown(made())
    assert "| requests per second | 1 | 4 | 16 | costs time from |" in text
    assert "| long | 2.00x | 1.10x | 0.50x | 5.04 |" in text
    assert "| auto | 2.00x | 1.20x | 1.00x | - |" in text
    assert "1.091 [1.091, 1.091] (long) | 1.000 [1.000, 1.000] (off) |" in text
    assert "| within 2% | yes, 2 rounds | yes, 2 rounds | yes, 2 rounds | |" in text.replace(
        "|  |", "| |"
    )
    one = made({name: curve[:1] for name, curve in CURVES.items()})
    assert "costs time from" not in as_markdown(one)


def test_reports_of_different_models_are_told_apart() -> None:
    before, after = made(), made()
    assert compare.other_subjects(before, after) == []
    before.environment, after.environment = {"model": "a", "cpu": "x"}, {"model": "b", "cpu": "x"}
    assert compare.other_subjects(before, after) == [
        "the reports differ in model: a before, b after"
    ]
