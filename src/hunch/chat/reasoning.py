"""Reasoning, told from the answer that follows it."""

from __future__ import annotations

from dataclasses import dataclass

from hunch.chat.pieces import Marks, Piece, Reader


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How a family marks its reasoning. The prompt may have written `begin` already."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_always_there: bool = False  # reasoning comes first even where nothing says so
    ignored: tuple[str, ...] = ()  # marks around the answer that follows it

    def is_open(self, prompt_end: str) -> bool:
        """Whether the answer to a prompt that ends so begins within reasoning."""
        tail = prompt_end.rstrip()
        if tail.endswith(self.begin):
            return True
        return self.is_always_there and not tail.endswith(self.end)


def _think(
    name: str = "think", *, is_always_there: bool = False, answer: str = ""
) -> ReasoningForm:
    ignored = (f"<{answer}>", f"</{answer}>") if answer else ()
    return ReasoningForm((f"<{name}>",), (f"</{name}>",), is_always_there, ignored)


THINK = _think()
COHERE = ReasoningForm(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    ignored=tuple(
        f"<|{edge}_{part}|>" for edge in ("START", "END") for part in ("RESPONSE", "TEXT")
    ),
)
# vLLM's names. None: nothing is told apart. "openai_gptoss" is read with the calls (harmony).
REASONING_FORMS: dict[str, ReasoningForm | None] = {
    "none": None,
    "minimax_m2_append_think": None,
    **dict.fromkeys(
        (
            *("qwen3", "deepseek_v3", "deepseek_v4", "deepseek_v41", "dots"),
            *("granite_thinking_parser", "minicpmv", "glm45", "glm47", "holo2", "kimi_k2", "ling3"),
            *("mimo", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "step3p5"),
        ),
        THINK,
    ),
    **dict.fromkeys(("deepseek_r1", "step3", "step5"), _think(is_always_there=True)),
    "hunyuan_a13b": _think(answer="answer"),
    "hy_v3": _think("think:opensource"),
    "kimi_k3": ReasoningForm(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        ignored=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "kimi": ReasoningForm(("◁think▷",), ("◁/think▷",)),
    "minimax_m3": _think("mm:think"),
    "ernie45": _think(answer="response"),
    "mistral": ReasoningForm(("[THINK]",), ("[/THINK]",)),
    "seed_oss": _think("seed:think"),
    "exaone_deep": _think("thought"),
    "gemma4": ReasoningForm(("<|channel>thought",), ("<channel|>",)),
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "apriel": ReasoningForm(
        ("Here are my reasoning steps:",),
        ("[BEGIN FINAL RESPONSE]",),
        ignored=("[END FINAL RESPONSE]",),
    ),
    "apertus": ReasoningForm(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "granite": ReasoningForm(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "granite3_3": _think(answer="response"),
    "openai_gptoss": None,
}
SGLANGS_NAMES = {  # of what vLLM calls otherwise
    "apertus2509": "apertus", "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3",
    "deepseek-v4": "deepseek_v4", "gpt-oss": "openai_gptoss", "hunyuan": "hunyuan_a13b",
    "interns1": "qwen3", "minimax": "deepseek_r1", "minimax-m3": "minimax_m3",
    "minimax-append-think": "minimax_m2_append_think", "nemotron_3": "nemotron_v3",
    "qwen3-thinking": "deepseek_r1",
}  # fmt: skip
# What a template holds that asks for a form, the first that fits; all of a line must be there.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("seed_oss", ("<seed:think>",)),
    ("mistral", ("[THINK]",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("gemma4", ("<|channel>",)),
    ("minimax_m3", ("<mm:think>",)),
    ("kimi_k3", ("<|open|>", "think", "<|sep|>")),
    ("kimi", ("◁think▷",)),
    ("apriel", ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:")),
    ("hy_v3", ("hy_eos", "<think")),
    ("hunyuan_a13b", ("<think>", "<answer>")),
    ("hunyuan_a13b", ("<think>", "<|extra_0|>")),
    ("granite3_3", ("<think>", "<response></response>")),
    ("ernie45", ("<think>", "<response>", "<tool_output>")),
    ("exaone_deep", ("<thought>",)),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
    ("granite", ("Here is my thought process",)),
)


def reasoning_of(template: str) -> str:
    """The name of the form a chat template speaks of; "none" where it speaks of none."""
    found = (name for name, signs in _SIGNS if all(sign in template for sign in signs))
    return next(found, "none")


class ReasoningReader:
    """Reasoning first, then what another reader makes of the rest."""

    def __init__(self, form: ReasoningForm, *, is_open: bool, rest: Reader) -> None:
        self._form, self._rest = form, rest
        self._place = "inside" if is_open else "before"
        self._begins, self._marks = Marks(form.begin), Marks((*form.begin, *form.end))
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        if self._place == "after":
            return self._rest.feed(text)
        self._held += text
        if self._place == "before" and not self._look():
            return []
        if self._place == "after":  # there is no reasoning
            held, self._held = self._held, ""
            return self._rest.feed(held)
        return self._read()

    def _look(self) -> bool:
        """Whether it is certain by now if reasoning comes."""
        text = self._held.lstrip()
        before, mark, held = self._begins.split(text)
        if mark is not None and not before:
            self._place, self._held = "inside", held
            return True
        if not text or held == text:
            return False
        self._place = "after"
        return True

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            safe, mark, self._held = self._marks.split(self._held)
            if safe:
                pieces.append(Piece("reasoning", safe))
            if mark is None:
                return pieces
            if mark in self._form.end:
                held, self._held, self._place = self._held, "", "after"
                return [*pieces, *self._rest.feed(held)]

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._place == "inside":
            return [Piece("reasoning", held), *self._rest.finish()]
        return [*self._rest.feed(held), *self._rest.finish()] if held else self._rest.finish()
