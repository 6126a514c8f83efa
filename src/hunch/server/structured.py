"""What a body says about the form of its answer: OpenAI's response_format, vLLM's names."""

from __future__ import annotations

import json
from typing import Any

from hunch.server.problems import ProblemError, at_most
from hunch.server.schemas import ChatBody, ResponseFormat, SamplingBody
from hunch.server.settings import Limits
from hunch.types import StructuredOutput

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def structured_output(body: SamplingBody, limits: Limits) -> StructuredOutput | None:
    """The one form the body asks for, if it does, within the server's limits."""
    asked: dict[str, dict[str, Any]] = {
        name: {name.removeprefix("guided_"): getattr(body, name)}
        for name in GUIDED
        if getattr(body, name) is not None
    }
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs.model_dump(
            by_alias=True, exclude_none=True
        )
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = _from_format(body.response_format)
    if not asked:
        return None
    if len(asked) > 1:
        raise ProblemError(400, f"give only one of {', '.join(asked)}", param=min(asked))
    ((param, values),) = asked.items()
    for name in values.keys() & {"json", "structural_tag"}:
        values[name] = _text(param, values[name])
    at_most(param, _size(values), limits.max_grammar_bytes, "bytes")
    return StructuredOutput(**values)


def form_field(body: SamplingBody) -> str | None:
    """The field that says what the answer must look like."""
    names = ("structured_outputs", "response_format", *GUIDED, "tools")
    return next((name for name in names if getattr(body, name, None) is not None), None)


def check_tools(body: ChatBody, limits: Limits) -> None:
    """Refuse more tools, or larger ones, than the operator allows."""
    tools = body.tools or ()
    at_most("tools", len(tools), limits.max_tools, "tools")
    try:
        size = sum(len(json.dumps(tool.function.parameters)) for tool in tools)
        size += len(json.dumps(body.chat_template_kwargs))
    except RecursionError:
        raise ProblemError(400, "tools: nested too deeply", param="tools") from None
    at_most("tools", size, limits.max_tools_bytes, "bytes")


def _from_format(asked: ResponseFormat) -> dict[str, Any]:
    if asked.schema_ is not None and asked.json_schema is None and asked.type != "structural_tag":
        return {"json": asked.schema_}
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.type == "structural_tag":
        names = {"format", "structures", "triggers"}
        return {"structural_tag": asked.model_dump(include=names, exclude_none=True)}
    if asked.json_schema is None:
        param = "response_format.json_schema"
        raise ProblemError(400, "response_format: json_schema is missing", param=param)
    return {"json": asked.json_schema.schema_}


def _text(param: str, schema: Any) -> str:
    """A schema as text, which nothing on the way to the engine needs to look into."""
    try:
        return schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        raise ProblemError(400, f"{param}: nested too deeply", param=param) from None


def _size(values: dict[str, Any]) -> int:
    texts = [text for value in values.values() for text in _texts(value)]
    return sum(len(text.encode()) for text in texts)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []
