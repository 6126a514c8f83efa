"""A draft model on a device of its own, which guesses on while the target checks its last draft.

The likeliest verdict is that the target accepts a whole draft. So while the target checks one, the
model assumes that: it guesses the target's own next token, and then the draft after it. While there
is time, it prepares drafts for the next likeliest verdicts too: that the target rejects some node
and chooses the model's second choice there. If the verdict is one of these, the draft is ready at
once; else the model drafts as usual. Nothing here can change a token: what is prepared is a guess
like any other.

Shape letters: X rows of the engine, R rows of this step, N nodes, L longest sequence, G KV groups.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import Drafter, DrafterContext, GrowsLevels, Options
from hunch.drafting.trees import nodes_of, side_by_side
from hunch.errors import ConfigError
from hunch.kernels.build import num_cores
from hunch.models.heads.draft_model import TargetBeside
from hunch.registry import DRAFTERS, resolve
from hunch.sampling.state import SamplingState

if TYPE_CHECKING:
    from hunch.models.target import Target

METHODS = ("draft", "text")  # that need nothing from the target but its tokens
MAX_OTHERS = 3  # verdicts besides the likeliest that drafts are prepared for
FEW = 16  # tokens that the model may lack of a row to prepare a draft for it


@dataclass(slots=True)
class Chain:
    """A row's guessed tokens, from position `base` on."""

    base: int
    tokens: list[int]
    num_checked: int = 0  # of them that the target checks; the others were guessed since
    # For verdicts that reject a node: the tokens decided, and the draft after them.
    others: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def after(self, decided: list[int]) -> list[int]:
        """The draft that was prepared for this verdict; empty: there is none."""
        if len(decided) > self.num_checked:
            is_so = self.tokens[: len(decided)] == decided
            return self.tokens[len(decided) :] if is_so else []
        return next((draft for verdict, draft in self.others if verdict == decided), [])


@runtime_checkable
class HasSeconds(Protocol):
    """A method that knows its second choices."""

    def second_choices(self, rows: Rows, num_nodes: list[int]) -> list[list[tuple[int, float]]]:
        """Per row and node of its draft: the second best token there, and the log of the chance
        that the target agrees with all nodes before it and then chooses that token."""


