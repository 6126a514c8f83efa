"""A device made of dicts: its model is a hash of the history, and so is its KV.

Every step it reads each row's history back through the row's block table, so a block that is
shared, freed or published at the wrong moment shows at once. It drafts by asking its own model and
lying now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from zlib import crc32

from hunch.types import (
    Capacity,
    DecodedRows,
    DraftTrace,
    GroupInfo,
    Logprob,
    Request,
    RowResult,
    RowStart,
    RowWork,
    StepPlan,
    StepResult,
)

VOCAB = 29
EOS = 0
GROUPS = (GroupInfo(name="target"), GroupInfo(name="ahead", sees_next=True))


def next_token(history: Sequence[int], seed: int, sample: int) -> int:
    """The fake target: decided by the whole history, the seed and the sample alone."""
    return crc32(bytes(history), seed * 7 + sample) * 2654435761 % 2**32 * VOCAB >> 32


def kv_of(tokens: Sequence[int]) -> list[int]:
    """What the slot of each position holds: like real KV, it depends on all tokens up to it."""
    return list(accumulate(tokens, lambda before, token: crc32(bytes([token]), before), initial=1))[
        1:
    ]


def expected_tokens(request: Request) -> list[int]:
    """What a request must say, whatever the engine does."""
    history, said = list(request.prompt_ids), []
    while True:
        token = next_token(history, request.seed, request.sample_index)
        history.append(token)
        said.append(token)
        if is_end(request, said):
            return said


def is_end(request: Request, said: Sequence[int]) -> str | None:
    if said[-1] in request.stop_ids and len(said) >= request.params.min_tokens:
        return "stop"
    return "length" if len(said) >= request.max_tokens else None


@dataclass
class Row:
    """What the device knows of one request."""

    request: Request
    tokens: list[int]
    computed: list[int]
    blocks: list[int]
    has_hole: bool
    draft: list[tuple[int, int]] = field(default_factory=list)  # (token, parent)
    finish: str | None = None


class FakeRunner:
    """Runs each plan when it is submitted; hands the results out in order."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_rows: int = 8,
        max_len: int = 200,
        max_nodes: int = 0,
        depth: int = 0,
        width: int = 1,
        is_brief: bool = False,
        max_draft_rows: int | None = None,
        max_prompt: int | None = None,
        window: int | None = None,
        num_snapshots: int | None = None,
        num_groups: int = 2,
        is_late: bool = False,  # no result is there before it is collected
        loses: int = 0,  # one row in so many loses its state in a step; 0: none
    ) -> None:
        self.capacity = Capacity(
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_len=max_len,
            max_nodes=max_nodes,
            max_draft_rows=max_draft_rows,
            max_prompt=max_prompt,
            writes_bonus_kv=True,
            groups=GROUPS[:num_groups],
            window=window,
            has_recurrent_states=num_snapshots is not None,
            num_snapshots=num_snapshots or 0,
        )
        self.states: dict[int, int] = {}  # those that were kept: what the last position held
        self.loses, self.num_works, self.num_lost = loses, 0, 0
        self.depth, self.width, self.is_brief, self.is_late = depth, width, is_brief, is_late
        self.rows: dict[int, Row] = {}
        self.memory: list[dict[int, int]] = [{} for _ in GROUPS]  # slot to content
        self.num_shared = 0  # tokens taken from the prefix cache
        self.max_plan_tokens = 0
        self.is_closed = False
        self._results: deque[tuple[StepResult, set[int]]] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._results) <= self.depth
        assert plan.work, "an empty step"
        self.max_plan_tokens = max(self.max_plan_tokens, plan.num_tokens)
        for row in plan.freed_rows:
            del self.rows[row]
        for start in plan.starts:
            self._start(start)
        for row, blocks in plan.blocks.items():
            self._check_new(blocks)
            self.rows[row].blocks += blocks
        assert len({work.row for work in plan.work}) == len(plan.work)
        named = {block for work in plan.work for block in self._seen(self.rows[work.row])}
        results = [self._work(work) for work in plan.work]
        result = StepResult(
            id=plan.id, rows=results, target_seconds=2.0, draft_seconds=0.5, plain_seconds=1.0
        )
        if self.is_brief:
            self._shorten(result)
        self._results.append((result, named))

    def _shorten(self, result: StepResult) -> None:
        """Put what rows that decode and go on got into columns; all of them, or what is needed."""
        rows, is_decoding = result.rows, [self._is_decoding(row) for row in result.rows]
        is_all = result.id % 2 == 0
        result.decoded = DecodedRows(
            tokens=[
                row.tokens if is_in else [] for row, is_in in zip(rows, is_decoding, strict=True)
            ]
        )
        result.rows = [row for row, is_in in zip(rows, is_decoding, strict=True) if not is_in]
        if is_all or any(row.num_checked for row in rows):
            pairs = zip(rows, is_decoding, strict=True)
            result.decoded.num_checked = [row.num_checked * is_in for row, is_in in pairs]
            result.decoded.methods = [row.method for row in rows]
        result.decoded.num_waiting = [row.num_waiting for row in rows]
        if is_all or len(self.capacity.groups) > 1:
            result.decoded.computed = [list(row.computed) for row in rows]
        if is_all or any(row.logprobs for row in rows):
            result.decoded.logprobs = [row.logprobs for row in rows]

    def _is_decoding(self, result: RowResult) -> bool:
        """Whether the row had a token before, and goes on with more and nothing else."""
        row = self.rows[result.row]
        num_before = len(row.tokens) - len(row.request.prompt_ids) - len(result.tokens)
        is_chain = result.num_levels in (None, result.num_checked)
        is_more = result.finish or result.trace or result.is_lost or not is_chain
        return bool(num_before and result.tokens and result.num_processed == 1 and not is_more)

    def collect(self) -> StepResult:
        return self._results.popleft()[0]

    def has_result(self) -> bool:
        return not self.is_late

    def reset(self) -> None:
        """Keeps nothing of requests that left."""

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def _start(self, start: RowStart) -> None:
        assert start.row not in self.rows
        size = self.capacity.block_size
        num_hit, num_ahead = start.num_computed[0], start.num_computed[-1]
        assert num_ahead <= num_hit < len(start.tokens)
        assert num_hit % size == 0
        self._check_new(start.blocks[num_hit // size :])
        self.num_shared += num_hit
        if self.capacity.has_recurrent_states:
            assert (num_hit > 0) is (start.snapshot >= 0)
            assert not num_hit or self.states[start.snapshot] == kv_of(start.tokens)[num_hit - 1]
        self.rows[start.row] = row = Row(
            start.request,
            start.tokens,
            list(start.num_computed),
            start.blocks,
            has_hole=len(start.num_computed) == 1
            or num_ahead < num_hit
            or start.request.params.speculation.mode == "off",
        )
        self._check_history(row)

    def _check_new(self, blocks: Sequence[int]) -> None:
        """Blocks given as new: nobody else's, nor named by a step that is not collected."""
        assert len(set(blocks)) == len(blocks)
        assert all(0 <= block < self.capacity.num_blocks for block in blocks)
        for row in self.rows.values():
            assert not set(blocks) & set(self._seen(row))
        for _, named in self._results:
            assert not set(blocks) & named

    def _slot(self, row: Row, position: int) -> int:
        size = self.capacity.block_size
        return row.blocks[position // size] * size + position % size

    def _first(self, row: Row) -> int:
        """The first position that what is computed next can see."""
        window = self.capacity.window
        return 0 if window is None else max(0, min(row.computed) - window + 1)

    def _seen(self, row: Row) -> list[int]:
        return row.blocks[self._first(row) // self.capacity.block_size :]

    def _check_history(self, row: Row) -> None:
        kv, first = kv_of(row.tokens), self._first(row)
        for position in range(first, row.computed[0]):
            assert self.memory[0][self._slot(row, position)] == kv[position]
        for position in range(first, *row.computed[1:]) if len(row.computed) > 1 else ():
            assert self.memory[1][self._slot(row, position)] == kv[position + 1]

    def _work(self, work: RowWork) -> RowResult:
        row = self.rows[work.row]
        result = RowResult(row=work.row)
        if row.finish is not None:
            return result
        self._check_history(row)
        self.num_works += 1
        is_due = self.loses > 0 and self.num_works % self.loses == 0
        if is_due and row.computed[0] and not work.runs_alone:
            self.num_lost, row.finish = self.num_lost + 1, "lost"
            return RowResult(row=work.row, is_lost=True)
        first, num_known = row.computed[0], len(row.tokens)
        result.num_processed = min(work.num_tokens, num_known - first)
        assert result.num_processed > 0
        kv = kv_of(row.tokens)
        for position in range(first, first + result.num_processed):
            self.memory[0][self._slot(row, position)] = kv[position]
        row.computed[0] += result.num_processed
        if work.snapshot >= 0:
            assert work.snapshot < self.capacity.num_snapshots
            assert row.computed[0] < num_known, "nodes would be part of it"
            self.states[work.snapshot] = kv[row.computed[0] - 1]
        scored = row.request.prompt_ids[first + 1 : row.computed[0] + 1]
        if row.request.params.prompt_logprobs is not None:
            result.prompt_logprobs = [{token: Logprob(logprob=-1.0 * token)} for token in scored]
        if row.computed[0] == num_known:
            self._decide(row, row.draft[: work.num_nodes], result)
            row.draft = []
            if row.finish is None:
                row.draft = self._propose(row, work.max_draft)
        else:
            assert not row.draft
        self._write_ahead(row)
        if result.tokens:  # a drafter's pass within the step ends with it
            self._slot(row, len(row.tokens) - 1)
        result.computed, result.num_waiting = tuple(row.computed), len(row.draft)
        return result

    def _decide(self, row: Row, draft: list[tuple[int, int]], result: RowResult) -> None:
        request, num_known = row.request, len(row.tokens)
        for place, (token, _) in enumerate(draft):
            self.memory[0][self._slot(row, num_known + place)] = token  # rejected until accepted
        history, tokens, path, node = list(row.tokens), [], [], -1
        while node is not None:
            token = next_token(history, request.seed, request.sample_index)
            history.append(token)
            tokens.append(token)
            found = [i for i, guess in enumerate(draft) if guess == (token, node)]
            node = found[0] if found else None
            path += found
        result.num_checked, result.num_accepted = len(draft), len(path)
        result.num_levels = _depth(draft)
        if request.params.speculation.trace:
            result.trace = DraftTrace(
                tokens=[token for token, _ in draft],
                parents=[parent for _, parent in draft],
                accepted=path,
            )
        for token in tokens:
            row.tokens.append(token)
            result.tokens.append(token)
            row.finish = result.finish = is_end(request, row.tokens[len(request.prompt_ids) :])
            if row.finish:
                break
        num_kept = min(len(path), len(result.tokens))
        kv = kv_of(row.tokens)
        for position in range(num_known, num_known + num_kept):
            self.memory[0][self._slot(row, position)] = kv[position]
        row.computed[0] += num_kept
        if request.params.logprobs is not None:
            result.logprobs = [{token: Logprob(logprob=-0.5)} for token in result.tokens]

    def _propose(self, row: Row, max_draft: int) -> list[tuple[int, int]]:
        request = row.request
        max_draft = min(max_draft, row.request.max_tokens + len(request.prompt_ids))
        max_draft = min(max_draft, self._num_wanted(row) - 1)
        if max_draft > 0:  # a drafter writes KV as it goes
            self._slot(row, len(row.tokens) + max_draft - 1)
        draft: list[tuple[int, int]] = []
        history, parent = list(row.tokens), -1
        while len(draft) < max_draft:
            token = next_token(history, request.seed, request.sample_index)
            noise = crc32(bytes([*history, 1]))
            guesses = [(token + offset) % VOCAB for offset in range(self.width)]
            if noise % 4 == 0:
                guesses = [(guess + 1) % VOCAB for guess in guesses]
            if noise % 3 == 0:
                guesses = guesses[::-1]
            level = [(guess, parent) for guess in guesses][: max_draft - len(draft)]
            if (token, parent) not in level:
                return draft + level
            parent = len(draft) + level.index((token, parent))
            draft += level
            history.append(token)
            if noise % 7 == 0:
                break
        return draft

    def _num_wanted(self, row: Row) -> int:
        return len(row.request.prompt_ids) + row.request.max_tokens - len(row.tokens)

    def _write_ahead(self, row: Row) -> None:
        if row.has_hole:
            return
        kv = kv_of(row.tokens)
        for position in range(row.computed[1], min(row.computed[0], len(row.tokens) - 1)):
            self.memory[1][self._slot(row, position)] = kv[position + 1]
            row.computed[1] = position + 1


def _depth(draft: list[tuple[int, int]]) -> int:
    depths: list[int] = []
    for _, parent in draft:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


class FakeCodec:
    """One letter per token; token 0 ends the text and shows as nothing unless asked to."""

    vocab_size = VOCAB
    eos_ids = (EOS,)
    letters = "$abcdefghijklmnopqrstuvwxyz .é"[:VOCAB]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.letters[i] for i in ids if i != EOS or not skip_special_tokens)

    def token_text(self, token: int) -> str:
        return self.letters[token]

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> FakeDetokenizer:
        return FakeDetokenizer(self, skip_special_tokens)

    def stop_matcher(self, stops: Sequence[str], include: bool) -> FakeMatcher:
        return FakeMatcher(stops, include)


class FakeDetokenizer:
    """Keeps every letter back until the next one comes, as one does inside a character."""

    def __init__(self, codec: FakeCodec, skip_special_tokens: bool) -> None:
        self.codec, self.skip = codec, skip_special_tokens
        self.held = ""

    def push(self, token: int) -> str:
        ready, self.held = self.held, self.codec.decode([token], skip_special_tokens=self.skip)
        if self.held not in "aeiou":
            ready, self.held = ready + self.held, ""
        return ready

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


class FakeMatcher:
    """Holds back a longest stop string's worth of text."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.stops, self.include, self.held = stops, include, ""

    def feed(self, text: str) -> tuple[str, str | None]:
        self.held += text
        found = [(self.held.index(stop), stop) for stop in self.stops if stop in self.held]
        if found:
            place, stop = min(found)
            return self.held[: place + len(stop) * self.include], stop
        keep = min(max(map(len, self.stops)) - 1, len(self.held))
        safe, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return safe, None

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held
