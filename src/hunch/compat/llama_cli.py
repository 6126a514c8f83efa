"""Flags of llama.cpp's `llama-cli`, as words of `hunch generate` and `hunch chat`."""

from __future__ import annotations

from collections.abc import Sequence

from hunch.compat.llamacpp import LAYERS, device_of
from hunch.compat.server_words import by_flag
from hunch.config import say_once

_COMMANDS = ("generate", "chat")
_RENAMED = by_flag(  # with a value
    {
        "--model": "-hf --hf-repo",
        "--max-tokens": "-n --predict --n-predict --max-new-tokens",
        "--temperature": "--temp",
        "--threads": "-t",
        "--seed": "-s",
        "--system": "-sys --system-prompt",
    }
)
_PROMPT = ("-p", "--prompt")  # of generate: the prompt is a word of its own
_NOTHING_VALUED = by_flag(
    {
        "the context is the model's own": "-c --ctx-size --max-model-len",
        "prompts go in chunks by themselves": "-b --batch-size -ub --ubatch-size",
    }
)
_NOTHING = by_flag(
    {
        "hunch chat converses, hunch generate does not": """-cnv --conversation -no-cnv
            --no-conversation -st --single-turn""",
        "templates are always rendered": "--jinja",
        "files are mapped, and read as they are needed": "--mlock --no-mmap",
    }
)
_VALUED = {*_RENAMED, *_NOTHING_VALUED, *LAYERS, *_PROMPT}


def from_llama_cli(words: Sequence[str]) -> list[str]:
    """The words of a command line, with llama.cpp's flags by the names these commands have."""
    if not words or words[0] not in _COMMANDS:
        return list(words)
    found, rest = [words[0]], list(words[1:])
    while rest and rest[0] != "--":
        flag, equals, value = rest.pop(0).partition("=")
        if flag in _NOTHING and not equals:
            say_once(f"{flag} has no effect: {_NOTHING[flag]}")
        elif flag in _VALUED and (equals or rest) and not (flag in _PROMPT and words[0] == "chat"):
            found += _meant(flag, value if equals else rest.pop(0))
        else:
            found.append(flag + equals + value)
    return found + rest


def _meant(flag: str, value: str) -> list[str]:
    if flag in _PROMPT:
        return [value]
    if flag in LAYERS:
        return device_of(flag, value)
    if flag in _NOTHING_VALUED:
        say_once(f"{flag} {value} has no effect: {_NOTHING_VALUED[flag]}")
        return []
    if _RENAMED[flag] in ("--max-tokens", "--seed") and value == "-1":
        return []  # no number of their own
    return [_RENAMED[flag], value]