class PreparingDrafter:
    """A method on another device, which a thread asks while the target is busy."""

    def __init__(self, method: Drafter, context: DrafterContext, home: torch.device) -> None:
        """`context` is the method's; the target is at `home`."""
        self._home = home
        self.method, self.context, self.needs = method, context, method.needs
        self.is_adaptive, self.shape = False, None
        if isinstance(method, GrowsLevels):
            self.is_adaptive, self.shape = method.is_adaptive, method.shape
        self.num_prepared = self.num_ready = 0  # drafts prepared, and those that could be used
        self.num_other = 0  # of these, for verdicts that rejected a node
        self._chains: dict[int, Chain] = {}  # the waiting draft of each row
        self._ready: dict[int, list[int]] = {}  # prepared drafts whose verdict was right
        self._seen: dict[int, int] = {}  # by row: how many of its tokens are in _tokens_XL
        window = getattr(method, "window", None)
        self._longest = context.max_len if window is None else window.limit
        size = (context.max_rows, context.max_len + method.needs.max_nodes + 2)
        self._tokens_XL = torch.zeros(size, dtype=torch.int64)  # rows after an assumed verdict
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hunch-draft")
        self._job: Future[None] | None = None
        self._is_due = Event()  # set when the target is done

    # --- while the target is busy -----------------------------------------------------------------

    def prepare(self, rows: Rows, num_checked: list[int]) -> None:
        """The target checks this many nodes of these rows, which must not change until `settle`."""
        if self.context.wants_q:
            return  # q depends on the real text, which is not known yet
        ids: list[int] = rows.ids_R.tolist()
        known, end = rows.known_X[rows.ids_R].tolist(), rows.end_X[rows.ids_R].tolist()
        computed = rows.computed_GX[-1, rows.ids_R].tolist()
        room, chosen = rows.max_draft_X.clone(), []
        for place, row in enumerate(ids):
            chain = self._chains.get(row)
            if chain is None or chain.base != known[place] or not chain.tokens:
                continue  # it did not draft for this row
            chain.num_checked = min(num_checked[place], len(chain.tokens))
            del chain.tokens[chain.num_checked :]
            # The target's own token, and a draft as long as the last.
            wanted = max(chain.num_checked, 1) + 1
            reach = known[place] + chain.num_checked
            room[row] = min(int(room[row]) + 1, wanted, end[place] - reach, self.needs.max_nodes)
            is_near = known[place] - computed[place] <= FEW and reach + wanted < self._longest
            if room[row] > 1 and is_near and not self.context.sampling.has_rules(row):
                chosen.append(row)
        if chosen:
            would_be = replace(self._as_if(rows, chosen), max_draft_X=room)
            self._is_due.clear()
            self._job = self._pool.submit(self._go_on, would_be)

    def _as_if(self, rows: Rows, ids: list[int]) -> Rows:
        """The rows if the target accepts all that it checks."""
        known_X, tokens_XL = rows.known_X.clone(), self._tokens_XL
        for row in ids:
            chain, seen = self._chains[row], self._seen.get(row, 0)
            tokens_XL[row, seen : chain.base] = rows.tokens_XL[row, seen : chain.base]
            last = chain.base + len(chain.tokens)
            tokens_XL[row, chain.base : last] = torch.tensor(chain.tokens, dtype=torch.int64)
            self._seen[row], known_X[row] = chain.base, last
        return replace(
            rows,
            ids_R=torch.tensor(ids),
            tokens_XL=tokens_XL,
            known_X=known_X,
            computed_GX=rows.computed_GX.clone(),
        )

    @torch.inference_mode()
    def _go_on(self, rows: Rows) -> None:
        self.method.observe(TargetStep.without_states(rows))
        draft = self.method.propose(rows)
        counts = draft.num_nodes_R.tolist()
        for row, chain in zip(rows.ids_R.tolist(), _chains_of(draft), strict=True):
            self._chains[row].tokens += chain
        self.num_prepared += sum(count > 0 for count in counts)
        if isinstance(self.method, HasSeconds) and not self._is_due.is_set():
            self._go_otherwise(rows, self.method)

    def _go_otherwise(self, rows: Rows, method: HasSeconds) -> None:
        """Prepare for rejected nodes, the likeliest first, while there is time."""
        ids = [row for row in rows.ids_R.tolist() if self._chains[row].num_checked]
        if not ids:
            return
        known_X = rows.known_X.clone()
        for row in ids:
            known_X[row] = self._chains[row].base
        before = replace(rows, ids_R=torch.tensor(ids), known_X=known_X)
        counts = [self._chains[row].num_checked for row in ids]
        seconds = method.second_choices(before, counts)
        places = [
            # The last node first: each draft overwrites the KV after its node, and none before.
            sorted(sorted(range(len(some)), key=lambda n: -some[n][1])[:MAX_OTHERS], reverse=True)
            for some in seconds
        ]
        for turn in range(MAX_OTHERS):
            leaving = {
                row: (some[chosen[turn]][0], chosen[turn])
                for row, some, chosen in zip(ids, seconds, places, strict=True)
                if turn < len(chosen)
            }
            if not leaving or self._is_due.is_set():
                return
            self._prepare_other(before, leaving)

    def _prepare_other(self, rows: Rows, leaving: dict[int, tuple[int, int]]) -> None:
        """Prepare the drafts for verdicts with this token in place of that node."""
        known_X, room = rows.known_X.clone(), rows.max_draft_X.clone()
        for row, (token, node) in leaving.items():
            chain = self._chains[row]
            self._tokens_XL[row, chain.base + node] = token
            known_X[row] = known = chain.base + node + 1
            room[row] = max(0, min(chain.num_checked, int(room[row]), int(rows.end_X[row]) - known))
        ids_R = torch.tensor(list(leaving))
        draft = self.method.propose(replace(rows, ids_R=ids_R, known_X=known_X, max_draft_X=room))
        for (row, (token, node)), guesses in zip(leaving.items(), _chains_of(draft), strict=True):
            chain = self._chains[row]
            if guesses:
                chain.others.append(([*chain.tokens[:node], token], guesses))
                self.num_prepared += 1

    def settle(self) -> None:
        """Wait for the thread to finish."""
        job, self._job = self._job, None
        self._is_due.set()
        if job is not None:
            job.result()

    # --- the interface of a drafter ---------------------------------------------------------------

    def observe(self, step: TargetStep) -> None:
        self.settle()
        rows = step.rows
        for row in rows.ids_R.tolist():
            chain, known = self._chains.pop(row, None), int(rows.known_X[row])
            self._ready.pop(row, None)
            if chain is None or not (chain.others or len(chain.tokens) > chain.num_checked):
                continue  # nothing was prepared
            decided = rows.tokens_XL[row, chain.base : known].tolist()
            ready = chain.after(decided)
            if ready:
                self._ready[row] = ready
                self.num_ready += 1
                self.num_other += len(decided) <= chain.num_checked
            if not ready or chain.others:  # the model has processed tokens that were not decided
                self.method.forget([row])
        self.method.observe(step)

    def propose(self, rows: Rows) -> Draft:
        ids: list[int] = rows.ids_R.tolist()
        known, limits = rows.known_X[rows.ids_R].tolist(), rows.max_draft_X[rows.ids_R].tolist()
        chains = [self._ready.pop(row, [])[:limit] for row, limit in zip(ids, limits, strict=True)]
        rest = [place for place, chain in enumerate(chains) if not chain]
        there = [place for place, chain in enumerate(chains) if chain]
        drafts: list[tuple[list[int], Draft]] = []
        if rest:
            asked = self.method.propose(replace(rows, ids_R=rows.ids_R[rest]))
            drafts.append((rest, _copy(asked)))
            for place, chain in zip(rest, _chains_of(asked), strict=True):
                chains[place] = chain
        if there:
            drafts.append((there, Draft.chains([chains[place] for place in there])))
        for row, base, chain in zip(ids, known, chains, strict=True):
            self._chains[row] = Chain(base, chain)
        draft = drafts[0][1] if len(drafts) == 1 else side_by_side(len(ids), drafts)
        return draft.to(self._home)

    def forget(self, rows: list[int]) -> None:
        self.settle()
        self.method.forget(rows)
        for row in rows:
            for held in (self._chains, self._ready, self._seen):
                held.pop(row, None)


