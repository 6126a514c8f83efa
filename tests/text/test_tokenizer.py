"""Tokenizers from directories and GGUF files: there and back, special tokens, damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from hunch.errors import ModelFormatError, RequestError, UnsupportedModelError
from hunch.hub import ModelFiles
from hunch.text.gguf_tokenizer import build_tokenizer
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from tiny_gguf import random_tensors, write_gguf
from tiny_text import byte_level, byte_level_metadata, metaspace, sentence_piece, words

BYTES = byte_level()
TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "def f(x):\n\treturn {'a': x ** 2}  # done\n\n\n",
    "naïve café, Zürich; Привет, мир! 你好，世界。 こんにちは 안녕하세요 नमस्ते",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 👍🏽, math ∑∞≠√, marks e\u0301 \u200b|\u00a0|\u2028",
    "numbers 1234567890 3.14e-10 0xFF ½ ² ٣",
    "it's we're I'LL they'd don'T",
    "\r\n\t\x00\x07\x1b[0m",
    "a" * 1000 + " " * 100 + "\n" * 50,
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def default(default_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_files)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_default_model_there_and_back(default: Tokenizer, text: str) -> None:
    assert default.decode(default.encode(text), skip_special_tokens=False) == text


@given(text=st.text(max_size=60))
@settings(max_examples=40)
def test_any_text_there_and_back(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


def test_the_default_models_special_tokens(default: Tokenizer) -> None:
    assert default.vocab_size == 49152
    assert default.eos_ids == (2,)
    assert default.bos_token == "<|im_start|>"
    assert default.eos_token == "<|im_end|>"
    assert default.special_ids == frozenset(range(17))
    assert default.encode("<|im_start|>") == [1]
    assert default.encode("Hello world") == [19556, 905]  # no token is put before it
    assert default.vocab()["<|im_end|>"] == 2
    assert default.token_text(905) == " world"


def test_the_default_model_cuts_digits_and_space_like_its_training(default: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [default.token_text(token) for token in default.encode(text)]

    assert pieces("2024") == ["2", "0", "2", "4"]
    assert pieces("a\n\n4") == ["a", "\n\n", "4"]  # a digit does not pull the space to itself
    assert pieces("a  b") == ["a", " ", " b"]


def test_many_chats_are_those_chats_one_by_one(default: Tokenizer) -> None:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    assert default.render_chats(chats) == [default.render_chat(chat) for chat in chats]
    with pytest.raises(RequestError, match="half of a character"):
        default.render_chats([*chats, [{"role": "user", "content": "\ud800"}]])


def test_the_default_models_chat(default: Tokenizer) -> None:
    ids = default.render_chat([{"role": "user", "content": "Hi"}])
    assert default.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_decoding_agrees_with_the_tokenizers_library() -> None:
    for tokenizer in (byte_level(), sentence_piece(), words()):
        for token in range(tokenizer.vocab_size):
            ids = [token]
            if not 3 <= token < 259 or tokenizer.vocab_size < 270:  # single bytes: see below
                assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.backend.decode(
                    ids, skip_special_tokens=False
                )


def test_byte_tokens_make_characters() -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode("hello 😀 world", add_special_tokens=False)
    assert len(ids) == 7  # two words, a space, four bytes
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "hello 😀 world"
    assert tokenizer.decode(ids[:4]) == "hello \ufffd"


def test_sentence_piece_merges_by_score() -> None:
    tokenizer = sentence_piece()
    names = [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("hello world")]
    assert names == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_sentence_piece_merges_as_a_file_lists_them() -> None:
    tokens = ["<unk>", "▁", "a", "b", "ab", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 1, 1, 1, 1, 1, *[6] * 256]
    metadata = {"model": "gemma4", "tokens": tokens, "token_type": kinds, "merges": ["▁ a", "a b"]}
    metadata |= {"add_space_prefix": False, "add_bos_token": False}
    built = build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, "a file")
    assert built.encode(" ab\n").tokens == ["▁a", "b", "<0x0A>"]
    assert built.decode(built.encode(" ab\n").ids) == " ab\n"


def test_metaspace_decoders() -> None:
    tokenizer = metaspace()
    ids = tokenizer.encode("ab a b")
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "ab a b"


def test_ids_without_a_token_are_no_text() -> None:
    assert byte_level().decode([10**6]) == ""


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(RequestError, match="half of a character"):
        byte_level().encode("\ud800")
    with pytest.raises(RequestError, match="a text is needed; NoneType None given"):
        byte_level().encode(None, max_tokens=9)  # type: ignore[arg-type]


def test_a_text_that_the_tokenizer_fails_on() -> None:
    """Its vocabulary has no token for what it does not know, or its pattern gives up."""
    tokenizer = Tokenizer(Backend(WordLevel({"a": 0, "b": 1})))
    chat = [{"role": "user", "content": "odd"}]
    for ask in (tokenizer.encode, lambda text: tokenizer.render_chats([chat], template=text)):
        with pytest.raises(RequestError, match="this model's tokenizer cannot read the text: Word"):
            ask("odd")
    tokenizer.backend.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(RequestError, match="cannot read the text: Onig"):
        tokenizer.encode("a" * 40 + "b")


# --- GGUF metadata ------------------------------------------------------------------------------


def test_a_gguf_file_brings_its_tokenizer(tmp_path: Path) -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello world") == byte_level().encode("hello world")
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hey"}])) == "hey"


OTHER_WAYS = ("deepseek-llm", "deepseek-v3", "falcon", "glm4", "seed-coder", "stablelm2", "exaone4")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a  12", ["a", " ", " ", "1", "2"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "hello world!\n\n12345", None),
        ("qwen2", "hello world!\n\n12345", None),
        ("qwen35", "नमस्ते world!\n\n12345", None),
        ("tekken", "hello World 12", None),
        ("default", "hello, world 12345", None),
        ("command-r", "a 12", ["a", " ", "1", "2"]),
        *((pre, "Hello wörld, გამარჯობა 你好!\n\n 12345 .x", None) for pre in OTHER_WAYS),
    ],
)
def test_ways_to_cut_text(pre: str, text: str, expected: list[str] | None) -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level_metadata(pre), "test"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    if expected is not None:
        assert [tokenizer.token_text(token) for token in ids] == expected


@pytest.mark.parametrize(("pre", "has_bos"), [("llama-bpe", True), ("qwen2", False)])
def test_begin_tokens(pre: str, has_bos: bool) -> None:
    metadata = byte_level_metadata(pre)
    for told in (None, True, False):
        if told is not None:
            metadata["tokenizer.ggml.add_bos_token"] = told
        tokenizer = Tokenizer(build_tokenizer(metadata, "test"))
        begins = tokenizer.encode("a")[0] == metadata["tokenizer.ggml.bos_token_id"]
        assert begins == (has_bos if told is None else told)
        assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError),
        ({"tokenizer.ggml.model": 5}, ModelFormatError),
        ({"tokenizer.ggml.pre": "unheard-of"}, UnsupportedModelError),
        ({"tokenizer.ggml.tokens": []}, ModelFormatError),
        ({"tokenizer.ggml.tokens": "abc"}, ModelFormatError),
        ({"tokenizer.ggml.tokens": [1, 2]}, ModelFormatError),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ModelFormatError),
        ({"tokenizer.ggml.token_type": [1]}, ModelFormatError),
        ({"tokenizer.ggml.merges": ["q zz"]}, ModelFormatError),
        ({"tokenizer.ggml.merges": ["nospace"]}, ModelFormatError),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 9999},
            ModelFormatError,
        ),
    ],
)
def test_damaged_metadata(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"file\.gguf"):
        build_tokenizer(byte_level_metadata() | change, "file.gguf")


# --- directories --------------------------------------------------------------------------------


def directory(path: Path, **files: object) -> Path:
    path.mkdir()
    byte_level().backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        file = path / (name.replace("_json", ".json").replace("_jinja", ".jinja"))
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_directory(tmp_path: Path) -> None:
    end, begin = {"content": "<|end|>"}, "<|begin|>"
    settings = {"bos_token": begin, "eos_token": end, "chat_template": "T"}
    folder = directory(tmp_path / "m", tokenizer_config_json=settings)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    assert tokenizer.chat_template == "T"
    assert tokenizer.encode("hello") == byte_level().encode("hello")


def test_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    folder = directory(
        tmp_path / "m",
        tokenizer_config_json={"eos_token": "<|end|>"},
        generation_config_json={"eos_token_id": [5, 6]},
        config_json={"eos_token_id": 7},
    )
    end = byte_level().eos_ids[0]
    assert load_tokenizer(folder).eos_ids == (end, 5, 6)


def test_a_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = directory(tmp_path / "a", tokenizer_config_json={"chat_template": named})
    assert load_tokenizer(folder).chat_template == "yes"
    folder = directory(tmp_path / "b", tokenizer_config_json={}, chat_template_jinja="file")
    assert load_tokenizer(folder).chat_template == "file"


CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def said(tokenizer: Tokenizer, **values: Any) -> str:
    return tokenizer.decode(tokenizer.render_chat(CHAT, **values), skip_special_tokens=False)


@pytest.mark.parametrize("form", ["named", "files", "processor", "gguf"])
def test_a_template_for_tools_is_used_for_tools(tmp_path: Path, form: str) -> None:
    both = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}
    listed = [{"name": name, "template": text} for name, text in both.items()]
    if form == "gguf":
        keys = {
            "default": "tokenizer.chat_template",
            "tool_use": "tokenizer.chat_template.tool_use",
        }
        metadata = byte_level_metadata() | {keys[name]: text for name, text in both.items()}
        path = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata)
        tokenizer = load_tokenizer(path)
    elif form == "files":
        other = {"chat_template": "the files go before this"}
        folder = directory(
            tmp_path / "m", tokenizer_config_json=other, chat_template_jinja=both["default"]
        )
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(both["tool_use"])
        tokenizer = load_tokenizer(folder)
    else:
        name = "chat_template_json" if form == "processor" else "tokenizer_config_json"
        tokenizer = load_tokenizer(directory(tmp_path / "m", **{name: {"chat_template": listed}}))
    assert said(tokenizer) == said(tokenizer, tools=[]) == "plain"
    assert said(tokenizer, tools=TOOLS) == "with look"
    assert said(tokenizer, tools=TOOLS, template="given") == "given"


@pytest.mark.parametrize("form", ["added_tokens_decoder", "added_tokens.json"])
def test_tokens_that_are_named_beside_the_tokenizers_file_alone(tmp_path: Path, form: str) -> None:
    size = byte_level().vocab_size
    folder = directory(tmp_path / "m")
    if form == "added_tokens.json":
        (folder / form).write_text(json.dumps({"<one>": size, "<far>": size + 9}))
    else:
        added = {size: {"content": "<one>"}, size + 1: {"content": "<two>", "special": True}}
        odd = {"x": {"content": "no"}, "7": 7, str(size + 9): {"content": "<far>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps({form: {**added, **odd}}))
    tokenizer = load_tokenizer(folder)
    (token,) = tokenizer.encode("<one>", add_special_tokens=False)
    assert token == size
    assert tokenizer.decode([token]) == "<one>"
    assert tokenizer.token_id("<far>") is None
    if form == "added_tokens_decoder":
        assert tokenizer.special_tokens["<two>"] == size + 1


def test_a_processors_template_is_the_last_to_be_taken(tmp_path: Path) -> None:
    other = {"chat_template": "other"}
    folder = directory(tmp_path / "a", chat_template_json=other)
    assert load_tokenizer(folder).chat_template == "other"
    folder = directory(
        tmp_path / "b", chat_template_json=other, tokenizer_config_json={"chat_template": "own"}
    )
    assert load_tokenizer(folder).chat_template == "own"


def test_a_damaged_tokenizer_file(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(folder)


def test_older_directories_go_through_transformers(tmp_path: Path) -> None:
    """vocab.json and merges.txt alone, as OPT and GPT-2 have them."""
    folder = tmp_path / "m"
    folder.mkdir()
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"][:260], "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello you")) == "hello you"


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"no tokenizer .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_loading_brings_neither_torch_nor_transformers(default_files: ModelFiles) -> None:
    code = (
        "import sys; from hunch.text.tokenizer import load_tokenizer; "
        f"tokenizer = load_tokenizer({str(default_files.path)!r}); "
        "tokenizer.render_chat([dict(role='user', content='a')]); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_by_the_names_of_transformers() -> None:
    ours = byte_level()
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours.backend, eos_token="<|end|>")
    for text in ("hello world", "", "<|begin|>hello"):
        assert ours(text) == dict(theirs(text, return_token_type_ids=False))
        assert ours(text).input_ids == ours.encode(text)
        assert ours.tokenize(text) == theirs.tokenize(text)
    ids = ours(["hello", "world"], padding=False)["input_ids"]
    assert ids == theirs(["hello", "world"])["input_ids"]
    assert ours.batch_decode(ids) == theirs.batch_decode(ids)
    for names in ("hello", ["hello", "Ġworld"]):
        found = ours.convert_tokens_to_ids(names)
        assert found == theirs.convert_tokens_to_ids(names)
        assert ours.convert_ids_to_tokens(found) == names
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert ours.decode(ids[0][0]) == theirs.decode(ids[0][0])
    assert ours.all_special_tokens == ["<|begin|>", "<|end|>"]
    assert ours.pad_token_id == ours.eos_token_id == theirs.eos_token_id
    for name, value in {"return_tensors": "pt", "padding": True, "truncation": "only_last"}.items():
        with pytest.raises(RequestError, match=f"{name}=.* is not supported"):
            ours("hello", **{name: value})
    with pytest.raises(RequestError, match="'paddings' is not an argument of it"):
        ours.encode("hello", paddings=True)


def test_texts_are_cut_as_transformers_cuts_them() -> None:
    ours = byte_level()
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours.backend, eos_token="<|end|>")
    how = {"truncation": True, "max_length": 2}
    text = "hello world hello world"
    assert ours.encode(text, **how) == ours(text, **how).input_ids == theirs.encode(text, **how)
    assert len(ours.encode(text, **how)) == 2 < len(ours.encode(text, truncation=False))
    with pytest.raises(RequestError, match="needs max_length"):
        ours(text, truncation=True)
    chat, template = [{"role": "user", "content": text}], "{{ messages[0].content }}"
    cut = ours.apply_chat_template(chat, chat_template=template, **how)
    assert cut == ours.encode(text, **how)
    ids = ours.encode(text)
    assert ours.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids)


def test_a_chats_text_is_what_the_template_writes() -> None:
    """Not its tokens' text, which has a space behind a special token of SentencePiece's."""
    tokenizer = sentence_piece()
    chat = [{"role": "user", "content": "hello </s>"}]
    template = "{{ messages[0].content }}{{ eos_token }}\n<|user|>"
    text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert text == "hello </s></s>\n<|user|>"


def test_chats_by_the_names_of_transformers() -> None:
    tokenizer = byte_level()
    chat, template = [{"role": "user", "content": "hello"}], "{{ messages[0].content }}"
    ids = tokenizer.apply_chat_template(chat, chat_template=template, return_tensors=None)
    given = tokenizer.apply_chat_template(chat, chat_template=template, return_dict=True)
    assert given == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    with pytest.raises(RequestError, match=r"torch\.tensor"):
        tokenizer.apply_chat_template(chat, chat_template=template, return_tensors="pt")
    many = tokenizer.apply_chat_template([chat, chat], chat_template=template, return_dict=True)
    assert many.input_ids == [ids, ids]
    assert tokenizer.apply_chat_template([chat], chat_template=template) == [ids]
    texts = tokenizer.apply_chat_template([chat, chat], chat_template=template, tokenize=False)
    assert texts == ["hello", "hello"]
