"""llama.cpp's own paths, for its clients and editors: /completion, /infill, /props, /slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from hunch.server.answers import OutputEvents, ranked, token_text
from hunch.server.cursor import Delta
from hunch.server.events import checked
from hunch.server.middle import middle_of
from hunch.server.problems import ProblemError
from hunch.server.schemas import (
    MAX_COUNT,
    Body,
    CompletionBody,
    Limit,
    Many,
    SamplingBody,
    Some,
    TemplateBody,
    TokenId,
)
from hunch.server.service import Service
from hunch.server.summary import Json
from hunch.server.text import Text
from hunch.types import CompletionOutput, Logprob, RequestOutput

SPECULATIVE = "speculative.n_max"  # most nodes of a draft; its other settings only save time


class ExtraFile(Body):
    filename: str = "file"
    text: str


class NativeOptions(SamplingBody):
    """What /completion and /infill have in common. The order of samplers is hunch's own."""

    max_tokens: Limit | None = -1
    n_probs: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    return_tokens: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {**given, "grammar": given.get("grammar") or None}
        given.pop("reasoning_format", None)  # of chats
        if given.get("repeat_penalty") in (None, 1):
            given.pop("repeat_last_n", None)
        if isinstance(given.get("logit_bias"), list):
            given["logit_bias"] = _biases(given["logit_bias"])
        if "speculation" not in given and SPECULATIVE in given:
            given["speculation"] = {"max_nodes": given[SPECULATIVE]}
        return {name: value for name, value in given.items() if not name.startswith("speculative.")}


