"""The bodies clients send. Unknown fields and wrong types are refused, never dropped.

A list or an object is given up at its first wrong item: millions of errors would cost more than
anything a right body could ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import VERSION, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from hunch.chat.turn import Wish
from hunch.server.other_names import as_ours
from hunch.server.problems import faults, refusal
from hunch.types import MAX_SEED

MAX_COUNT = 2**31 - 1
MAX_IDS = 1024 * 1024

# pydantic gives objects up at the first wrong item from 2.14 on; in older ones each has its error,
# which costs at most what the limit on a body's values allows.
_IS_FAST = tuple(map(int, VERSION.split(".")[:2])) >= (2, 14)
Named = Field(fail_fast=True) if _IS_FAST else Field()

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
Some = Annotated[list[T], Field(fail_fast=True, min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Limit = Annotated[int, Field(ge=-1, le=MAX_COUNT)]  # a number of tokens; -1: as many as fit
Scores = Annotated[int, Field(ge=-1, le=MAX_COUNT)]  # a number of log-probabilities; -1: all


class Body(BaseModel):
    """A JSON object whose fields are all known. A null stands for the field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = _known(cls)
        if cls.model_config["extra"] == "forbid" and not known.issuperset(given):
            given = cls._renamed(given, known)
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def _renamed(cls, given: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        """A body with fields that are not known, in known names."""
        raise _unknown(next(name for name in given if name not in known), known)


class SpeculationBody(Body):
    """How this request is drafted. It changes the time an answer takes, never its text."""

    mode: Annotated[str, Field(min_length=1, max_length=64)] = "auto"
    max_nodes: Annotated[int, Field(ge=0, le=1024)] | None = None
    origins: bool = False  # report who guessed each token


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: Any = None  # where a prompt may be cached up to: everything is
    prompt_cache_breakpoint: Any = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, given: Any) -> Any:
        part_type = given.get("type", "text") if isinstance(given, dict) else "text"
        if isinstance(part_type, str) and part_type != "text":
            text = "parts of type {part_type} are not read: the server takes text alone"
            raise PydanticCustomError(
                "not_text", text, {"field": "type", "part_type": part_type[:40]}
            )
        return given


class PredictionBody(Body):
    """The answer as the client expects it: drafted from, never believed."""

    type: Literal["content"]
    content: str | Many[TextPart]

    def plain(self) -> str:
        return _joined(self.content)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # the usage so far in every chunk
    include_obfuscation: bool = False  # OpenAI's padding against eavesdroppers; none is made here


class SchemaBody(Body):
    """OpenAI's wrapping of a JSON schema; hunch always keeps to it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must be: any text, a JSON object, JSON of one schema, or text with forms."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaBody | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # llama.cpp's form
    format: dict[str, Any] | None = None  # of a structural tag; in its older form the next two
    structures: Many[dict[str, Any]] | None = None
    triggers: Many[Text] | None = None


class StructuredBody(Body):
    """vLLM's way to say what an answer must look like; one of its fields."""

    json_: Annotated[str | dict[str, Any] | bool | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Some[Text] | None = None
    grammar: Text | None = None
    structural_tag: Text | dict[str, Any] | None = None


class KnownElsewhere(Body):
    """A body in which fields that clients of other servers send are known."""

    @classmethod
    def _renamed(cls, given: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        found, refused = as_ours(given, known)
        for name, reason in refused.items():
            raise refusal(name, reason)
        return found if known.issuperset(found) else super()._renamed(found, known)


class ChoosingBody(KnownElsewhere):
    """How tokens are chosen, on every path that generates."""

    # Without a value, the model's own recommendation (generation_config.json) or the usual one.
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]], Named] | None
    ) = None
    bad_words: Many[Text] | None = None
    allowed_token_ids: Ids | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    stop: Text | Many[Text] | None = None
    stop_token_ids: Many[TokenId] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None  # -1: none
    structured_outputs: StructuredBody | None = None
    speculation: SpeculationBody | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds; never above the server's own
    priority: Annotated[int, Field(ge=-(2**31), le=MAX_COUNT)] = 0  # lower ones run first
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class SamplingBody(ChoosingBody):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    n: Count = 1
    max_tokens: Limit | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | bool | None = None  # vLLM's older names for the same
    guided_regex: Text | None = None
    guided_choice: Some[Text] | None = None
    guided_grammar: Text | None = None
    prediction: PredictionBody | None = None
    prompt_logprobs: Scores | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None  # tokens of log-probabilities as "token_id:5"
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    # Notes for the operator's books, and advice to OpenAI's machines, which change no answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], Named] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | Some[str] | Ids | Some[Ids]
    max_tokens: Limit | None = 16
    logprobs: Scores | None = None
    echo: bool = False
    suffix: str | None = None  # what comes after the text that is to be filled in
    best_of: Count | None = None
    add_special_tokens: bool = True


