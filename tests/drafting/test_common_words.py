"""The table of common words: read whole or not at all, and turned into tokens of any tokenizer."""

from __future__ import annotations

import lzma
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hunch.drafters import COMMON_WORDS
from hunch.drafting.common_words import common_successors, successors_of
from hunch.drafting.word_table import MAX_BYTES, NO_WORD, WordTable, read_words, write_words
from hunch.errors import ModelFormatError, RequestError
from hunch.hub import ModelFiles
from hunch.kernels.successor_entries import CERTAIN, ONE_TOKEN, WIDTH, Entries
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from tiny_text import byte_level

WORDS = [" the", " of", " world", " hello", "hello", ".", "\n\n"]
THE, OF, WORLD, SPACED, HELLO, END, LINES = range(len(WORDS))


def spelled(codec: Tokenizer, vocab_size: int) -> Entries:
    """Of the packaged table, whatever was kept."""
    return successors_of(read_words(COMMON_WORDS), codec, vocab_size)


def table() -> WordTable:
    """After " the" comes " world" or " hello", after " of the" " hello"; " of" is before " the"."""
    contexts = [  # first, last, how often, successors and their 255ths
        (NO_WORD, THE, 100, [(WORLD, 150), (SPACED, 50)]),
        (OF, THE, 40, [(SPACED, 200), (WORLD, 20)]),
        (NO_WORD, OF, 60, [(THE, 170)]),
        (NO_WORD, END, 30, [(LINES, 128), (WORLD, 16)]),
        (NO_WORD, LINES, 20, [(HELLO, 100)]),
    ]
    pairs = [pair for *_, following in contexts for pair in following]
    return WordTable(
        words=list(WORDS),
        total_W=np.array([100.0, 60, 40, 30, 25, 30, 20]),
        first_C=np.array([first for first, *_ in contexts], np.int32),
        last_C=np.array([last for _, last, *_ in contexts], np.int32),
        total_C=np.array([float(total) for *_, total, _ in contexts]),
        size_C=np.array([len(following) for *_, following in contexts]),
        next_E=np.array([word for word, _ in pairs], np.int32),
        chance_E=np.array([chance for _, chance in pairs]),
    )


