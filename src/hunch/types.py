"""Torch-free values that cross layers, and the protocols the engine is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol, Self

from hunch.checks import MAX_SEED as MAX_SEED
from hunch.checks import USUAL_SAMPLING as USUAL_SAMPLING
from hunch.checks import (
    VLLMS_FORMS,
    VLLMS_SAMPLING,
    is_whole,
    known_names,
    sampling_value,
    takes_vllms_names,
)
from hunch.checks import plain_only as plain_only
from hunch.checks import recommended as recommended
from hunch.errors import RequestError
from hunch.outputs import CompletionOutput as CompletionOutput
from hunch.outputs import DraftTrace as DraftTrace
from hunch.outputs import Logprob as Logprob
from hunch.outputs import RequestMetrics as RequestMetrics
from hunch.outputs import RequestOutput as RequestOutput
from hunch.outputs import RequestOutputKind as RequestOutputKind


def new_seed(base: int, number: int) -> int:
    """The seed of a program's n-th request without one: in its next run it is the same.

    It has 53 bits, which every reader of JSON keeps.
    """
    return int.from_bytes(blake2b(f"{base}/{number}".encode(), digest_size=8).digest()) >> 11


@takes_vllms_names("speculation", {})
@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """How to draft for a request. It can change the time an answer takes, never its text."""

    mode: str = "default"  # "default" or "auto" (the engine's choice), "off", or a loaded method
    max_nodes: int | None = None  # upper bound on drafted nodes per step
    trace: bool = False  # report every draft and its fate

    def __post_init__(self) -> None:
        for name, is_good, allowed in (
            ("mode", isinstance(self.mode, str), "a method's name"),
            ("max_nodes", self.max_nodes is None or is_whole(self.max_nodes, 0), "0 or more"),
            ("trace", isinstance(self.trace, bool), "true or false"),
        ):
            if not is_good:
                raise RequestError(f"speculation.{name}={getattr(self, name)!r} must be {allowed}")


@takes_vllms_names("structured_outputs", VLLMS_FORMS)
@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """What an answer must look like; exactly one of the first six. Names and meanings are vLLM's.

    It holds for every token, drafted or not; end-of-text comes when the form is complete.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # the whole answer matches
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # in Lark's form, or llama.cpp's GBNF
    structural_tag: str | Mapping[str, Any] | None = None  # forms within text, as xgrammar has them
    whitespace: bool = False  # JSON may be laid out freely, not only as {"a": 1, "b": 2}
    frame: str | None = None  # Lark in which @body stands for the above: what may be around it
    reasoning: tuple[str, str, int] | None = None  # what begins it, what ends it, most tokens

    def __post_init__(self) -> None:
        value_types: dict[str, Any] = {
            "json": (str, Mapping, bool), "json_object": bool, "regex": str,
            "choice": (list, tuple), "grammar": str, "structural_tag": (str, Mapping),
        }  # fmt: skip
        given = {name: getattr(self, name) for name in value_types}
        given = {name: value for name, value in given.items() if value is not None}
        if self.json_object is False:
            del given["json_object"]
        if len(given) != 1:
            names, told = ", ".join(value_types), " and ".join(given) or "none"
            raise RequestError(f"structured_outputs needs exactly one of {names}; {told} given")
        for name, value in given.items():
            if hasattr(value, "model_json_schema"):  # a class of pydantic's
                schema = f"{value.__name__}.model_json_schema()"
                raise RequestError(f"structured_outputs.{name}: give {schema}, the class's schema")
            if not isinstance(value, value_types[name]):
                raise RequestError(f"structured_outputs.{name}: a {type(value).__name__} given")
        if self.choice is not None and not all(isinstance(c, str) and c for c in self.choice):
            raise RequestError("structured_outputs.choice must be texts that are not empty")

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """vLLM's way to make one."""
        return cls(**given)


_PARTS: dict[str, Any] = {"structured_outputs": StructuredOutput, "speculation": Speculation}


