"""hunch chat: a conversation in the terminal, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hunch.cli import options as o
from hunch.cli.remote import answer_of
from hunch.errors import ConfigError, HunchError

if TYPE_CHECKING:
    from hunch import LLM

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
HELP = """\
/help                 this list
/model [NAME]         show the model, or load another; the conversation stays
/speculate [NAME]     show what drafts, or change it (off, ngram, suffix, auto, draft, ...)
/temperature [NUMBER] show it, or change it; 0 always takes the likeliest token
/system [TEXT]        show or set the system message, and begin again
/reset                begin a new conversation
/save FILE            write the conversation as JSON
/quit                 leave; so do Ctrl-D and an empty line
Ctrl-C stops an answer. A line that ends with a backslash goes on in the next one; a message may
also stand between two lines of three quotes.\
"""


@dataclass(kw_only=True)
class Options(o.EngineOptions):
    name: o.ModelName = None
    model: o.Model = o.DEFAULT_MODEL
    speculate: o.Speculate = "auto"
    system: str | None = o.option(None, "A system message.")
    server: str | None = o.option(None, "URL of a running server to talk with instead.")
    max_tokens: o.MaxTokens = 512
    temperature: o.Temperature = 0.0
    top_p: o.TopP = 1.0
    seed: o.Seed = None


@o.takes(Options)
def chat(ctx: typer.Context, given: Options) -> None:
    """Talk with a model in the terminal.

    /help lists commands; an empty line or Ctrl-D ends it.
    """
    model, server = o.one_model(ctx, given.name, given.model), given.server
    sampling = {name: getattr(given, name) for name in _SAMPLING}
    talk = Conversation(sampling, server, model, given.speculate, given.system)
    if server is not None:
        local = ("model", "speculate", *given.engine())
        if unused := o.given_options(ctx, local) or given.name:
            raise ConfigError(f"{unused}: a server has its own; leave this out, or --server")
    else:
        talk.engine = {**given.engine(), "max_num_seqs": 1}
        talk.open()
    talk.reset()
    is_person = talk.is_person = sys.stdin.isatty()
    if is_person:
        _use_history()
        _say(f"{server or model}; /help lists commands")
    while line := _ask(is_person):
        if line.startswith("/"):
            if not talk.command(line):
                break
        else:
            talk.answer(line)


@dataclass(slots=True)
class Conversation:
    """What was said, by whom it is answered, and how."""

    sampling: dict[str, Any]
    server: str | None
    model: str
    speculate: str
    system: str | None
    engine: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    llm: LLM | None = None
    is_person: bool = False  # who can ask again after an error; a script cannot

    def open(self) -> None:
        """Load the model; one that was open stays until the new one is there."""
        new = o.open_llm(self.model, self.speculate, **self.engine)
        if not new.has_chat_template:
            new.close()
            raise ConfigError(
                f"{self.model} has no chat template: it was made to continue texts. "
                f"Give it one to continue: hunch generate TEXT --model {self.model}"
            )
        if self.llm is not None:
            self.llm.close()
        self.llm = new

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, question: str) -> None:
        """One turn. Ctrl-C keeps what was said so far; an error takes the question back."""
        from hunch.cli.trace import show_stats

        asked = [*self.messages, {"role": "user", "content": question}]
        shown: list[str] = []
        stats: dict[str, Any] = {}

        def show(text: str) -> None:
            shown.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

        try:
            if self.server is not None:
                _, stats = answer_of(self.server, show, asked, **self.sampling)
            else:
                stats = self._local(asked, show)
        except KeyboardInterrupt:
            _say("\n(stopped)")
        except HunchError as error:
            if not self.is_person:
                raise
            _say(f"error: {error}")
            return
        print()
        if stats:
            show_stats(stats)
        self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]

    def _local(self, messages: list[dict[str, str]], show: Callable[[str], None]) -> dict[str, Any]:
        assert self.llm is not None
        shown = 0
        ids = self.llm.encode_chat(messages)
        for output in self.llm.stream(ids, o.sampling(**self.sampling)):
            answer = output.outputs[0]
            show(answer.text[shown:])
            shown = len(answer.text)
        return answer.stats

    def command(self, line: str) -> bool:
        """Do what a line that begins with / asks; False: leave."""
        name, _, value = line[1:].strip().partition(" ")
        value = value.strip()
        try:
            if name in ("quit", "exit", "bye", "q"):
                return False
            if name in ("model", "speculate"):
                self._change(name, value)
            elif name == "temperature":
                if value:
                    o.sampling(**{**self.sampling, "temperature": float(value)})  # checks it
                    self.sampling["temperature"] = float(value)
                _say(f"temperature {self.sampling['temperature']:g}")
            elif name == "system":
                if value:
                    self.system = value
                    self.reset()
                _say(f"system: {self.system or 'none of your own'}")
            elif name == "reset":
                self.reset()
                _say("a new conversation")
            elif name == "save":
                _say(self._save(value))
            else:
                if name not in ("help", "?", "h"):
                    _say(f"no command /{name}")
                _say(HELP)
        except (HunchError, ValueError, OSError) as error:
            _say(f"error: {error}")
        return True

    def _change(self, name: str, value: str) -> None:
        if value and self.server is not None:
            raise ConfigError("a server keeps its own model and drafter")
        before = getattr(self, name)
        if value:
            setattr(self, name, value)
            try:
                self.open()
            except HunchError:
                setattr(self, name, before)
                raise
        _say(f"{name} {getattr(self, name)}")

    def _save(self, value: str) -> str:
        if not value:
            return "/save needs a file name"
        path = Path(value).expanduser()
        if path.exists():
            return f"{path} exists; choose another name"
        path.write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return f"saved {len(self.messages)} messages to {path}"


def _say(text: str) -> None:
    """A word of the program, not of the model: on stderr, so that answers can be piped."""
    print(text, file=sys.stderr)


def _use_history() -> None:
    """Arrow keys, editing and the questions of earlier days, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    import atexit

    from hunch.hub import cache_directory

    file = cache_directory() / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    except OSError:
        return  # a cache that cannot be read: a chat without memory
    readline.set_history_length(1000)

    def keep() -> None:
        with suppress(OSError):
            readline.write_history_file(file)

    atexit.register(keep)


def _ask(is_person: bool) -> str:
    """A message, without its end of line; empty: the end."""
    prompt, more = ("you> ", "...> ") if is_person else ("", "")
    try:
        line = input(prompt)
        if line.strip() == '"""':
            lines = []
            while (line := input(more)).strip() != '"""':
                lines.append(line)
            return "\n".join(lines).strip() or " "
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(more))
        return "\n".join(lines).strip()
    except (EOFError, KeyboardInterrupt):
        if is_person:
            print(file=sys.stderr)
        return ""
