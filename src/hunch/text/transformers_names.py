"""A tokenizer by the names that transformers has for its ways, for programs written for those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hunch.errors import RequestError

_ASKED = {  # arguments -> values that ask for what is done anyway, and what to do for others
    "return_tensors": ((None,), "token ids are lists: torch.tensor([ids]) makes a tensor of them"),
    "padding": ((None, False, "do_not_pad"), "prompts of different lengths are taken as they are"),
    "clean_up_tokenization_spaces": ((None, False), "spaces stay as the tokens have them"),
}
_WHOLE = (None, False, "do_not_truncate")
_CUTS = (True, "longest_first", "only_first")


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class TransformersNames:
    """What `AutoTokenizer` has too, over `encode`, `decode` and `render_chat`."""

    backend: Any
    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True, **asked: Any) -> list[int]:
        raise NotImplementedError

    def decode(
        self, ids: int | Sequence[int], *, skip_special_tokens: bool = True, **asked: Any
    ) -> str:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        raise NotImplementedError

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        raise NotImplementedError

    def vocab(self) -> dict[str, int]:
        raise NotImplementedError

    def token_id(self, name: str) -> int | None:
        raise NotImplementedError

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **asked: Any
    ) -> Encoded:
        """Tokens of one text, or of several."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens, **asked)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        many = [self.encode(one, add_special_tokens=add_special_tokens, **asked) for one in text]
        return Encoded(input_ids=many, attention_mask=[[1] * len(ids) for ids in many])

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return self.vocab()

    def batch_decode(self, many: Sequence[Sequence[int]], **how: Any) -> list[str]:
        return [self.decode(ids, **how) for ids in many]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return [self.backend.id_to_token(one) for one in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """None where the vocabulary has no such token."""
        if isinstance(tokens, str):
            return self.token_id(tokens)
        return [self.token_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """As the vocabulary spells them."""
        name_of = self.backend.id_to_token
        return name_of(ids) if isinstance(ids, int) else [name_of(int(one)) for one in ids]

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.backend.id_to_token(one) for one in self.all_special_ids]

    @property
    def bos_token_id(self) -> int | None:
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self.backend.id_to_token(self.eos_token_id)

    # Nothing is padded here; programs that pad do it with the end of text.
    pad_token_id, pad_token = eos_token_id, eos_token

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        return_dict: bool = False,
        **values: Any,
    ) -> Any:
        """`render_chat` by the name and defaults of transformers' tokenizers; text or tokens, of
        several conversations a list of them."""
        if conversation and isinstance(conversation[0], (list, tuple)):
            values |= {"tokenize": tokenize, "chat_template": chat_template}
            values |= {"add_generation_prompt": add_generation_prompt}
            each = [self.apply_chat_template(one, **values) for one in conversation]
            if not (tokenize and return_dict):
                return each
            return Encoded(input_ids=each, attention_mask=[[1] * len(ids) for ids in each])
        asked = {n: values.pop(n) for n in (*_ASKED, "truncation", "max_length") if n in values}
        values |= {"template": chat_template, "add_generation_prompt": add_generation_prompt}
        if not tokenize:
            as_asked("apply_chat_template", [], asked)
            return self.chat_text(conversation, **values)
        ids = as_asked("apply_chat_template", self.render_chat(conversation, **values), asked)
        return Encoded(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids


def check_asked(what: str, asked: Mapping[str, Any]) -> None:
    """Raise where an argument of transformers' asks for something that is not done."""
    for name, (values, instead) in _ASKED.items():
        if name in asked and asked[name] not in values:
            raise RequestError(f"{what}: {name}={asked[name]!r} is not supported: {instead}")
    if unknown := sorted(asked.keys() - _ASKED.keys()):
        raise RequestError(f"{what}: {unknown[0]!r} is not an argument of it")


def as_asked(what: str, ids: list[int], asked: Mapping[str, Any]) -> list[int]:
    """The tokens, cut where `truncation` says so."""
    rest = dict(asked)
    truncation, most = rest.pop("truncation", None), rest.pop("max_length", None)
    check_asked(what, rest)
    if truncation not in (*_WHOLE, *_CUTS):
        raise RequestError(f"{what}: truncation={truncation!r} is not supported; True cuts the end")
    if truncation in _WHOLE:
        return ids
    if not isinstance(most, int):
        raise RequestError(f"{what}: truncation=True needs max_length, a number of tokens")
    return ids[:most]
