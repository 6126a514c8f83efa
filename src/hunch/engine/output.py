"""The output of one sequence so far: text, stop strings, logprobs, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

from hunch.engine.stats import Tally
from hunch.pooling import POOL_SCALE
from hunch.types import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    Request,
    RowResult,
    StopMatcher,
    TextCodec,
)


class SequenceOutput:
    """Grows by the committed tokens. `token_ids` keeps the token that completed a stop string; the
    text is cut before the string (or after it, if the request includes it)."""

    def __init__(
        self,
        request: Request,
        codec: TextCodec,
        tally: Tally,
        texts: dict[int, str] | None = None,  # of single tokens; requests share them
    ) -> None:
        params = request.params
        self.request = request
        self.text = ""  # of the tokens read
        self._num_read = 0
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.trace: list[DraftTrace] | None = [] if params.speculation.trace else None
        self.tally = tally
        self._codec, self._texts = codec, {} if texts is None else texts
        self._detokenizer = codec.detokenizer(
            request.prompt_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher: StopMatcher | None = None
        if params.stop:
            self._matcher = codec.stop_matcher(
                tuple(params.stop), params.include_stop_str_in_output
            )
        if params.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first token
        self._pooled: Sequence[float] | None = None  # states of the prompt: their sum, or the last
        self._completion: CompletionOutput | None = None  # None: more has come since

    @property
    def max_cached(self) -> int | None:
        """Prompt tokens that may come from the cache, as nothing is asked of them; None: all."""
        if self.request.params.pooling is not None:
            return 0
        return None if self.prompt_logprobs is None else len(self.prompt_logprobs) - 1

    @property
    def embedding(self) -> list[float] | None:
        """The embedding of the prompt, once all of it is computed."""
        pooled, count = self._pooled, len(self.request.prompt_ids)
        if pooled is None:
            return None
        if self.request.params.pooling == "last":
            return list(pooled)
        return [total / POOL_SCALE / count for total in pooled]

    def push(self, row: RowResult, first_processed: int) -> bool:
        """Apply a step's result; True: the sequence is over, and the row's tokens end with it."""
        if row.pooled is not None:
            so_far = self._pooled if first_processed and self._pooled else [0] * len(row.pooled)
            self._pooled = [a + b for a, b in zip(so_far, row.pooled, strict=True)]
        if row.prompt_logprobs:
            self._add_prompt_logprobs(row.prompt_logprobs, first_processed + 1)
        if not row.tokens and row.finish is None:
            return False
        if self.trace is not None and row.trace is not None:
            self.trace.append(row.trace)
        is_over = row.finish is not None
        if row.finish is None:
            is_over = self.push_tokens(row.tokens, row.logprobs)
        else:
            self._completion = None
            self._read()
            if not self._read_each(row.tokens, row.logprobs, is_stopped=row.finish == "stop"):
                self._end(row.finish)
                self.stop_reason = row.problem or self.stop_reason
        row.num_accepted = min(row.num_accepted, max(len(row.tokens) - 1, 0))
        if row.trace is not None:
            del row.trace.accepted[row.num_accepted :]
        return is_over

    def push_tokens(
        self, tokens: list[int], logprobs: list[dict[int, Logprob]] | None = None
    ) -> bool:
        """`push` for a row that decodes and goes on."""
        self._completion = None
        if self._matcher is not None:  # a stop string may end it after any token
            return self._read_each(tokens, logprobs)
        self.token_ids += tokens  # their text is made when it is asked for
        if self.logprobs is not None and logprobs is not None:
            for scores, token in zip(logprobs, tokens, strict=True):
                self._add_logprobs(scores, token)
        return False

    def _read_each(
        self,
        tokens: list[int],
        logprobs: list[dict[int, Logprob]] | None,
        *,
        is_stopped: bool = False,  # by the last of the tokens
    ) -> bool:
        """Add tokens one by one, as any of them may end the answer; True: it is over.

        Tokens after the one that ends it are taken out of the list.
        """
        last = len(tokens) - 1
        for place, token in enumerate(tokens):
            self.token_ids.append(token)
            if self.logprobs is not None and logprobs is not None:
                self._add_logprobs(logprobs[place], token)
            if is_stopped and place == last:
                self._end_at_token(token)
                return True
            piece = self._detokenizer.push(token)
            if piece and self._add_text(piece):
                del tokens[place + 1 :]
                return True
        return False

    def _read(self) -> None:
        """Add the text of tokens since the last call, where no stop string can end it."""
        if self._matcher is None and self._num_read < len(self.token_ids):
            self.text += self._detokenizer.push_all(self.token_ids[self._num_read :])
            self._num_read = len(self.token_ids)

    def abort(self) -> None:
        self._completion = None
        self._read()
        self.text += self._matcher.flush() if self._matcher is not None else ""
        self.finish_reason = "abort"

    def _add_text(self, piece: str) -> bool:
        # Text of the first min_tokens tokens cannot end the answer, so it is not searched.
        if self._matcher is None or len(self.token_ids) <= self.request.params.min_tokens:
            self.text += piece
            return False
        safe, matched = self._matcher.feed(piece)
        self.text += safe
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        return True

    def _end_at_token(self, token: int) -> None:
        """A stop token ends the answer; its own text is part of it only on request."""
        if self.request.params.include_stop_str_in_output:
            piece = self._detokenizer.push(token)
            if piece and self._add_text(piece):
                return
        self.stop_reason = None if token in self.request.eos_ids else token
        self._end("stop")

    def _end(self, reason: str) -> None:
        tail = self._detokenizer.flush()
        if tail and self._add_text(tail):
            return
        if self._matcher is not None:
            self.text += self._matcher.flush()
        self.finish_reason = reason

    def _add_logprobs(self, scores: dict[int, Logprob], token: int) -> None:
        assert self.logprobs is not None
        assert self.cumulative_logprob is not None
        self.logprobs.append(self._with_text(scores))
        self.cumulative_logprob += scores[token].logprob

    def _add_prompt_logprobs(self, scores: list[dict[int, Logprob]], first: int) -> None:
        """Add scores of the tokens from position `first`; after a restart some come again."""
        assert self.prompt_logprobs is not None
        num_skipped = len(self.prompt_logprobs) - first
        assert num_skipped >= 0
        room = len(self.request.prompt_ids) - len(self.prompt_logprobs)
        for score in scores[num_skipped : num_skipped + room]:
            self.prompt_logprobs.append(self._with_text(score))
            self._completion = None

    def _with_text(self, scores: dict[int, Logprob]) -> dict[int, Logprob]:
        for token, score in scores.items():
            text = self._texts.get(token)
            if text is None:
                text = self._codec.token_text(token)
                self._texts[token] = text
            score.decoded_token = text
        return scores

    def completion(self) -> CompletionOutput:
        """Everything up to now, as a value that later steps do not change."""
        if self._completion is None:
            if self.finish_reason is None:
                self._read()
            self._completion = CompletionOutput(
                index=self.request.sample_index,
                text=self.text,
                token_ids=self.token_ids.copy(),
                cumulative_logprob=self.cumulative_logprob,
                logprobs=None if self.logprobs is None else self.logprobs.copy(),
                finish_reason=self.finish_reason,
                stop_reason=self.stop_reason,
                seed=self.request.seed,
                stats=self.tally.stats() if self.finish_reason else {},
                trace=None if self.trace is None else self.trace.copy(),
            )
        return self._completion
