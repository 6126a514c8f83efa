"""How near the policy is to the best fixed choice, and what a rule of it is worth: replays.

    PYTHONPATH=src:tests:tests/drafting python tests/policy_figures.py --texts 1000
    PYTHONPATH=src:tests:tests/drafting python tests/policy_figures.py LEAD_RATE=1.0 --texts 1000

The first prints the table of `policy_table`; `--only closed,7B` the lines that have these words.

In the second, constants of `hunch.drafting` get other values; each case is replayed with the old
ones and with the new ones. A line gives the mean and the least of new speed over old. `--texts`
takes other random texts than those that the tests hold the policy to.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import test_policy as closed
import test_policy_load as load
import test_policy_sources as sources

import policy_table
from policy_replay import LARGE, SMALL, text

DRAFTERS: dict[str, Any] = {
    "a draft model": sources.BOTH, "a head": sources.WITH_HEAD, "lookups": sources.LOOKUPS,
    "merged trees": sources.WITH_MERGED,
}  # fmt: skip


def one_after_another(name: str, target: str, kind: str, num_rows: int) -> float:
    some = sources.texts(kind, 12 if num_rows == 1 else 3 * num_rows, 96)
    seconds = sources.seconds_of(target, has_head=name == "a head")
    return sources.rate(DRAFTERS[name], some, seconds, num_rows)


def together(drafter: Any, costs: dict[int, dict[int, float]], copied: float, rows: int) -> float:
    some = [text(seed, 96, copied, 0.5) for seed in range(rows)]
    return closed.speedup(some, rows, drafter, costs)


def open_load(name: str, kind: str, rate: float) -> float:
    target = load.TARGETS[name]
    policy, rows = load.new_policy(target)
    return 1.0 / load.waited(target, policy, rows, kind, rate, 0)


def late_host(interval: float) -> float:
    how: dict[str, Any] = {"prompt": (1.0, 0.1), "host": closed.busy_host, "count": 160}
    policies = {"auto": closed.LOOKUPS}
    found = closed.open_load(policies, SMALL, interval, first=0.3, copied=0.3, **how)
    return 1.0 / found["auto"]


def prompts_beside_every_step(interval: float) -> float:
    how: dict[str, Any] = {"first": 0.6, "prompt": (3.5, 3.5)}
    found = closed.open_load({"auto": closed.CHAINS}, closed.UNDER_LOAD, interval, **how)
    return 1.0 / found["auto"]


def cases() -> Iterator[tuple[str, Callable[[], float]]]:
    for name in DRAFTERS:
        for target in ("7B in 4 bits", "0.5B"):
            for kind in sources.TEXTS:
                for rows in (1, 8):
                    yield name, partial(one_after_another, name, target, kind, rows)
    for drafter in (closed.LOOKUPS, closed.BOTH):
        for costs in (SMALL, LARGE):
            for copied in (0.0, 0.4, 0.95):
                for rows in (4, 32):
                    yield "together", partial(together, drafter, costs, copied, rows)
    for target, rates in load.RATES.items():
        for kind in load.TEXTS:
            for rate in rates:
                yield "open load", partial(open_load, target, kind, rate)
    for interval in (1.25, 2.5, 5.0):
        yield "late host", partial(late_host, interval)
    for interval in (42.0, 10.4):
        yield "prompts beside steps", partial(prompts_beside_every_step, interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--only", default="")
    parser.add_argument("--texts", type=int, default=0)
    given = parser.parse_args()
    new_rng = np.random.default_rng
    np.random.default_rng = lambda seed: new_rng(seed + given.texts)  # type: ignore[assignment]
    if not given.settings:
        policy_table.print_table(set(filter(None, given.only.split(","))))
        return
    before = [run() for _, run in cases()]
    for setting in given.settings:
        policy_table.change(setting)
    ratios: dict[str, list[float]] = {}
    for (group, run), old in zip(cases(), before, strict=True):
        ratios.setdefault(group, []).append(run() / old)
    for group, some in ratios.items():
        print(f"{group:22} mean {fmean(some):.3f}  least {min(some):.2f}  of {len(some)}")


if __name__ == "__main__":
    main()
