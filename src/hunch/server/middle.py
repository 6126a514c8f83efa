"""Fill in the middle: the text between a prefix and a suffix, by the tokens a model has for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hunch.server.problems import ProblemError
from hunch.server.prompts import Prompts
from hunch.server.text import Text

# Families' names for the marks before prefix, suffix and middle. The first three of a family that
# the vocabulary has are used.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
ENDS = ("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "▁<EOT>",
        "<EOT>", "<|endoftext|>", "<|cursor|>")  # fmt: skip
FILE_MARKS = ("<|file_sep|>", "<file_sep>")


@dataclass(frozen=True, slots=True)
class Middle:
    """The marks of one vocabulary."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]  # that end a middle, besides end-of-text
    file: int | None  # before a file's name, where several are shown

    async def fill(self, prompts: Prompts, prompt: str | list[int], suffix: str) -> list[int]:
        """The prompt for what comes between a prompt and a suffix."""
        prefix = await prompts.tokens(prompt) if isinstance(prompt, str) else prompt
        return self.prompt(prompts.text, prefix, await prompts.tokens(suffix))

    def prompt(self, text: Text, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        start = text.encode("", add_special_tokens=True)  # begin-of-text, where there is one
        return [*start, self.prefix, *prefix, self.suffix, *suffix, self.middle]


def middle_of(text: Text) -> Middle:
    """The vocabulary's marks; an error where it has none."""

    def known(names: Sequence[str]) -> list[int]:
        return [index for name in names if (index := text.token_id(name)) is not None]

    for names in MARKS:
        if len(marks := known(names)) == 3:
            prefix, suffix, middle = marks
            file = next(iter(known(FILE_MARKS)), None)
            return Middle(prefix, suffix, middle, ends=tuple(known(ENDS)), file=file)
    raise ProblemError(
        400,
        "this model's vocabulary has no tokens for filling in the middle; use a code model that "
        "was trained for it, or a prompt without suffix",
        param="suffix",
    )
