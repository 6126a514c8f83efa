"""The bodies clients send. Unknown fields and wrong types are refused, never dropped."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from hunch.types import MAX_SEED

MAX_COUNT = 2**31 - 1
MAX_IDS = 1024 * 1024

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class Body(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SpeculationBody(Body):
    """How this request is drafted. It changes the time an answer takes, never its text."""

    mode: Annotated[str, Field(min_length=1, max_length=64)] = "auto"
    max_nodes: Annotated[int, Field(ge=0, le=1024)] | None = None
    origins: bool = False  # report who guessed each token


class TextPart(Body):
    type: Literal["text"]
    text: str


class PredictionBody(Body):
    """The answer as the client expects it: drafted from, never believed."""

    type: Literal["content"]
    content: str | list[TextPart]

    def plain(self) -> str:
        return _joined(self.content)


class StreamOptions(Body):
    include_usage: bool = False


class SchemaBody(Body):
    """OpenAI's wrapping of a JSON schema; hunch always keeps to it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must be: any text, any JSON object, or JSON of one schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None


class StructuredBody(Body):
    """vLLM's way to say what an answer must look like; one of its fields."""

    json_: Annotated[str | dict[str, Any] | bool | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None


class SamplingBody(Body):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    n: Count = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    max_tokens: Count | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredBody | None = None
    guided_json: str | dict[str, Any] | bool | None = None  # vLLM's older names for the same
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    guided_grammar: Text | None = None
    speculation: SpeculationBody | None = None
    prediction: PredictionBody | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds; never above the server's own
    # Notes for the operator's books, which cannot change an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)]],
            Field(min_length=1),
        ]
    )
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    echo: bool = False
    best_of: Count | None = None
    add_special_tokens: bool = True


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        """What a chat template reads."""
        return {"role": self.role, "content": _joined(self.content or "")}


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    chat_template: str | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS)]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
