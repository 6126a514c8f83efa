"""One part measured alone: each module prints a table of the docs, `hunch bench part NAME`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from hunch.errors import ConfigError


class Part(NamedTuple):
    """A measurement; `main` of the module of its name takes the words after it."""

    needs: str  # the devices it needs
    prints: str


PARTS = {
    "adapt": Part("any", "what `hunch serve --adapt` takes from requests"),
    "answers": Part("CPU", "questions answered as float32 does, by activation bits"),
    "drafters": Part("any", "drafters taught the same answers, beside each other"),
    "exactness": Part("GPU", "what products in a fixed order cost"),
    "experts": Part("GPU", "a decode step of a 30B mixture of experts"),
    "fidelity": Part("any", "distance to float32, beside llama.cpp's or torch's"),
    "host": Part("any", "what a GPU's host does per step and row"),
    "idle": Part(
        "GPU", "how long the GPU waits while one request decodes, and a request for its first token"
    ),
    "kernels": Part("GPU", "a decoder's pass alone, by rows"),
    "loading": Part("any", "a large checkpoint loaded, beside reading its files"),
    "masks": Part("CPU", "what a grammar's masks take, by place in an answer"),
    "merged": Part("any", "tokens per pass of merged drafts and of their parts"),
    "perplexity": Part("CPU", "how likely a text is, beside transformers'"),
    "quantised": Part("CPU", "memory and passes of a GGUF file, beside llama.cpp's"),
    "ranks": Part("CPU", "what ranks spend on each other, beside the formula"),
    "requests": Part("GPU", "requests with penalties, schemas, log-probabilities"),
    "rounded": Part("GPU", "a 7B-cost target in 16, 8 and 4 bits"),
    "routing": Part("CPU", "requests that begin alike, over three engines"),
    "serving": Part("CPU", "CPU time of a token outside of the model"),
    "streams": Part("any", "many streams at once from a running server"),
    "successors": Part("any", "tokens per pass with trees of common words, replayed"),
    "steps": Part("CPU", "what a step costs in Python, by method"),
}


def main_of(name: str) -> Callable[[Sequence[str]], None]:
    """The function that runs the part of this name."""
    if name not in PARTS:
        raise ConfigError(f"there is no part {name!r}: one of {', '.join(PARTS)}")
    try:
        module = import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(f"part {name!r} needs Triton, and a GPU to run on") from None

    def run(words: Sequence[str]) -> None:
        _check_device(name, words)
        module.main(words)

    return run


def _check_device(name: str, words: Sequence[str]) -> None:
    """Raise if a part that needs a GPU would run without one; its help is shown anywhere."""
    import torch

    is_asked = PARTS[name].needs == "GPU" and not {"-h", "--help", "--device"}.intersection(words)
    if is_asked and not torch.cuda.is_available():
        raise ConfigError(f"part {name!r} needs a GPU: torch sees no CUDA device here")


class PartOptions(argparse.ArgumentParser):
    """A part's options. Help keeps the paragraphs of its module's text, and shows defaults."""

    def __init__(self, name: str, text: str | None) -> None:
        super().__init__(f"hunch bench part {name}", description=text, formatter_class=_Paragraphs)

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        default = how.get("default")
        if isinstance(default, list):
            default = " ".join(map(str, default))
        if default not in (None, "", argparse.SUPPRESS):
            how["help"] = f"{how.get('help', '')} [{default}]".strip()
        return super().add_argument(*names, **how)


class _Paragraphs(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip().split("\n\n")
        return "\n\n".join(
            block if block.startswith(" ") else textwrap.fill(block, width) for block in blocks
        )
