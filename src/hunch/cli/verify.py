"""hunch verify: the same prompts plain and speculative, compared token for token, or by chances."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import typer

from hunch.cli import options as o
from hunch.config import SpecConfig
from hunch.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hunch import LLM, SamplingParams
    from hunch.bench.distribution import Agreement
    from hunch.bench.equality import Guesses, MethodReport

LOSSY_NOTE = "LOSSY: this verifier may change the text"


@dataclass(slots=True)
class Run:
    """One method at one temperature and batch size."""

    method: str
    temperature: float
    batch: int
    equality: MethodReport | None = None
    agreement: Agreement | None = None

    @property
    def is_good(self) -> bool:
        if self.agreement is not None:
            return self.agreement.is_good
        return self.equality is not None and self.equality.is_equal

    @property
    def counts(self) -> Guesses:
        found = self.agreement or self.equality
        assert found is not None
        return found


@dataclass(kw_only=True)
class Options(o.FilterOptions, o.EngineOptions):
    name: o.ModelName = None
    model: o.Model = o.DEFAULT_MODEL
    speculate: str = o.option("ngram,suffix", "Methods to check, commas between.")
    prompts: o.Prompts = None
    limit: int | None = o.option(None, "Only the first N prompts.", min=1)
    temperature: str = o.option(
        "0", "0 is greedy; several: 0,0.7,1", "--temperature", "--temperatures"
    )
    repetition_penalty: float = o.option(1.0, "Above 1: less repetition.")
    presence_penalty: float = o.option(0.0, "From -2 to 2.")
    frequency_penalty: float = o.option(0.0, "From -2 to 2.")
    logit_bias: list[str] | None = o.option(None, "TOKEN_ID=BIAS, repeatable.")
    n: int = o.option(1, "Samples per prompt.", min=1)
    batch: str = o.option("8", "Requests at once; several: 1,8,32", "--batch", "--batch-sizes")
    verifier: o.Verifier = "exact"
    samples: int = o.option(1000, "Samples per prompt where chances are compared.", min=50)
    as_json: o.Json = False
    max_tokens: o.MaxTokens = 64
    seed: o.Seed = 0


@o.takes(Options)
def verify(ctx: typer.Context, given: Options) -> None:
    """Check that speculation changes no token.

    Exit code 1 if it does.

    Verifiers other than exact give other tokens under the same seed; above temperature 0 they are
    checked by chi-square on the model's own next-token chances, over many samples. Guesses are
    made whether they pay or not: this looks for differences, not for speed.
    """
    from hunch.bench.workloads import PROMPTS

    given = replace(given, model=o.one_model(ctx, given.name, given.model))
    if given.verifier == "exact" and o.given_options(ctx, ["samples"]):
        raise ConfigError("--samples is for verifiers whose chances are compared; exact is not one")
    records = PROMPTS[: given.limit]
    if given.prompts is not None:
        records = o.read_prompts(given.prompts, given.limit)
    temperatures = o.numbers("temperature", given.temperature, float, with_zero=True)
    params = o.sampling(given, temperature=None, logit_bias=_read_bias(given.logit_bias))
    check = _Check(given, records, params)
    methods, batches = o.words(given.speculate), o.numbers("batch", given.batch, int)
    if not methods:
        raise ConfigError("--speculate names no method")
    for method in methods:
        SpecConfig.parse(method)  # a name that is not known is an error before anything is loaded
    runs = check.all(methods, temperatures, batches)
    if given.as_json:
        print(json.dumps(_as_json(runs, given.verifier)))
    else:
        _show(runs, given.verifier)
    if not all(run.is_good for run in runs):
        raise typer.Exit(1)


class _Check:
    """The runs of one command; plain answers are made once per temperature."""

    def __init__(
        self, asked: Options, records: list[dict[str, Any]], params: SamplingParams
    ) -> None:
        self.asked, self.records, self.params = asked, records, params
        self.ids = [str(record["id"]) for record in records]

    def all(
        self, methods: Sequence[str], temperatures: Sequence[float], batches: Sequence[int]
    ) -> list[Run]:
        plain = self._open("off", min(batches), "exact")
        self.prompts = [o.prompt_ids(plain, record) for record in self.records]
        self._leave_out_long(plain.engine.capacity.max_len)
        expected = {
            t: plain.generate(self.prompts, replace(self.params, temperature=t))
            for t in temperatures
            if not self._is_weighed(t)
        }
        scorer = None
        if any(map(self._is_weighed, temperatures)):
            scorer = self._open("off", 16, "exact", logprobs_mode="processed_logprobs")
        runs = []
        for method, batch in product(methods, batches):
            with self._open(method, batch, self.asked.verifier, always_draft=True) as llm:
                for t in temperatures:
                    run = Run(method, t, batch)
                    self._one(run, llm, plain, expected.get(t), scorer)
                    runs.append(run)
        return runs

    def _one(self, run: Run, llm: LLM, plain: LLM, expected: Any, scorer: LLM | None) -> None:
        from hunch.bench.distribution import fit
        from hunch.bench.equality import compare

        params = replace(self.params, temperature=run.temperature)
        if expected is None:
            assert scorer is not None
            run.agreement = fit(llm, scorer, self.prompts, params, self.asked.samples)
            return
        found = llm.generate(self.prompts, params)
        run.equality = compare(self.ids, self.prompts, expected, found, plain)

    def _leave_out_long(self, room: int) -> None:
        """Prompts that leave no room for an answer in the model's context."""
        kept = [place for place, prompt in enumerate(self.prompts) if len(prompt) < room]
        if not kept:
            raise RequestError(f"no prompt fits the context of {room} tokens: give --prompts")
        if len(kept) < len(self.prompts):
            gone = len(self.prompts) - len(kept)
            typer.echo(
                f"{gone} of {len(self.prompts)} prompts left out: longer than {room} tokens",
                err=True,
            )
        self.prompts = [self.prompts[place] for place in kept]
        self.ids = [self.ids[place] for place in kept]

    def _is_weighed(self, temperature: float) -> bool:
        return self.asked.verifier != "exact" and temperature > 0

    def _open(self, method: str, batch: int, verifier: str, **more: Any) -> LLM:
        given = {"quiet": self.asked.as_json, "max_num_seqs": batch, "verifier": verifier, **more}
        return o.open_llm(self.asked.model, method, **self.asked.engine(), **given)