class NativeBody(NativeOptions):
    """POST /completion. A prompt is text, token ids or both in turn; several are several prompts.

    An object is a text, and what llama.cpp shows a model beside it.
    """

    prompt: str | Some[str | TokenId | Some[str | TokenId]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _texts(cls, given: Any) -> Any:
        if isinstance(given, list):
            return [_text_of(part) for part in given]
        return _text_of(given)


def _text_of(part: Any) -> Any:
    if not isinstance(part, dict) or "prompt_string" not in part:
        return part
    if part.get("multimodal_data"):
        raise PydanticCustomError("not_text", "multimodal_data: the server takes text alone")
    return part["prompt_string"]


class InfillBody(NativeOptions):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[Many[ExtraFile], Field(max_length=256)] | None = None
    prompt: str | None = None  # goes after the prefix


def _biases(pairs: list[Any]) -> dict[str, Any]:
    """[[token, bias]] as OpenAI writes it; a bias of false forbids the token."""
    found: dict[str, Any] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ProblemError(400, "logit_bias: a list of [token, bias] is needed")
        if isinstance(pair[0], str):
            message = f"logit_bias: {pair[0]!r:.40} is no token id; POST /tokenize gives a text's"
            raise ProblemError(400, message, param="logit_bias")
        found[str(pair[0])] = -100 if pair[1] is False else pair[1]
    return found


def add_llamacpp(app: FastAPI, service: Service) -> None:
    _add_about(app, service)

    @app.post("/infill", response_class=Response)
    async def infill(body: InfillBody, request: Request) -> Response:
        marks = middle_of(service.text)
        prefix: list[int] = []
        for extra in body.input_extra or ():
            text = f"{extra.filename}\n{extra.text}\n"
            prefix += [marks.file] if marks.file is not None else []
            prefix += await service.tokens(text)
        prefix += await service.tokens(body.input_prefix + (body.prompt or ""))
        suffix = await service.tokens(body.input_suffix)
        prompt = marks.prompt(service.text, prefix, suffix)
        ends = [*(body.stop_token_ids or ()), *marks.ends]
        return await _answer(service, body, request, prompt, stop_token_ids=ends)

    @app.post("/completions", response_class=Response, include_in_schema=False)
    @app.post("/completion", response_class=Response)
    async def completion(body: NativeBody, request: Request) -> Response:
        given = body.prompt
        is_many = isinstance(given, list) and all(isinstance(part, str | list) for part in given)
        prompts = [await _mixed(service, one) for one in (given if is_many else [given])]
        return await _answer(service, body, request, prompts, is_many=is_many)


async def _answer(
    service: Service,
    body: NativeOptions,
    request: Request,
    prompt: Any,
    *,
    is_many: bool = False,
    **more: Any,
) -> Response:
    shared = set(SamplingBody.model_fields)
    fields = body.model_dump(exclude_unset=True, by_alias=True, include=shared)
    fields |= {"max_tokens": body.max_tokens, "logprobs": body.n_probs or None, "prompt": prompt}
    shape = NativeShape(
        model=body.model or service.settings.name,
        text=service.text,
        num_probs=body.n_probs,
        has_tokens=body.return_tokens or body.stream,
        is_many=is_many or body.n > 1,
        num_answers=body.n,
    )
    return await service.complete(
        checked(CompletionBody, {**fields, **more}), request, lambda: shape
    )


def _add_about(app: FastAPI, service: Service) -> None:
    """What is served, and how busy it is."""

    @app.get("/slots")
    async def slots(fail_on_no_slot: int = 0) -> list[dict[str, Any]]:
        """Which rows are taken; nothing of what is written in them."""
        info, stats = service.engine.info, service.engine.stats()
        num_running = stats.get("num_running") or 0
        if fail_on_no_slot and num_running >= info.max_rows:
            raise ProblemError(503, "no slot is free", code="slots_busy")
        return [
            {
                "id": row,
                "n_ctx": info.max_len,
                "speculative": bool(set(info.methods) - {"off"}),
                "is_processing": row < num_running,
            }
            for row in range(info.max_rows)
        ]

    @app.get("/props")
    async def props() -> dict[str, Any]:
        """What is served, as llama.cpp's server says it."""
        info = service.engine.info
        return {
            "default_generation_settings": {
                "n_ctx": info.max_len,
                "params": dict(service.defaults),
            },
            "total_slots": info.max_rows,
            "model_path": service.settings.name,
            "model_alias": service.settings.name,
            "chat_template": service.chat_template or service.text.chat_template or "",
            "modalities": {"vision": False, "audio": False},
            "is_sleeping": False,
            "build_info": f"hunch {service.settings.version}",
            "tool_call_parser": service.chat_format.tool_parser,
            "reasoning_parser": service.chat_format.reasoning_parser,
        }

    @app.post("/apply-template")
    async def apply_template(body: TemplateBody) -> dict[str, str]:
        """The prompt a chat would be answered from, as text."""
        ids = await service.chat_ids(body.chat())
        return {"prompt": service.text.decode(ids, skip_special_tokens=False)}


async def _mixed(service: Service, prompt: str | int | list[Any]) -> list[int]:
    """Token ids of a prompt of texts and ids; a text at the beginning has its special tokens."""
    parts = prompt if isinstance(prompt, list) else [prompt]
    ids: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            ids += await service.encode(part) if not number else await service.tokens(part)
        else:
            ids.append(part)
    return ids


@dataclass(kw_only=True)
class NativeShape(OutputEvents):
    """`content`, whole or piece by piece; of several answers a list, and events name theirs."""

    model: str = ""
    text: Text | None = None  # for scores
    num_probs: int = 0
    has_tokens: bool = False
    is_many: bool = False
    last = b""

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        found: list[Json] = []
        for output in outputs:
            for choice in output.outputs:
                told = {**self._ending(len(found), output, choice), "content": choice.text}
                if self.has_tokens:
                    told["tokens"] = choice.token_ids
                told |= self._scored(choice.token_ids, choice.logprobs)
                found.append(told)
        return found if self.is_many else found[0]

    def chunks(self, delta: Delta) -> list[Json]:
        told: Json = {"index": delta.index, "content": delta.text, "stop": False}
        told |= {"tokens": delta.token_ids, **self._scored(delta.token_ids, delta.logprobs)}
        found: list[Json] = [told] if delta.text else []
        if delta.finish_reason is not None:
            output = self._outputs[delta.index]
            choice = output.outputs[delta.index % self.num_answers]
            ending = self._ending(delta.index, output, choice)
            found.append({**ending, "content": "", "tokens": []})
        return found

    def _ending(self, index: int, output: RequestOutput, choice: CompletionOutput) -> Json:
        num_cached, reason = output.num_cached_tokens, choice.stop_reason
        is_word = isinstance(reason, str)
        stop_type = "limit" if choice.finish_reason == "length" else "word" if is_word else "eos"
        return {
            "index": index,
            "stop": True,
            "model": self.model,
            "stop_type": stop_type,
            "stopping_word": reason if is_word else "",
            "truncated": False,
            "tokens_predicted": len(choice.token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": num_cached,
            "generation_settings": {"seed": choice.seed},
            "timings": _timings(len(output.prompt_token_ids) - num_cached, choice),
        }

    def _scored(self, ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]] | None) -> Json:
        if not self.num_probs or entries is None or self.text is None:
            return {}
        text = self.text

        def one(token: int, score: Logprob | None) -> Json:
            told: Json = {"id": token, "token": token_text(text, token, score)}
            told["bytes"] = list(text.token_bytes(token))
            return told | {"logprob": max(score.logprob, -9999.0) if score is not None else None}

        found = []
        for token, entry in zip(ids, entries, strict=False):
            told = one(token, entry.get(token))
            found.append({**told, "top_logprobs": [one(*p) for p in ranked(entry, self.num_probs)]})
        return {"completion_probabilities": found}


def _timings(num_read: int, choice: CompletionOutput) -> Json:
    """How long reading and writing took, and how drafting went."""
    stats, num_tokens = choice.stats, len(choice.token_ids)
    speed = stats.get("tokens_per_second") or 0.0
    waited = stats.get("first_token_seconds") or 0.0
    read = max(0.0, waited - (stats.get("queue_seconds") or 0.0))
    wrote = max(0.0, num_tokens / speed - read) if speed else 0.0
    return {
        "prompt_n": num_read,
        "prompt_ms": 1000 * read,
        "prompt_per_second": num_read / read if read else 0.0,
        "predicted_n": num_tokens,
        "predicted_ms": 1000 * wrote,
        "predicted_per_second": (num_tokens - 1) / wrote if wrote else 0.0,
        "draft_n": stats.get("drafted") or 0,
        "draft_n_accepted": stats.get("accepted") or 0,
    }