@takes_vllms_names("sampling parameters", VLLMS_SAMPLING)
@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings are vLLM's; all of them hold at drafted nodes.

    Fields may be changed, and are checked then too. A call takes a copy as it begins.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16  # None: up to the model's context
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: int | None = None  # None or -1: another one each time
    logprobs: int | None = None  # likeliest tokens scored beside the chosen one; -1: all
    prompt_logprobs: int | None = None  # the same at the prompt's tokens
    structured_outputs: StructuredOutput | None = None  # also as a dict of its fields
    guided_decoding: InitVar[StructuredOutput | Mapping[str, Any] | None] = None  # its older name
    speculation: Speculation = Speculation()  # also as a dict of its fields
    prediction: str | Sequence[int] | None = None  # the answer as expected: text, or token ids
    output_kind: int = RequestOutputKind.CUMULATIVE  # of AsyncLLM.generate, by vLLM's numbers
    pooling: str | None = None  # last or mean: the prompt's states come back as one, see LLM.embed

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            what = "sampling parameters"
            known_names(what, SamplingParams, plain_only(what, {name: value}, VLLMS_SAMPLING))
            return  # it is vLLM's alone, and asks for nothing
        name = "structured_outputs" if name == "guided_decoding" else name
        if part_class := _PARTS.get(name):
            if isinstance(value, Mapping):
                value = part_class(**value)
            is_missing = value is None and part_class is StructuredOutput
            if not is_missing and not isinstance(value, part_class):
                allowed = f"a {part_class.__name__} or a dict of its fields"
                raise RequestError(f"{name}={value!r} must be {allowed}")
        object.__setattr__(self, name, sampling_value(name, value))

    def __post_init__(self, guided_decoding: StructuredOutput | Mapping[str, Any] | None) -> None:
        if guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError("give either structured_outputs or guided_decoding, not both")
            self.guided_decoding = guided_decoding
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}"
            )

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """vLLM's way to make them: None is a field's default, and of max_tokens no limit; a bias
        beyond the limits is the limit."""
        asked = {n: v for n, v in given.items() if v is not None or n == "max_tokens"}
        if isinstance(bias := asked.get("logit_bias"), Mapping):
            asked["logit_bias"] = {token: min(max(v, -100), 100) for token, v in bias.items()}
        return cls(**asked)

    def clone(self) -> Self:
        """A copy, all of it checked; `dataclasses.replace` makes one with changes."""
        return replace(self)


@dataclass(kw_only=True, slots=True)
class Request:
    """One sequence to generate: a user's request with n = 3 is three of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    max_tokens: int = 16  # resolved: params.max_tokens within the context
    stop_ids: tuple[int, ...] = ()  # end-of-text (unless ignored) and stop_token_ids
    eos_ids: tuple[int, ...] = ()  # the part of stop_ids that is end-of-text (for finish_reason)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prediction_ids: tuple[int, ...] = ()  # what the user expects to be generated
    grammar: Any = None  # what the output must follow, compiled by what was given to the engine
    priority: int = 0  # lower ones get rows first, and keep them
    cache_salt: str = ""  # prefixes are found again only under the same one


# --- what the engine asks of the runner --------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupInfo:
    """A KV group: layers of one model over the shared block ids. Group 0 is the target's."""

    name: str
    sees_next: bool = False  # KV at a slot depends on the next token too (EAGLE, MTP)
    has_no_holes: bool = False  # the target computes a block again rather than leave a hole here


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What the runner has room for."""

    num_blocks: int
    block_size: int  # tokens
    max_rows: int
    max_len: int  # longest sequence, prompt and output
    max_nodes: int  # most nodes a draft may have (slots reserved after the committed ones)
    max_draft_rows: int | None = None  # with more rows there are no drafts: they would not pay
    writes_bonus_kv: bool = False  # a step also writes a drafter's KV of its bonus
    max_prompt: int | None = None  # tokens of prompts that a step may read; None: any number
    past_end: int = 0  # slots past a row's end: a tree has more nodes than tokens are to come
    drafter_bytes: int = 0  # memory of the drafter's weights; on a GPU of its KV too
    drafter_share: float = 0.0  # bytes of the drafter's weights per byte of the target's
    max_under_way: int = 1  # steps that may be under way at once, of different rows
    has_recurrent_states: bool = False  # rows have recurrent states: drafts are chains
    num_snapshots: int = 0  # such states that can be kept for prompts that begin alike
    kernels: str = "torch"  # what computes a pass, for reports
    exact: str = ""  # in words: whether a row's bits depend on the row alone, by which kernels
    vocab_size: int | None = None  # tokens that the model knows; None: those of its tokenizer
    activation_bits: int | None = None  # of a CPU's products; None: they are not rounded
    methods: Mapping[str, int] = field(default_factory=dict)  # name -> most nodes; default first
    groups: tuple[GroupInfo, ...] = (GroupInfo(name="target"),)
    window: int | None = None  # most positions that a layer sees, its own included; None: all
    model: Mapping[str, Any] = field(default_factory=dict)  # "architecture" and "bytes" of weights

    @property
    def max_slots(self) -> int:
        """The most slots of a sequence that has all blocks to itself."""
        num_slots = self.num_blocks * self.block_size
        if self.window is None or len(self.groups) > 1 or self.has_recurrent_states:
            return num_slots
        # Its window, the tokens of pending steps, a block to continue in, and blocks partly used.
        held = self.window + 4 + 3 * self.block_size
        return self.max_len if held <= num_slots else num_slots


@dataclass(kw_only=True, slots=True)
class RowStart:
    """A request enters a device row: new, or back from preemption."""

    row: int
    request: Request
    tokens: list[int]  # everything known: prompt, and output so far
    num_computed: tuple[int, ...]  # per KV group: leading tokens whose KV the blocks already hold
    blocks: list[int]
    snapshot: int = -1  # the kept recurrent state that it starts with; -1: none


@dataclass(kw_only=True, slots=True)
class RowWork:
    """One row's part in a step: catch up on known tokens; at the last of them, check the draft."""

    row: int
    num_tokens: int  # at most this many known tokens are processed
    num_nodes: int  # nodes of the waiting draft to verify, from the first on; others are dropped
    max_draft: int  # at most this many nodes are drafted for the next step
    snapshot: int = -1  # where the row's recurrent state after these tokens is kept; -1: nowhere
    runs_alone: bool = False  # the host computes it by itself, as it once ran out of memory