def _read_bias(pairs: list[str] | None) -> dict[int, float] | None:
    if not pairs:
        return None
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {pair!r} must be TOKEN_ID=BIAS") from None
    return bias


def _as_json(runs: list[Run], verifier: str) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for run in runs:
        into = methods.setdefault(
            run.method,
            {"equal": True, "num_prompts": 0, "drafted": 0, "accepted": 0,
             "first_difference": None, "runs": []},
        )  # fmt: skip
        one: dict[str, Any] = {"temperature": run.temperature, "batch": run.batch}
        one |= {"equal": run.is_good, "drafted": run.counts.drafted}
        if run.agreement is not None:
            one |= {"test": "chi-square", "p_value": run.agreement.p_value}
            one |= {"num_samples": run.agreement.num_samples}
        elif run.equality is not None:
            one |= {"test": "equality"}
            into["num_prompts"] = run.equality.num_prompts
            if run.equality.first_difference and not into["first_difference"]:
                into["first_difference"] = asdict(run.equality.first_difference)
        into["equal"] &= run.is_good
        into["drafted"] += run.counts.drafted
        into["accepted"] += run.counts.accepted
        into["runs"].append(one)
    report = {"equal": all(run.is_good for run in runs), "verifier": verifier, "methods": methods}
    return report | ({"lossy": True} if o.is_lossy(verifier) else {})


def _show(runs: list[Run], verifier: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    names = ("T", "batch", "passes", "drafted", "accepted", "verdict")
    method = Column("method", overflow="fold")
    table = Table(method, *names, title=f"verifier {verifier}" if verifier != "exact" else None)
    for run in runs:
        verdict = "identical" if run.is_good else "NO"
        if run.agreement is not None:
            verdict = f"{'follows' if run.is_good else 'NO'} (p = {run.agreement.p_value:.3g})"
        elif run.equality is not None and not run.is_good:
            verdict = f"NO ({run.equality.num_different} of {run.equality.num_prompts} differ)"
        counts = (run.counts.steps, run.counts.drafted, run.counts.accepted)
        table.add_row(
            run.method, f"{run.temperature:g}", str(run.batch), *map(str, counts), verdict
        )
    console.print(table)
    if o.is_lossy(verifier):
        console.print(LOSSY_NOTE)
    for run in runs:
        if run.equality is not None and run.equality.first_difference is not None:
            difference = asdict(run.equality.first_difference)
            console.print(f"{run.method}, T = {run.temperature:g}: first difference {difference}")
