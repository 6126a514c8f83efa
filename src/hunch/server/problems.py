"""What went wrong, in the form an API's clients expect. No paths, no stacks, no internals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

from hunch.errors import (
    CapacityError,
    EngineError,
    GrammarError,
    HunchError,
    QueueFullError,
    RequestError,
)

_SHARED_TYPES = {
    **dict.fromkeys((400, 405, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ERROR_TYPES = _SHARED_TYPES | {
    408: "timeout_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
ANTHROPIC_TYPES = _SHARED_TYPES | {413: "request_too_large", 503: "overloaded_error"}
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # paths whose errors have a form of their own
_TYPE_NAME = re.compile(
    r"body$|\[key\]$|(constrained-)?(str|int|float|bool)$|(list|dict|literal)\["
)
PLAINLY = {  # pydantic's words for these are about its classes
    "model_attributes_type": "an object {...} is needed",
    "model_type": "an object {...} is needed",
    "dict_type": "an object {...} is needed",
    "list_type": "a list [...] is needed",
}
_FIELD = re.compile(r"([a-z][a-z_]+)(: |=|\[| must )")  # at the beginning of an engine's message


class ProblemError(HunchError):
    """An answer with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self, path: str = "") -> dict[str, Any]:
        """The error object of the API that a path belongs to; OpenAI's for all but two."""
        if path.startswith(ANTHROPIC):
            error_type = ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": error_type, "message": self.message}}
        if path.startswith(OLLAMA):
            return {"error": self.message}
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.code == "deadline_exceeded":  # OpenAI's and Anthropic's clients try 408 again
            headers["X-Should-Retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), status_code=self.status, headers=self.headers())


def refusal(name: str, reason: str) -> PydanticCustomError:
    """What is said of a body's field that is known, and not taken."""
    return PydanticCustomError("refused", "{text}", {"text": reason, "field": name})


def faults(
    form: type, statuses: Iterable[int] = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
) -> dict[int | str, dict[str, Any]]:
    """For the document of a path: the form of its answers that are no success."""
    return {status: {"model": form} for status in statuses}


def no_model(name: str, known: Iterable[str]) -> ProblemError:
    message = f"the model {name[:100]!r} does not exist here; this server has: {', '.join(known)}"
    return ProblemError(404, message, code="model_not_found", param="model")


def at_most(param: str, value: int, limit: int, unit: str = "") -> None:
    """400 that names the field, what was given and what is allowed."""
    if value > limit:
        unit = f" {unit}" if unit else ""
        raise ProblemError(
            400,
            f"{param}: {value}{unit} given, this server allows at most {limit}",
            code="limit_exceeded",
            param=param,
        )


def from_error(error: HunchError, *, retry_after: float = 1.0) -> ProblemError:
    """The HTTP form of an error the engine or the text side raised."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, GrammarError):
        return ProblemError(400, str(error), code="invalid_grammar")
    if isinstance(error, RequestError | CapacityError):
        message = str(error)
        code = "context_length_exceeded" if "context" in message else None
        field = _FIELD.match(message)
        return ProblemError(400, message, code=code, param=field and field.group(1))
    if isinstance(error, QueueFullError):
        return ProblemError(429, str(error), code="queue_full", retry_after=retry_after)
    if isinstance(error, EngineError):
        return ProblemError(503, str(error), code="engine_unavailable")
    return ProblemError(500, "the request failed inside the server", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ProblemError:
    """The first few faults pydantic found in a body, without what the client sent."""
    param = None
    first = errors[0]
    if first["type"] == "json_invalid":
        why, place = (first.get("ctx") or {}).get("error", "it cannot be read"), first["loc"][-1]
        return ProblemError(400, f"the body is not JSON: {why}, at character {place}")
    if first["type"] == "missing" and tuple(first["loc"]) == ("body",):
        return ProblemError(400, "the body is missing: send JSON")
    if first["type"] == "model_attributes_type" and tuple(first["loc"]) == ("body",):
        return ProblemError(400, "the body is no JSON object: send {...}")
    if any(error["type"] == "not_text" for error in errors):  # not that it is no string either
        errors = [error for error in errors if error["type"] == "not_text"]
    texts: dict[str, None] = {}
    for error in _telling(errors):
        where = ".".join(_place(error)).encode("utf-8", "replace").decode()[:120]
        param = param or where or None
        fault = PLAINLY.get(error["type"], str(error["msg"]))
        texts[f"{where}: {fault}" if where else fault] = None
    rest = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
    return ProblemError(400, "; ".join(list(texts)[:3]) + rest, param=param)


def _telling(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of a field that takes several types, what is wrong with the one that was given."""
    places = [_place(error) for error in errors]
    are_types = [error["type"].endswith("_type") for error in errors]
    told = [place for place, is_type in zip(places, are_types, strict=True) if not is_type]
    told += [place[:size] for place in places for size in range(len(place))]
    return [
        error
        for error, place, is_type in zip(errors, places, are_types, strict=True)
        if not (is_type and place in told)
    ]


def _place(error: Mapping[str, Any]) -> list[str]:
    """The names and numbers that lead to a fault, without pydantic's names of types."""
    extra = error.get("ctx") or {}
    place = [str(part) for part in error["loc"] if not _TYPE_NAME.match(str(part))]
    return [*place, *([str(extra["field"])] if "field" in extra else ())]
