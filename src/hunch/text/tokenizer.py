"""Text to tokens and back, from a tokenizer.json or a GGUF file's metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from hunch.errors import ModelFormatError
from hunch.hub.gguf_file import read_header
from hunch.text.detokenizer import PieceDetokenizer
from hunch.text.encoding import check_length, encode_text, encode_texts
from hunch.text.literal import Hidden, Literals
from hunch.text.pieces import Pieces
from hunch.text.stop import StopMatcher
from hunch.text.transformers_names import TransformersNames, as_asked, check_asked

# What a tokenizer.json can be made from: a SentencePiece model, or a vocabulary and its merges.
_OLDER = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token

_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # names of a model's templates

_NOTHING: frozenset[int] = frozenset()


class Tokenizer(TransformersNames):
    """A `TextCodec` over the tokenizers library, with what a chat template needs to know."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        """`tool_template`: for chats with tools, where the model has another one for them."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.chat_template, self.tool_template = chat_template, tool_template
        self.generation_config = dict(generation_config or {})  # how its makers would sample
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)  # found in a text before anything else; special or not
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        decoder = backend.decoder and json.loads(backend.decoder.__getstate__())
        contents = {index: token.content for index, token in added.items()}
        self._literals = Literals(
            backend, {token.content: index for index, token in added.items() if token.special}
        )
        self._pieces = Pieces(backend.id_to_token, decoder, contents)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else self.backend.id_to_token(self.bos_id)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that are marks and not text, by name."""
        added = self.backend.get_added_tokens_decoder()
        return {added[index].content: index for index in sorted(self.special_ids)}

    def definition(self) -> str:
        """All of it, as a tokenizer.json has it."""
        text: str = self.backend.to_str()
        return text

    def vocab(self) -> dict[str, int]:
        """Every token as the vocabulary spells it."""
        vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocab

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        **asked: Any,
    ) -> list[int]:
        """Token ids. A text that is clearly longer than `max_tokens` is refused, mostly unread."""
        if max_tokens is not None:
            check_length(self.backend, text, max_tokens)
        ids = encode_text(self.backend, text, add_special_tokens=add_special_tokens)
        return as_asked("encode", ids, asked) if asked else ids

    def decode(
        self, ids: int | Sequence[int], *, skip_special_tokens: bool = True, **asked: Any
    ) -> str:
        if asked:
            check_asked("decode", asked)
        ids = [ids] if isinstance(ids, int) else ids
        return self._pieces.text(ids, self.special_ids if skip_special_tokens else _NOTHING)

    def token_id(self, name: str) -> int | None:
        """The token of this name, special or not; None where there is none."""
        index: int | None = self.backend.token_to_id(name)
        return index

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text; a special token's own name."""
        return self._pieces[token]

    def token_text(self, token: int) -> str:
        """The same as text, with the space before a word, which `decode` drops in some models."""
        return self._pieces[token].decode("utf-8", "replace")

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> PieceDetokenizer:
        skip = self.special_ids if skip_special_tokens else _NOTHING
        return PieceDetokenizer(self._pieces, skip, prompt_ids)

    def stop_matcher(self, stops: Sequence[str], include: bool) -> StopMatcher:
        return StopMatcher(stops, include)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        **values: Any,
    ) -> list[int]:
        """The conversation's prompt as tokens; `template` replaces the model's own.

        Names of special tokens in the messages are text. `max_tokens` is as for `encode`.
        """
        text, hidden = self._rendered(
            messages,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **values,
        )
        if hidden:
            if max_tokens is not None:
                check_length(self.backend, text, max_tokens)
            return self._literals.encode(text, hidden)
        # The template writes its own special tokens.
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        **values: Any,
    ) -> str:
        """The conversation's prompt as the template writes it; `render_chat`'s arguments."""
        text, hidden = self._rendered(messages, template=template, **values)
        return hidden.shown(text)

    def render_chats(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], *, template: str | None = None
    ) -> list[list[int]]:
        """`render_chat` for many conversations; their texts are encoded on all cores."""
        rendered = [self._rendered(messages, template=template) for messages in chats]
        plain = iter(encode_texts(self.backend, [text for text, hidden in rendered if not hidden]))
        return [
            self._literals.encode(text, hidden) if hidden else next(plain)
            for text, hidden in rendered
        ]

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> tuple[str, Hidden]:
        """The conversation's prompt as text, and the special tokens that messages name."""
        from hunch.text.template import render

        messages, hidden = self._literals.hide(messages)
        own = (tools and self.tool_template) or self.chat_template
        text = render(
            messages,
            template or own,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            tools=tools,
            **values,
        )
        return text, hidden


