"""Beam search over whole answers, as vLLM's `LLM.beam_search` does it: the likeliest beams go on.

Each token of each beam is a request of its own, which finds its beginning in the prefix cache. So
there is nothing to draft. The cache has whole blocks: what lies after the last of them is computed
again, half a block for each token on average. Where speed counts, sampling several answers is the
better way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hunch.errors import RequestError
from hunch.prompts import Prompt, read_prompt
from hunch.types import Logprob, RequestOutput, SamplingParams, TextCodec

Generate = Callable[[list[list[int]], list[SamplingParams]], list[RequestOutput]]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search. Names and meanings are vLLM's."""

    beam_width: int  # beams that go on, and answers that come back
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # beams are compared by the model's own scores, whatever this is
    length_penalty: float = 1.0  # scores are divided by the length to this power
    include_stop_str_in_output: bool = False  # the end-of-text token stays in `tokens`

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name}={value!r} must be a whole number, 1 or more")


@dataclass(kw_only=True, slots=True)
class BeamSearchSequence:
    """A beam: the prompt's tokens and those after it."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None  # of all tokens, the prompt's too
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def go_on(self, token: int, scores: dict[int, Logprob], **end: Any) -> BeamSearchSequence:
        return BeamSearchSequence(
            tokens=[*self.tokens, token],
            logprobs=[*self.logprobs, scores],
            cum_logprob=self.cum_logprob + scores[token].logprob,
            **end,
        )


@dataclass(kw_only=True, slots=True)
class BeamSearchOutput:
    """A prompt's beams, the best first."""

    sequences: list[BeamSearchSequence]


class _Search:
    """The beams of one prompt."""

    def __init__(self, ids: list[int], ends: Sequence[int], params: BeamSearchParams) -> None:
        self.params, self.ends = params, frozenset(() if params.ignore_eos else ends)
        self.beams, self.done = [BeamSearchSequence(tokens=ids)], list[BeamSearchSequence]()

    def score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self.ends)
        return beam.cum_logprob / float(max(length, 1) ** self.params.length_penalty)

    def best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self.score, reverse=True)[: self.params.beam_width]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """One token more for every beam, of those that came for each."""
        found: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            assert output.outputs[0].logprobs is not None
            scores = output.outputs[0].logprobs[0]
            for token in scores:
                if token in self.ends:
                    end = {"finish_reason": "stop", "stop_reason": token}
                    self.done.append(beam.go_on(token, scores, **end))
                else:
                    found.append(beam.go_on(token, scores))
        self.beams = self.best(found)

    def finish(self, codec: TextCodec) -> BeamSearchOutput:
        """The best of all beams, with their texts."""
        for beam in self.beams:
            beam.finish_reason = "length"
        best = self.best(self.done + self.beams)
        for beam in best:
            if beam.finish_reason == "stop" and not self.params.include_stop_str_in_output:
                beam.tokens = beam.tokens[:-1]
            beam.text = codec.decode(beam.tokens)
        return BeamSearchOutput(sequences=best)


def search_beams(
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    codec: TextCodec,
    max_len: int,
    generate: Generate,
) -> list[BeamSearchOutput]:
    """`generate` gives one token, with its scores, after each of these lists of tokens."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"beam_search: {type(params).__name__} given, not BeamSearchParams")
    next_one = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=2 * params.beam_width
    )
    each = [_Search(read_prompt(prompt, codec)[1], codec.eos_ids, params) for prompt in prompts]
    for _ in range(params.max_tokens):
        running = [s for s in each if s.beams and len(s.beams[0].tokens) < max_len]
        if not running:
            break
        so_far = [beam.tokens for search in running for beam in search.beams]
        outputs = iter(generate(so_far, [next_one] * len(so_far)))
        for search in running:
            search.advance([next(outputs) for _ in search.beams])
    return [search.finish(codec) for search in each]