@dataclass(kw_only=True, slots=True)
class StepPlan:
    """What the runner does next: `freed_rows` first, then `starts`, `blocks` and `work`."""

    id: int
    freed_rows: list[int] = field(default_factory=list)  # their requests ended, or were preempted
    starts: list[RowStart] = field(default_factory=list)
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # to append to rows' tables
    work: list[RowWork] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens + work.num_nodes for work in self.work)


@dataclass(kw_only=True, slots=True)
class RowResult:
    """What a step did for one row."""

    row: int
    tokens: list[int] = field(default_factory=list)  # committed now; empty while catching up
    num_processed: int = 0  # known tokens whose KV was written
    num_checked: int = 0  # nodes that were checked, up to the remaining token budget
    num_accepted: int = 0
    finish: str | None = None  # "stop" or "length", decided on the device; "abort": see problem
    problem: str | None = None  # why the row cannot go on
    is_lost: bool = False  # without memory, its recurrent state was lost: it has to start again
    computed: tuple[int, ...] = ()  # per KV group: leading tokens whose KV is written
    num_waiting: int = 0  # nodes of the new draft, which waits for the next step
    num_levels: int | None = None  # depth of the verified draft; None: a chain, num_checked deep
    logprobs: list[dict[int, Logprob]] | None = None  # one per committed token
    prompt_logprobs: list[dict[int, Logprob]] | None = None  # of the tokens after those processed
    pooled: list[float] | list[int] | None = None  # states of the prompt's tokens, see pooling.py
    method: str = ""  # the method that drafted the verified nodes
    trace: DraftTrace | None = None


@dataclass(kw_only=True, slots=True)
class DecodedRows:
    """What a step did for rows that decode and go on, in columns with an entry for each row.

    Such a row processed its last known token, perhaps with a draft, committed tokens, and has not
    ended. `RowResult` says what the columns mean, and its defaults hold for a column that is None,
    except for `computed`: None means that the target has computed all tokens but the last, and
    leaves other KV groups as they were.
    """

    tokens: list[list[int]]  # []: the row's result is the next one of `StepResult.rows`
    num_checked: list[int] | None = None
    methods: list[str] | None = None
    num_waiting: list[int] | None = None
    computed: list[list[int]] | None = None
    logprobs: list[list[dict[int, Logprob]] | None] | None = None

    def leave_out(self, place: int) -> None:
        """The row at this place has its result in `StepResult.rows`."""
        self.tokens[place] = []
        if self.num_checked is not None:
            self.num_checked[place] = 0


@dataclass(kw_only=True, slots=True)
class StepResult:
    """The outcome of one submitted plan, in the order of its work."""

    id: int
    rows: list[RowResult]
    decoded: DecodedRows | None = None  # None: every row's result is in `rows`
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    plain_seconds: float = 0.0  # of a pass over the same rows without drafts


class Runner(Protocol):
    """Runs steps. Plans are submitted in order and collected in the same order."""

    depth: int  # plans that may be uncollected when another is submitted: 0 on a CPU
    capacity: Capacity

    def submit(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepResult: ...

    def has_result(self) -> bool: ...  # `collect` would not wait for the device

    def reset(self) -> None: ...  # forget what is kept of requests that have ended

    def check_alive(self) -> None:
        """Raise EngineError if a process that it needs has ended."""

    def close(self) -> None: ...


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token: int) -> str: ...

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer: ...

    def stop_matcher(self, stops: Sequence[str], include: bool) -> StopMatcher: ...


class Detokenizer(Protocol):
    """Turns tokens into text as they come; never splits a character."""

    def push(self, token: int) -> str: ...

    def push_all(self, tokens: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class StopMatcher(Protocol):
    """Finds stop strings in text that comes in pieces; holds back what may begin one."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string that ended it, if one did."""

    def flush(self) -> str: ...  # what was held back, when no more text comes