def load_tokenizer(files: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a directory in Hugging Face form, or of a GGUF file."""
    path = Path(files)
    if path.is_dir():
        return _from_directory(path)
    return _from_gguf(read_header(path).metadata, str(path))


def _from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    from hunch.text.gguf_tokenizer import build_tokenizer

    backend = build_tokenizer(metadata, where)
    ids: dict[str, int] = {}
    for key in ("bos", "eos", "eot", "eom"):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < backend.get_vocab_size():
            raise ModelFormatError(f"{where}: its {key} token {index!r} is not in the vocabulary")
        ids[key] = index
    template, for_tools = (
        value if isinstance(value := metadata.get(f"tokenizer.chat_template{name}"), str) else None
        for name in ("", f".{_FOR_TOOLS}")
    )
    return Tokenizer(
        backend,
        bos_id=ids.get("bos"),
        eos_ids=[ids[key] for key in ("eos", "eot", "eom") if key in ids],
        chat_template=template,
        tool_template=for_tools,
    )


def _from_directory(folder: Path) -> Tokenizer:
    settings = _read_json(folder / "tokenizer_config.json")
    backend = _backend(folder, settings)
    _add_tokens(backend, folder, settings)
    names = _read_json(folder / "special_tokens_map.json") | settings
    bos, eos = (_content(names.get(key)) for key in ("bos_token", "eos_token"))
    eos_ids = [] if eos is None else [backend.token_to_id(eos)]
    for file in ("generation_config.json", "config.json"):
        told = _read_json(folder / file).get("eos_token_id")
        if told is not None:
            eos_ids += told if isinstance(told, list) else [told]
            break
    bos_id = None if bos is None else backend.token_to_id(bos)
    if bos_id is None:
        bos_id = _read_json(folder / "config.json").get("bos_token_id")
    templates = _templates(folder, settings)
    return Tokenizer(
        backend,
        bos_id=bos_id if isinstance(bos_id, int) else None,
        eos_ids=[index for index in eos_ids if isinstance(index, int)],
        chat_template=templates.get(_DEFAULT) or next(iter(templates.values()), None),
        tool_template=templates.get(_FOR_TOOLS),
        generation_config=_read_json(folder / "generation_config.json"),
    )


def _backend(folder: Path, settings: Mapping[str, Any]) -> Backend:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ModelFormatError(f"{file} is damaged ({error}); download it again") from None
    if not any((folder / name).is_file() for name in _OLDER):
        raise ModelFormatError(
            f"{folder} has no tokenizer ({file.name}, {', '.join(_OLDER)}): copy it from the "
            "model's repository, or say where it is (tokenizer=PATH)"
        )
    if (pieces := folder / "tokenizer.model").is_file():
        from hunch.text.sentence_piece import sentence_piece_tokenizer

        made = sentence_piece_tokenizer(pieces, settings)
        if made is not None:
            return made
    # transformers can convert the others. Its import takes seconds, so nobody else pays for it.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = loaded.backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"{folder} has no tokenizer.json, and transformers cannot make one from what is there "
            f"({str(error).strip().splitlines()[0][:200] if str(error) else type(error).__name__})."
            " Copy tokenizer.json from the model's repository, or `pip install sentencepiece "
            "protobuf tiktoken`, which transformers reads older files with"
        ) from error
    assert isinstance(backend, Backend)
    return backend


def _add_tokens(backend: Backend, folder: Path, settings: Mapping[str, Any]) -> None:
    """Tokens that were added to a model and are named beside tokenizer.json alone.

    Only where they get the numbers that they are said to have, the next ones.
    """
    given = _read_json(folder / "added_tokens.json")
    told: dict[int, AddedToken] = {
        index: AddedToken(text, special=False, normalized=False)
        for text, index in given.items()
        if isinstance(index, int)
    }
    listed = settings.get("added_tokens_decoder")
    for index, token in (listed if isinstance(listed, dict) else {}).items():
        text = _content(token)
        if text and str(index).isdecimal():
            flags = {flag: token.get(flag) is True for flag in _FLAGS} if text != token else {}
            told[int(index)] = AddedToken(text, **flags)
    for index in sorted(told):
        if backend.get_vocab_size() == index and backend.token_to_id(told[index].content) is None:
            backend.add_tokens([told[index]])


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name: of files of their own, else of the tokenizer's settings, else of a processor's."""
    files = {_DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    found = {
        name: file.read_text(encoding="utf-8", errors="replace")
        for name, file in files.items()
        if file.is_file()
    }
    if found:
        return found
    for given in (settings, _read_json(folder / "chat_template.json")):
        template = given.get("chat_template")
        named = template if isinstance(template, list) else [{"template": template}]
        pairs = [(t.get("name", _DEFAULT), t.get("template")) for t in named if isinstance(t, dict)]
        found = {str(name): text for name, text in pairs if isinstance(text, str)}
        if found:
            return found
    return {}


def _content(token: Any) -> str | None:
    """A special token, written as text or as {"content": text, ...}."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON ({error}); download it again") from None
    return content if isinstance(content, dict) else {}