class CalledFunction(Body):
    name: str
    arguments: str = ""
    # What OpenAI's client made of them.
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None


class CallBody(Body):
    """A call that an assistant's message of the history made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a chunk, where clients keep those


class FunctionBody(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments always keep to the schema


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    @classmethod
    def _renamed(cls, given: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        if given.get("type") == "custom":
            text = "only tools of the kind function are offered: give them a schema of one text"
            raise refusal("type", text)
        if "name" in given and "function" not in given:  # as the Responses API has them
            text = 'it stands within "function": {"type": "function", "function": {"name": ...}}'
            raise refusal("name", text)
        return super()._renamed(given, known)


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Many[CallBody] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, by its newer name
    refusal: str | None = None
    annotations: Many[Any] | None = None  # what OpenAI's answers carry, sent back
    audio: None = None
    function_call: None = None
    provider_specific_fields: Any = None  # LiteLLM's notes on an answer, sent back
    thinking_blocks: Any = None
    reasoning_details: Any = None  # OpenRouter's
    parsed: Any = None  # what OpenAI's client made of an answer
    id: str | None = None  # clients' own number of a message
    cache_control: Any = None  # prefixes are cached by themselves

    def plain(self) -> dict[str, Any]:
        """What a chat template reads."""
        told: dict[str, Any] = {"role": self.role}
        if self.content is not None or not self.tool_calls:
            told["content"] = _joined(self.content or "")
        if self.tool_calls:
            told["tool_calls"] = [
                call.model_dump(exclude={"index"}, exclude_none=True) for call in self.tool_calls
            ]
        reasoning = self.reasoning_content or self.reasoning
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        others["reasoning_content"] = reasoning
        return told | {key: value for key, value in others.items() if value is not None}


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Some[Message]
    max_completion_tokens: Limit | None = None
    logprobs: bool = False
    top_logprobs: Scores | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # go on with the last message instead of a new one
    echo: bool = False  # the answer begins with the last message, where that is the assistant's
    modalities: Many[Literal["text"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # advice only OpenAI's models know
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[ToolBody] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None  # False: it is not shown
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None

    @property
    def echoed(self) -> str:
        """What the answer begins with."""
        last = self.messages[-1]
        return _joined(last.content or "") if self.echo and last.role == "assistant" else ""

    def wish(self, values: Mapping[str, Any]) -> Wish:
        """What is asked for besides sampling; `values` are for templates, unless it has others."""
        many = self.parallel_tool_calls
        return Wish(
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            tool_choice=self.tool_choice,
            parallel_tool_calls=many is None or many,
            reasoning_effort=self.reasoning_effort,
            thinking_token_budget=self.thinking_token_budget,
            template_values={**values, **(self.chat_template_kwargs or {})},
        )


class TemplateBody(KnownElsewhere):
    """A chat of which only the prompt is asked for: POST /apply-template."""

    model: str | None = None
    messages: Some[Message]
    tools: Many[ToolBody] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        return ChatBody(**{name: getattr(self, name) for name in TemplateBody.model_fields})


class TokenizeBody(TemplateBody):
    """POST /tokenize: a prompt, the messages of a chat, or llama.cpp's content."""

    messages: Some[Message] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None  # default: of a prompt
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False
    parse_special: Literal[True] = True  # names of special tokens in a prompt are those tokens
    with_pieces: bool = False  # with their text


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS)]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


class OllamaErrorBody(BaseModel):
    """Ollama's: a sentence."""

    error: str


OLLAMA_FAULTS = faults(OllamaErrorBody)


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


@cache
def _known(body: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _unknown(name: Any, known: Collection[str]) -> PydanticCustomError:
    shown = str(name)[:100]
    near = get_close_matches(shown, known, n=1)
    text = f"unknown field; did you mean {near[0]}?" if near else "unknown field"
    return PydanticCustomError("unknown_field", "{text}", {"text": text, "field": shown})