def _chains_of(draft: Draft) -> list[list[int]]:
    """The tokens of each row whose draft is a chain; [] for the others."""
    return [
        tokens if parents == list(range(-1, len(parents) - 1)) else []
        for tokens, parents in nodes_of(draft)
    ]


def _copy(draft: Draft) -> Draft:
    """A copy on the host, which the row's next draft does not overwrite."""
    columns = (draft.tokens_RN, draft.parents_RN, draft.num_nodes_R)
    tokens_RN, parents_RN, num_nodes_R = (column.to("cpu", copy=True) for column in columns)
    return Draft(tokens_RN, parents_RN, num_nodes_R, draft.q_RNV, draft.is_sampled_RN)


def load_beside(name: str, options: Options, path: str | None, context: DrafterContext) -> Drafter:
    """The method on the device that the context names for drafts."""
    device, own = context.draft_device, context
    assert device is not None
    if name not in METHODS:
        raise ConfigError(
            f"speculative_device={str(device)!r}: {name} drafts from what the target computes, on "
            f"the target's device; {' and '.join(METHODS)} have a device of their own"
        )
    if device != context.target.device:
        size = context.max_rows, context.vocab_size
        sampling = SamplingState(*size, device)
        context.sampling.copies.append(sampling)
        target = cast("Target", TargetBeside(context.target, device))
        own = replace(context, target=target, device=device, sampling=sampling)
    own = context.beside = replace(own, has_policy=False, draft_device=None)
    method: Drafter = resolve(DRAFTERS, name)(options, path, own)
    model: Any = getattr(method, "model", None)
    if device.type == "cpu" and hasattr(model, "use_own_threads"):
        is_busy = context.target.device.type == "cpu"  # then most cores are the target's
        model.use_own_threads(1 if is_busy else max(1, min(8, num_cores() - 1)))
    found = context.prepares = PreparingDrafter(method, own, context.device)
    return found