def trained_byte_level() -> Tokenizer:
    backend = Backend(models.BPE(*merged(WORDS, "Ġ", {"\n": "Ċ"})))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def sentence_piece_bpe() -> Tokenizer:
    """As Llama 2: a space is put before every text."""
    backend = Backend(models.BPE(*merged(WORDS, "▁", {})))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def unigram() -> Tokenizer:
    """As T5: the same, by scores."""
    spelled = [word.replace(" ", "▁") for word in WORDS]
    letters = sorted(set("".join(spelled)) | {"a", "("})
    scores = [(piece, -1.0) for piece in spelled] + [(letter, -9.0) for letter in letters]
    backend = Backend(models.Unigram([("<unk>", -20.0), *dict(reversed(scores)).items()], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def merged(
    words: Sequence[str], space: str, others: dict[str, str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary whose merges make each word one token, from its left to its right."""
    spelled = [word.replace(" ", space) for word in words]
    for character, name in others.items():
        spelled = [word.replace(character, name) for word in spelled]
    merges = [(word[:at], word[at]) for word in spelled for at in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    pieces = [*sorted(set("".join(spelled)) | {"a", "(", space}), *(a + b for a, b in merges)]
    return {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}, merges


def found(entries: Entries, tokenizer: Tokenizer) -> dict[tuple[str, ...], list[str]]:
    """Contexts and their successors, as text."""
    by_context: dict[tuple[str, ...], list[str]] = {}
    columns = (entries.first_E, entries.last_E, entries.next_E)
    for first, last, successor in zip(*(column.tolist() for column in columns), strict=True):
        context = [last] if first == ONE_TOKEN else [first, last]
        texts = tuple(map(tokenizer.token_text, context))
        by_context.setdefault(texts, []).append(tokenizer.token_text(successor))
    return by_context


@pytest.fixture(scope="module")
def default(default_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_files)


@pytest.fixture(scope="module")
def shipped(default: Tokenizer) -> Entries:
    return spelled(default, default.vocab_size)


@pytest.mark.parametrize("make", [trained_byte_level, sentence_piece_bpe, unigram])
def test_every_tokenizer_gets_the_same_words(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    after = found(successors_of(table(), tokenizer, tokenizer.vocab_size), tokenizer)
    assert after[(" the",)] == [" world", " hello"]
    assert after[(" of", " the")] == [" hello", " world"]
    assert after[(" of",)] == [" the"]
    assert after[(".",)] == ["\n\n", " world"]
    assert after[("\n\n",)] == ["hello"]  # at the start of a line, without a space


def test_words_of_several_tokens() -> None:
    tokenizer = byte_level()  # " world" and "hello" are tokens; of the others, the characters
    after = found(successors_of(table(), tokenizer, tokenizer.vocab_size), tokenizer)
    assert after[(" ",)] == ["t", "o", "hello"]  # by how often each word was seen
    assert after[(" ", "t")] == ["he"]
    assert after[("t", "he")] == [" world", " "]  # the last two of " the"
    assert after[(" ", "o")] == ["f"]
    assert after[("f", " ")] == ["t"]  # from " of" into " the"


def test_chances_are_those_of_the_table() -> None:
    tokenizer = trained_byte_level()
    entries = successors_of(table(), tokenizer, tokenizer.vocab_size)
    the, of = (tokenizer.encode(word)[0] for word in (" the", " of"))
    chosen = (entries.last_E == the) & (entries.first_E == of)
    assert entries.chance_E[chosen].tolist() == [200, 20]
    assert entries.chance_E[(entries.last_E == the) & (entries.first_E < 0)].tolist() == [150, 50]


def test_likely_words_come_first(default: Tokenizer, shipped: Entries) -> None:
    after = found(shipped, default)
    assert after[(" such",)][0] == " as"
    assert after[(" in", " order")][0] == " to"
    assert after[(" as", " well")][0] == " as"
    assert after[(" of",)][0] == " the"
    assert " return" in after[(":", "\n   ")]


def test_what_entries_promise(default: Tokenizer, shipped: Entries) -> None:
    first_E, last_E = shipped.first_E.astype(np.int64), shipped.last_E.astype(np.int64)
    assert len(shipped.next_E) > 100_000
    for tokens in (last_E, shipped.next_E):
        assert 0 <= tokens.min() <= tokens.max() < default.vocab_size
    assert ONE_TOKEN == first_E.min() <= first_E.max() < default.vocab_size
    assert 1 <= shipped.chance_E.min() <= shipped.chance_E.max() <= CERTAIN
    context_E = (first_E + 1) * default.vocab_size + last_E
    starts = np.nonzero(np.diff(context_E, prepend=-1))[0]
    assert len(np.unique(context_E)) == len(starts)  # each context once
    sizes = np.diff(starts, append=len(context_E))
    assert sizes.max() == WIDTH
    chance_E = shipped.chance_E.astype(np.int64)
    assert np.add.reduceat(chance_E, starts).max() <= CERTAIN
    is_within = np.diff(context_E) == 0
    assert (np.diff(chance_E)[is_within] <= 0).all()
    successor_E = context_E * default.vocab_size + shipped.next_E
    assert len(np.unique(successor_E)) == len(successor_E)


def test_frequent_contexts_come_first() -> None:
    tokenizer = trained_byte_level()
    entries = successors_of(table(), tokenizer, tokenizer.vocab_size)
    contexts = list(found(entries, tokenizer))
    assert contexts.index((" the",)) < contexts.index((" of",)) < contexts.index((".",))


def test_tokens_past_the_targets_vocabulary_are_left_out(default: Tokenizer) -> None:
    entries = spelled(default, 1000)
    assert len(entries.next_E) > 1000
    for tokens in (entries.first_E, entries.last_E, entries.next_E):
        assert tokens.max() < 1000


def test_a_tokenizer_that_spells_none_of_them(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(Backend(models.WordLevel({"[unk]": 0, "好": 1}, unk_token="[unk]")))
    with caplog.at_level("INFO", "hunch.drafting.common_words"):
        assert len(spelled(tokenizer, 2).next_E) == 0
    assert "cannot spell" in caplog.text


def test_words_that_a_tokenizer_fails_on_are_left_out() -> None:
    vocab = {"a": 0, " ": 1, ".": 2, "\n": 3, "(": 4, "the": 5, " the": 6, " world": 7}
    backend = Backend(models.WordLevel(vocab, unk_token="?"))  # which is none
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\W"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend)
    with pytest.raises(RequestError):
        tokenizer.encode(" hello")
    after = found(successors_of(table(), tokenizer, len(vocab)), tokenizer)
    assert after[(" the",)] == [" world"]
    assert (" of", " the") not in after


def test_it_does_not_keep_a_start_waiting(default: Tokenizer) -> None:
    start = time.process_time()
    spelled(default, default.vocab_size)
    assert time.process_time() - start < 5  # some 0.8 on an idle core


def test_a_table_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "words.xz"
    write_words(table(), path)
    read = read_words(path)
    assert read.words == WORDS
    for name in ("first_C", "last_C", "size_C", "next_E"):
        assert getattr(read, name).tolist() == getattr(table(), name).tolist()
    for name in ("total_W", "total_C", "chance_E"):
        assert getattr(read, name) == pytest.approx(getattr(table(), name), rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_file_cut_short_says_so(share: float, tmp_path: Path) -> None:
    data = COMMON_WORDS.read_bytes()
    path = tmp_path / "words.xz"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFormatError, match=r"words\.xz: not a table of words, or damaged"):
        read_words(path)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("firsts", len(WORDS) + 1, "names words"),
        ("last_steps", len(WORDS), "names words"),
        ("nexts", len(WORDS) + WIDTH, "names words"),
        ("nexts", 2, "does not have"),
        ("sizes", WIDTH + 1, "1 to 8 successors"),
        ("sizes", 0, "1 to 8 successors"),
        ("sizes", 2, "do not fit together"),
        ("chance_levels", 255, "below one in 255"),
    ],
)
def test_numbers_that_cannot_be(name: str, value: int, why: str, tmp_path: Path) -> None:
    path = tmp_path / "words.xz"
    write_words(table(), path)
    stored = load(lzma.decompress(path.read_bytes()))
    stored[name][-1] = value
    path.write_bytes(lzma.compress(save(stored)))
    with pytest.raises(ModelFormatError, match=why):
        read_words(path)


def test_ranks_that_a_word_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "words.xz"
    write_words(table(), path)
    stored = load(lzma.decompress(path.read_bytes()))
    assert stored["nexts"].tolist()[2:4] == [1, 0]  # " hello" and " world", after " of the"
    stored["nexts"][2] = 2
    path.write_bytes(lzma.compress(save(stored)))
    with pytest.raises(ModelFormatError, match="does not have"):
        read_words(path)


@pytest.mark.parametrize(
    ("stored", "why"),
    [({}, "words"), ({"words": np.zeros(4, np.float32)}, "not a list of uint8")],
)
def test_another_file(stored: dict[str, np.ndarray], why: str, tmp_path: Path) -> None:
    path = tmp_path / "words.xz"
    path.write_bytes(lzma.compress(save(stored)))
    with pytest.raises(ModelFormatError, match=why):
        read_words(path)


def test_a_file_that_grows_without_end(tmp_path: Path) -> None:
    path = tmp_path / "words.xz"
    path.write_bytes(lzma.compress(bytes(MAX_BYTES + 1), preset=0))
    with pytest.raises(ModelFormatError, match="too large"):
        read_words(path)


def test_it_has_a_card_and_is_small() -> None:
    card = (COMMON_WORDS.parent / "README.md").read_text()
    for part in ("Measured", "Data", "Recipe", "icence"):
        assert part in card
    assert COMMON_WORDS.stat().st_size <= 1_000_000


def test_successors_are_kept_for_the_next_start(
    default: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file is made anew; a folder that cannot be written to costs time alone."""
    size = default.vocab_size
    first = spelled(default, size)
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path))

    def agrees(found: Entries) -> bool:
        pairs = ((getattr(found, name), getattr(first, name)) for name in Entries.__slots__)
        return all(np.array_equal(one, other) for one, other in pairs)

    assert agrees(common_successors(default, size))
    (file,) = (tmp_path / "words").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("hunch.drafting.common_words.successors_of", None)
        assert agrees(common_successors(default, size))
    file.write_bytes(file.read_bytes()[:1000])
    assert agrees(common_successors(default, size))
    assert agrees(common_successors(default, size))
    monkeypatch.setenv("HUNCH_CACHE", str(file))
    assert agrees(common_successors(default, size))


def test_small_vocabularies_have_no_tokens_for_words() -> None:
    assert len(common_successors(trained_byte_level(), 100)) == 0
