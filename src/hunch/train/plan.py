"""What a training run begins with: costs and lookups measured, and the drafters worth training.

The choice follows expected speed: tokens per pass by the model of `expect`, over the seconds that
`costs` measured on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hunch.errors import ConfigError, TrainingError
from hunch.hub import resolve as find_files
from hunch.hub.drafters import BESIDE_LOOKUPS
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.train.clock import Clock
from hunch.train.costs import Costs, least_costs, measure_costs, measure_cuts
from hunch.train.expect import Expected, answering_share, beside_lookups, rank, tokens_answered
from hunch.train.files import read_json, write_json
from hunch.train.job import drafts_as
from hunch.train.loop import CONTEXT
from hunch.train.origin import Origin, agreement, open_origin
from hunch.train.prompts import BUILTIN, read_prompts, to_hold_out
from hunch.train.regenerate import give_back
from hunch.train.serving import Serving
from hunch.train.sizes import Ground, Smaller, possible, sizes_for, sizes_from
from hunch.train.speeds import compare_speeds, engine_for_one

PLAN = "plan.json"
LOOKUPS = "lookups"
WITHOUT = "auto:draft=off"  # the method of a target without a drafter
PAYS = 1.02  # times the best speed without it: less is lost in noise
# Shares of all minutes at which stages end; what is left after the last one is for comparing.
TRAINED = 0.92
COMPARING = {"cuda": 35.0, "cpu": 0.0}  # least seconds for comparing: kernels are compiled
COUNTED = 0.7  # if answers are counted, and no network is trained
# The share of the time between measuring and that end which answering gets while drafters are
# compared; for the best of them it follows from the speeds of answering and learning
# (`answering_share`).
ANSWERING = 0.42
LONG = 600.0  # seconds of a job that has time for trials
NUM_TRIED = 27  # prompts of a comparison, at most
_MEASURING, _MEASURING_SHARE = 20.0, 0.04  # seconds, or share, for lookups in the engine
_AGREEING = 48  # tokens of each answer that are compared with a smaller model's choice
_LOADING = 0.5  # share of all minutes that loading the target may take, once
_NUM_SHOWN = 4

Say = Callable[[str], None]


@dataclass(slots=True)
class Asked:
    """What a user wants."""

    target: str
    out: Path
    prompts: str
    minutes: float = 10.0
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)  # KEY=VALUE of any stage
    is_forced: bool = False  # train even where it is expected not to pay
    is_listed: bool = True  # let `auto` find it

    @property
    def smaller(self) -> str:
        """A smaller model whose layers are considered too; empty: none."""
        return self.options.get("from", "")

    @property
    def of_any(self) -> dict[str, str]:
        """Options that every drafter is trained with."""
        return {key: value for key, value in self.options.items() if key != "from"}


@dataclass(slots=True)
class Plan:
    """What was measured before training, and what was chosen by it."""

    ground: Ground
    lookups: float | None  # speed over plain decoding with lookups alone; None: not asked
    expected: list[Expected]  # the fastest first
    answering: float = ANSWERING  # share of the time until training ends, for answers

    @property
    def best(self) -> Expected:
        return self.expected[0]

    @property
    def together(self) -> float:
        """The expected speed of `auto` with it, beside lookups if it can be."""
        speedup = self.best.speedup
        is_beside = drafts_as(self.best.size.method) in BESIDE_LOOKUPS
        return beside_lookups(speedup, self.lookups or 1.0) if is_beside else speedup

    @property
    def why(self) -> str:
        """The reason not to train the best."""
        best = self.best
        if self.lookups is None:
            best = max(self.expected, key=lambda one: one.chance)
            return (
                f"this CPU is too slow to train one; the most promising, {best.size.text()}, "
                f"would guess {best.chance:.1%} of the tokens right, which costs more than it saves"
            )
        words = f"{best.size.text()}: {expectation(best)}"
        return f"the best, {words}; lookups alone have {self.lookups:.2f}x"

    @property
    def is_worth_it(self) -> bool:
        return self.together > PAYS * max(self.lookups or 1.0, 1.0)


def device_of(asked: Asked) -> str:
    is_cpu = asked.engine.get("device") == "cpu" or not torch.cuda.is_available()
    return "cpu" if is_cpu else "cuda"


def make_plan(asked: Asked, spec: ModelSpec, work: Path, serving: Serving, say: Say) -> Plan:
    clock = serving.clock
    stored, origin = read_json(work / PLAN), _origin(asked)
    if stored is None and device_of(asked) == "cpu" and not asked.is_forced:
        # Known in seconds, before the target is loaded: how much could be learned in the time, by
        # the speed of products, at the least possible costs.
        smaller = None
        if origin is not None:
            smaller = _smaller(asked, origin, least_costs(origin.spec, spec), 1.0)
        ground = Ground(least_costs(spec), spec, "cpu", smaller)
        expected, share = _expected(ground, clock, clock.gone)
        if expected[0].speedup < PAYS:
            return Plan(ground, None, expected, share)
    if stored is None or smaller_of(stored) != asked.smaller or not _is_whole(stored, asked):
        say(f"{asked.target}: measures passes, guesses and lookups, then says what it expects")
        stored = _measure(asked, serving, origin)
        stored["gone"] = clock.gone  # so that a job that is continued later expects the same
        give_back()
        write_json(work / PLAN, stored)
    smaller = None
    if origin is not None:
        cuts = stored["smaller"]
        smaller = _smaller(asked, origin, _read_costs(cuts["costs"]), cuts["agrees"])
    ground = Ground(_read_costs(stored["costs"]), spec, stored["device"], smaller)
    expected, share = _expected(ground, clock, stored["gone"])
    plan = Plan(ground, stored["lookups"], expected, share)
    for line in _plan_lines(asked, plan, stored["num_prompts"]):
        say(line)
    return plan


def trained_share(clock: Clock, device: str) -> float:
    """The share of all minutes after which training has ended."""
    return max(min(TRAINED, 1 - COMPARING[device] / clock.seconds), 0.6)


def _origin(asked: Asked) -> Origin | None:
    if not asked.smaller:
        return None
    return open_origin(asked.smaller, open_weights(find_files(asked.target)))


def _smaller(asked: Asked, origin: Origin, costs: Costs, agrees: float) -> Smaller:
    return Smaller(
        name=asked.smaller, spec=origin.spec, costs=costs, agrees=agrees, num_known=origin.num_known
    )


def _read_costs(stored: dict[str, Any]) -> Costs:
    return Costs(**{**stored, "passes": tuple(map(tuple, stored["passes"]))})


def _expected(ground: Ground, clock: Clock, gone: float) -> tuple[list[Expected], float]:
    """Every drafter for the target, the fastest first, with the time that is left; and the share of
    that which answers get."""
    left = max(trained_share(clock, ground.device) * clock.seconds - gone, 2.0)
    sizes = sizes_for(
        ground.spec,
        possible(ground.spec),
        can_lose_units=ground.costs.per_units > 0,
        # What layers side by side lose is known for few models: a trial must show it.
        can_stand_abreast=ground.costs.per_abreast > 0 and clock.seconds >= LONG,
    )
    sizes += [] if ground.smaller is None else sizes_from(ground.smaller)

    def ranked(share: float) -> list[Expected]:
        answered = tokens_answered(ground, share * left)
        return rank(ground, seconds=(1 - share) * left, answered=answered, sizes=sizes)

    share = answering_share(ground, ranked(ANSWERING)[0].size, left)
    return ranked(share), share


def _is_whole(stored: dict[str, Any], asked: Asked) -> bool:
    """Whether another version of hunch measured the same things; else they are measured anew."""
    names = {"costs", "lookups", "num_prompts", "device", "gone"}
    found = [stored.get("costs", {}), *([stored["smaller"]["costs"]] if asked.smaller else ())]
    is_same = all(costs.keys() == {f.name for f in fields(Costs)} for costs in found)
    return is_same and names <= stored.keys()


def smaller_of(stored: Mapping[str, Any]) -> str:
    """The smaller model that a stored plan weighs; empty: none."""
    return str((stored.get("smaller") or {}).get("name", ""))


def _measure(asked: Asked, serving: Serving, origin: Origin | None) -> dict[str, Any]:
    """Measure the target's passes, a drafter's parts, and lookups in the engine."""
    engine, clock = engine_for_one(asked.target, asked.engine, context_of(asked)), serving.clock
    # The first start compiles kernels on all cores, also those that draw questions later.
    with serving.engine(engine, is_greedy=False) as llm:
        _check_loading(asked, clock)
        target = llm.engine.runner.target  # type: ignore[attr-defined]
        found = measure_costs(target, open_weights(find_files(asked.target)))
        prompts = _encoded(asked, llm)[:NUM_TRIED]
        methods, seconds = {LOOKUPS: WITHOUT}, _seconds(clock)
        speeds = compare_speeds(llm, methods, prompts, seconds=seconds, clock=clock)
        own = max(1 / speeds.plain - found.of_pass(1), 0.0)
        measured = {
            "costs": {**asdict(found), "step": own},
            "lookups": speeds.speedup[LOOKUPS],
            "num_prompts": speeds.num_prompts,
            "device": target.device.type,
        }
        if origin is not None:
            cuts = measure_cuts(target, origin.weights, found)
            answers = _answers(llm, prompts, _seconds(clock) / 2)
            agrees = agreement(origin, origin.load(target.dtype, target.device), answers)
            measured["smaller"] = {"name": asked.smaller, "costs": asdict(cuts), "agrees": agrees}
        return measured


def _answers(llm: Any, prompts: list[list[int]], seconds: float) -> list[tuple[list[int], Any]]:
    """Greedy answers to some of the prompts, two at least."""
    from hunch import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_AGREEING)
    ends, found = perf_counter() + seconds, list[tuple[list[int], Any]]()
    for prompt in prompts:
        if len(found) >= 2 and perf_counter() > ends:
            break
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        found.append((prompt, list(output.outputs[0].token_ids)))
    return found


def _check_loading(asked: Asked, clock: Clock) -> None:
    """Raise if loading the target took most of the time, as training may load it again."""
    if clock.gone > _LOADING * clock.seconds:
        raise TrainingError(
            f"loading {asked.target} took {clock.gone:.0f} s of {clock.seconds:.0f}, and training "
            f"may load it again: give --minutes {ceil(5 * clock.gone / 60)} or more, or run on a "
            "machine with less to do"
        )


def _seconds(clock: Clock) -> float:
    return min(_MEASURING, _MEASURING_SHARE * clock.seconds)


def context_of(asked: Asked) -> int:
    return int(asked.options.get("context", str(CONTEXT)))


def _encoded(asked: Asked, llm: Any) -> list[list[int]]:
    """Token ids of prompts of every kind in the file, as they are served."""
    room = min(context_of(asked), llm.engine.capacity.max_len) * 3 // 4
    if asked.prompts == BUILTIN and (held := to_hold_out(llm, room)):
        return [ids for ids, _ in held]
    found = read_prompts(asked.prompts)
    step = max(len(found.records) // NUM_TRIED, 1)
    found.records = found.records[::step]
    prompts = found.encode(llm, room)
    if not prompts:
        raise ConfigError(
            f"{asked.prompts}: no prompt leaves room for an answer; they may have {room} tokens"
        )
    return prompts


def _plan_lines(asked: Asked, plan: Plan, num_prompts: int) -> list[str]:
    costs, smaller = plan.ground.costs, plan.ground.smaller
    one, six = (1e3 * costs.of_pass(rows) for rows in (1, 6))
    lines = [
        f"{asked.target} on {plan.ground.device}: a pass takes {one:.2f} ms for one token, "
        f"{six:.2f} ms for six; a drafted node {1e3 * costs.per_layer:.3f} ms "
        f"per layer and {1e6 * costs.per_column:.3f} ms per thousand tokens it may guess",
        f"lookups alone: {plan.lookups:.2f}x of plain decoding (measured, {num_prompts} prompts)",
    ]
    if smaller is not None:
        cuts = smaller.costs
        lines.append(
            f"cut from {smaller.name}: a drafted node {1e3 * cuts.per_layer:.3f} ms per layer "
            f"and {1e6 * cuts.per_column:.3f} ms per thousand tokens it may guess; by itself it "
            f"says {smaller.agrees:.0%} of what the target does"
        )
    if not plan.best.num_nodes:
        return [*lines, "no network: a guess of any costs more here than it is expected to save"]
    firsts = list({_form(one): one for one in reversed(plan.expected)}.values())
    shown = [one for one in plan.expected if one in plan.expected[:_NUM_SHOWN] or one in firsts]
    lines += [f"  {one.size.text()}: {expectation(one)}" for one in shown]
    return [*lines, f"auto with the first of them: {plan.together:.2f}x of plain decoding expected"]


def _form(one: Expected) -> tuple[str, str]:
    return one.size.method, one.size.cut_from


def expectation(one: Expected) -> str:
    if not one.num_nodes:
        return "a guess of it costs more than it is expected to save"
    guesses = "1 guess" if one.num_nodes == 1 else f"{one.num_nodes} guesses"
    return (
        f"expects {one.tokens_per_pass:.2f} tokens per pass with {guesses} in "
        f"{1e3 * one.draft_seconds:.2f} ms, {one.speedup:.2f}x of plain decoding"
    )
