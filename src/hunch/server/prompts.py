"""What requests bring to be read, as token ids: texts, ids and parts of both, checked."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hunch.errors import ConfigError
from hunch.server.problems import ProblemError
from hunch.server.remote import RemoteEngine
from hunch.server.replicas import Replicas
from hunch.server.schemas import CompletionBody, PredictionBody
from hunch.server.text import Text
from hunch.types import SamplingParams

log = logging.getLogger("hunch")
INLINE_CHARS = 2048  # longer prompts are tokenized beside the event loop

AnyEngine = RemoteEngine | Replicas


class Prompts:
    """Reads prompts for an engine, by its tokenizer."""

    def __init__(self, engine: AnyEngine, text: Text) -> None:
        self.engine = engine
        self.text = text

    async def tokens(self, text: str) -> list[int]:
        """Token ids of a part of a prompt."""
        return await self._encode(text, False) if text else []

    async def encode(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        param: str = "prompt",
        most: int | None = None,
        *,
        keeps_start: bool = False,
    ) -> list[int]:
        """Token ids of a prompt, or a part of it (see `truncated`); ids are checked instead."""
        if isinstance(prompt, str):
            ids = await self._encode(prompt, add_special_tokens, most is None)
        else:
            self.check_ids(prompt, param)
            ids = prompt
        if not ids:
            raise ProblemError(400, f"the {param} is empty", param=param)
        return self.truncated(ids, most, keeps_start=keeps_start)

    async def _encode(
        self, text: str, add_special_tokens: bool, must_fit: bool = True
    ) -> list[int]:
        if len(text) <= INLINE_CHARS:
            return self.text.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.text.encode,
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=self.engine.info.max_len if must_fit else None,
        )

    def truncated(
        self, ids: list[int], most: int | None, *, keeps_start: bool = False
    ) -> list[int]:
        """The prompt's end, or start, where somebody says how much is enough; -1: what fits."""
        if most is None:
            return ids
        if most == 0:
            message = "truncate_prompt_tokens must be -1 (what fits) or 1 and more"
            raise ProblemError(400, message, param="truncate_prompt_tokens")
        most = self.engine.info.max_len - 1 if most == -1 else most
        return ids[:most] if keeps_start else ids[-most:]

    async def with_prediction(
        self, params: SamplingParams, prediction: PredictionBody | None
    ) -> SamplingParams:
        """What the client expects, as token ids: the engine's process has better to do."""
        if prediction is None:
            return params
        ids = await self._encode(prediction.plain(), False)
        return replace(params, prediction=ids[: self.engine.info.max_len])

    def piece(self, token: int) -> str | list[int]:
        """A token's text; its bytes where they are none by themselves."""
        data = self.text.token_bytes(token)
        try:
            return data.decode() or self.text.decode([token], skip_special_tokens=False)
        except UnicodeDecodeError:
            return list(data)

    def check_ids(self, ids: Sequence[int], param: str | None = None) -> None:
        if ids and max(ids) >= self.text.vocab_size:
            message = f"token ids must be below {self.text.vocab_size}, the vocabulary's size"
            raise ProblemError(400, message, param=param)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # one prompt, given as ids
    return list(prompt)


class PromptLog:
    """The prompts a server was asked, on request: `hunch train --resume` learns from them later.

    One JSON line per prompt, with the token ids that were served. Answers are not kept.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.is_open = True
        self._add("")  # a place that cannot be written is said at the start

    def write(self, ids: list[int], text: str) -> None:
        """A full disk ends the log, never a request."""
        if not self.is_open:
            return
        try:
            self._add(json.dumps({"prompt": text, "prompt_ids": ids}) + "\n")
        except ConfigError as error:
            self.is_open = False
            log.warning("%s; no more prompts are kept", error)

    def _add(self, line: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"prompt_log={self.path}: {error.strerror}") from None
