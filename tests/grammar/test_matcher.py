"""A matcher tells what may follow every node of a draft, and is back in its place afterwards."""

import random
from collections import Counter

import numpy as np
import pytest
from llguidance import LLMatcher

from hunch.grammar import masks
from hunch.grammar.compile import GrammarCompiler, _tokenizer_of
from hunch.grammar.masks import Job, fill_all
from hunch.grammar.matcher import Grammar, Matcher
from hunch.grammar.spellings import Spellings
from hunch.step.grammars import RowGrammars
from hunch.step.rows import Nodes
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import StructuredOutput
from tiny_models import write_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "model": {"enum": ["ab", "abc", "d"]},
        "token": {"type": "integer", "maximum": 99},
    },
    "required": ["model", "token"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def grammar(tokenizer: Tokenizer) -> Grammar:
    return GrammarCompiler(tokenizer)(StructuredOutput(json=SCHEMA))


def fill(matcher: Matcher, tokens: list[int], parents: list[int], mask_MV: np.ndarray) -> None:
    """The words that a matcher writes, as booleans."""
    mask_MW = np.zeros((len(mask_MV), -(-mask_MV.shape[1] // 32)), dtype=np.int32)
    matcher.fill(tokens, parents, mask_MW)
    bits = np.unpackbits(mask_MW.view(np.uint8), axis=1, bitorder="little")
    mask_MV[:] = bits[:, : mask_MV.shape[1]]


def plain_mask(grammar: Grammar, tokens: list[int], size: int) -> np.ndarray:
    """What may follow, from a matcher that read nothing else."""
    matcher = grammar.matcher()
    mask_MV = np.zeros((1, size), dtype=np.bool_)
    if matcher.consume(tokens) == len(tokens):
        fill(matcher, [], [], mask_MV)
    return mask_MV[0]


def random_tree(
    rng: random.Random, grammar: Grammar, text: list[int], size: int
) -> tuple[list[int], list[int]]:
    """Nodes that mostly follow the grammar."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for _ in range(12):
        parent = rng.randint(-1, len(tokens) - 1)
        path = paths[parent] if parent >= 0 else []
        allowed = np.flatnonzero(plain_mask(grammar, text + path, size)).tolist()
        token = rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(size)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            paths.append([*path, token])
    return tokens, parents


def test_masks_of_a_tree_are_those_of_its_paths(grammar, tokenizer):
    rng = random.Random(0)
    size = tokenizer.vocab_size + 7  # logits may be wider than the vocabulary
    text = tokenizer.encode('{"model": "a')
    matcher = grammar.matcher()
    assert matcher.consume(text) == len(text)
    for _ in range(25):
        tokens, parents = random_tree(rng, grammar, text, size)
        mask_MV = np.zeros((1 + len(tokens), size), dtype=np.bool_)
        fill(matcher, tokens, parents, mask_MV)
        for node in range(-1, len(tokens)):
            path: list[int] = []
            at = node
            while at >= 0:
                path.insert(0, tokens[at])
                at = parents[at]
            expected = plain_mask(grammar, text + path, size)
            assert (mask_MV[node + 1] == expected).all()
        assert not mask_MV[:, tokenizer.vocab_size :].any()
    rest = tokenizer.encode('b", "token": 7}')
    assert matcher.consume(rest) == len(rest)  # the looks ahead left no trace


def test_forced_text_is_guessed_to_its_end(grammar, tokenizer):
    matcher = grammar.matcher()
    assert tokenizer.decode(matcher.forced(50)) == '{"model": "'
    assert len(matcher.forced(3)) == 3
    matcher.consume(tokenizer.encode('{"model": "d'))
    assert tokenizer.decode(matcher.forced(50)) == '", "token": '
    matcher.consume(tokenizer.encode('", "token": 42'))
    assert tokenizer.decode(matcher.forced(50), skip_special_tokens=False) == "}<|end|>"
    matcher.consume(matcher.forced(50))
    assert matcher.forced(50) == []


def test_nothing_follows_the_end(grammar, tokenizer):
    end = tokenizer.eos_ids[0]
    text = tokenizer.encode('{"model": "d", "token": 1}')
    matcher = grammar.matcher()
    assert matcher.consume([*text[:-1], end]) == len(text) - 1  # not before it is complete
    assert matcher.consume([text[-1], end, end, text[0]]) == 2
    mask_MV = np.zeros((2, tokenizer.vocab_size), dtype=np.bool_)
    fill(matcher, [end], [-1], mask_MV)
    assert not mask_MV.any()


def test_end_of_text_inside_a_draft(grammar, tokenizer):
    end = tokenizer.eos_ids[0]
    matcher = grammar.matcher()
    matcher.consume(tokenizer.encode('{"model": "d", "token": 1'))
    (close,) = tokenizer.encode("}")
    mask_MV = np.zeros((4, tokenizer.vocab_size), dtype=np.bool_)
    fill(matcher, [close, end, close], [-1, 0, 1], mask_MV)
    assert mask_MV[0, close]
    assert not mask_MV[0, end]
    assert np.flatnonzero(mask_MV[1]).tolist() == [end]
    assert not mask_MV[2:].any()


class Failing:
    """A matcher of the grammar engine that meets its limits at one place."""

    def __init__(self, real, depth: int) -> None:
        self.real, self.depth, self.is_broken = real, depth, False

    def compute_bitmask(self):
        self.is_broken = self.is_broken or self.depth == 0
        return self.real.compute_bitmask()

    def try_consume_tokens(self, tokens):
        self.depth -= len(tokens)
        return 0 if self.is_broken else self.real.try_consume_tokens(tokens)

    def rollback(self, count):
        self.depth += count
        return not self.is_broken and self.real.rollback(count)

    def is_error(self) -> bool:
        return self.is_broken

    def get_error(self) -> str:
        return "too many items" if self.is_broken else ""

    def __getattr__(self, name):
        return getattr(self.real, name)


class WithoutMasks(Failing):
    """One that must not be asked for a mask."""

    def compute_bitmask(self):
        raise AssertionError("a mask was asked for")

    def unsafe_compute_mask_ptr(self, *_):
        raise AssertionError("a mask was asked for")


def test_a_mask_that_cannot_be_told_fails_closed_and_harms_no_other_branch(grammar, tokenizer):
    text = tokenizer.encode('{"model": "')
    a, b, d = (tokenizer.encode(c)[0] for c in "abd")
    tokens, parents = [a, b, d], [-1, 0, -1]
    sound = np.zeros((4, tokenizer.vocab_size), dtype=np.bool_)
    matcher = grammar.matcher()
    matcher.consume(text)
    fill(matcher, tokens, parents, sound)
    broken = np.zeros_like(sound)
    matcher._parser = Failing(matcher.parser, depth=2)  # fails after "ab"
    fill(matcher, tokens, parents, broken)
    assert (broken[[0, 1, 3]] == sound[[0, 1, 3]]).all()
    assert not broken[2].any()
    assert matcher.problem().startswith("the grammar became too complex: too many items")
    assert matcher.consume([a, b]) == 2  # the row itself can go on


class FailingAt(Failing):
    """One that meets its limits as it consumes the token after `depth` others."""

    def try_consume_tokens(self, tokens):
        self.is_broken = self.is_broken or self.depth == 0
        return super().try_consume_tokens(tokens)


def test_a_guess_at_which_the_engine_fails_leaves_no_trace(grammar, tokenizer):
    text = tokenizer.encode('{"model": "')
    a, b, c, d = (tokenizer.encode(one)[0] for one in "abcd")
    matcher = grammar.matcher()
    matcher.consume(text)
    matcher._parser = FailingAt(matcher.parser, depth=2)
    assert matcher.branch(a)
    assert matcher.branch(b)
    assert not matcher.branch(c)  # it would be allowed
    matcher.back(1)
    assert not matcher.branch(d)  # what follows is still asked after "a"
    assert matcher.branch(b)
    matcher.back(2)
    mask_MV = np.zeros((1, tokenizer.vocab_size), dtype=np.bool_)
    fill(matcher, [], [], mask_MV)
    assert (mask_MV[0] == plain_mask(grammar, text, tokenizer.vocab_size)).all()
    assert matcher.consume([a, b, c]) == 3


def test_a_draft_may_be_longer_than_calls_may_be_deep(tokenizer):
    matcher = GrammarCompiler(tokenizer)(StructuredOutput(regex="[ab]*")).matcher()
    tokens, parents = tokenizer.encode("ab" * 700), list(range(-1, 1399))
    grammars = RowGrammars()
    grammars.matchers[0] = matcher
    fitted = grammars.fit(0, Nodes(np.array(tokens), np.array(parents)), len(tokens))
    assert fitted is not None
    assert fitted.tokens_N.tolist() == tokens
    mask_MV = np.zeros((1 + len(tokens), tokenizer.vocab_size), dtype=np.bool_)
    fill(matcher, tokens, parents, mask_MV)
    assert mask_MV[:, tokens[0]].all()


def test_a_draft_of_forced_tokens_alone_is_told_as_the_grammars(grammar):
    """In figures by method its name would be empty, or that of a drafter that guessed wrong."""
    grammars = RowGrammars()
    grammars.matchers[0] = grammar.matcher()
    forced = grammars.fit(0, None, 8)
    assert forced is not None
    assert forced.method == "grammar"
    tokens = forced.tokens_N[:1]
    kept = grammars.fit(0, Nodes(tokens, np.array([-1]), method="ngram"), 8)
    assert kept is not None
    assert kept.method == "ngram"
    refused = grammars.fit(0, Nodes(tokens + 1, np.array([-1]), method="ngram"), 8)
    assert refused is not None
    assert refused.method == "grammar"


def test_a_matcher_is_of_one_sequence(grammar, tokenizer):
    one, other = grammar.matcher(), grammar.matcher()
    assert isinstance(one, Matcher)
    one.consume(tokenizer.encode('{"model"'))
    assert tokenizer.decode(other.forced(50)) == '{"model": "'


def test_many_sequences_at_once_have_the_masks_of_each(grammar, tokenizer):
    end = tokenizer.eos_ids[0]
    rng = random.Random(1)
    text = tokenizer.encode('{"model": "a')
    word = tokenizer.encode('b", "token": 1}')
    drafts = [([], []), (word, list(range(-1, len(word) - 1))), ([*word[:2], end], [-1, 0, 1])]
    drafts += [random_tree(rng, grammar, text, tokenizer.vocab_size) for _ in range(3)]
    drafts.append(([word[0], word[0]], [-1, 0]))
    num_words, first, jobs = -(-(tokenizer.vocab_size + 50) // 32), 0, []
    for tokens, parents in drafts:
        matcher = grammar.matcher()
        assert matcher.consume(text) == len(text)
        jobs.append(Job(matcher, tokens, parents, first))
        first += 1 + len(tokens)
    over = grammar.matcher()
    over.consume([*text, *word, end])
    jobs.append(Job(over, [], [], first))
    apart, together = (np.zeros((first + 1, num_words), dtype=np.int32) for _ in "ab")
    for job in jobs:
        job.matcher.fill(
            job.tokens, job.parents, apart[job.first : job.first + 1 + len(job.tokens)]
        )
    fill_all(jobs, together)
    assert (apart == together).all()
    assert apart.any()


BOUNDED = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def test_long_masks_come_from_other_threads_and_are_the_same(tokenizer, monkeypatch):
    """Inside a string and outside of one."""
    grammar = GrammarCompiler(tokenizer)(StructuredOutput(json=BOUNDED))
    text = tokenizer.encode('{"name": "a model", "size": 12}')
    num_words = -(-tokenizer.vocab_size // 32)
    for least in (0.0, 1.0):
        monkeypatch.setattr(masks, "MIN_SHARED", least)
        monkeypatch.setattr(masks, "_COSTS", masks._Costs())
        matchers = [grammar.matcher() for _ in text]
        for place in range(len(text)):
            jobs = [Job(one, [], [], number) for number, one in enumerate(matchers)]
            apart, together = (np.zeros((len(jobs), num_words), dtype=np.int32) for _ in "ab")
            together[:] = -1
            for number, matcher in enumerate(matchers):
                matcher.fill([], [], apart[number : number + 1])
            fill_all(jobs, together)
            assert (apart == together).all()
            for number, matcher in enumerate(matchers):  # each a little behind the one before
                if number <= place:
                    assert matcher.consume([text[place - number]]) == 1
        assert bool(masks._COSTS._executors) == (least == 0.0)


def test_a_forced_text_needs_no_mask_of_the_engine(grammar, tokenizer):
    """Its only token is known once one sequence asked, and is what the engine's mask allows."""
    text = tokenizer.encode('{"model": "ab", "token": 1}')
    num_words, num_known = -(-tokenizer.vocab_size // 32), [0, 0]
    for number in range(2):
        matcher = grammar.matcher()
        for token in text:
            apart, together = (np.zeros((1, num_words), dtype=np.int32) for _ in "ab")
            matcher.fill([], [], apart)
            together[:] = -1
            place = matcher.parser
            if matcher._forced_text() in grammar.spellings:
                num_known[number] += 1
                matcher._parser = WithoutMasks(place, depth=99)
                matcher.parser.compute_ff_tokens = None
            fill_all([Job(matcher, [], [], 0)], together)
            matcher._parser = place
            assert (apart == together).all()
            assert matcher.consume([token]) == 1
    assert num_known[1] > 2


class Counting:
    """Like a matcher of the engine, but its calls are counted."""

    def __init__(self, inner):
        self.inner, self.calls = inner, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.inner, name)


def test_inside_a_forced_text_the_engine_is_not_asked(tokenizer):
    """What is forced after each token is known from the text before it."""
    grammar = GrammarCompiler(tokenizer)(StructuredOutput(json=SCHEMA))
    text = tokenizer.encode('{"model": "ab", "token": 1}')
    calls = []
    for _ in range(2):
        matcher = grammar.matcher()
        matcher._parser = counting = Counting(matcher._parser)
        for place, token in enumerate(text):
            other = grammar.matcher()
            other.consume(text[:place])
            assert matcher._forced_text() == other._forced_text()
            assert matcher.consume_chosen([token], 0) == 1
        assert matcher.may_end()
        calls.append(counting.calls)
    # A text that may be the beginning of a longer token is spelled by the engine the first time.
    assert calls[0]["compute_ff_tokens"] > 0
    assert calls[1]["compute_ff_tokens"] == 0
    assert calls[1]["try_consume_tokens"] < len(text) / 2


def test_a_spelling_that_what_follows_may_change_is_not_kept():
    """After `: ` an enum may leave one token, and a string any that begins with it."""
    pieces = [b'"', b' "', b' "A', b"name", b"{", b"e:"]
    spellings = Spellings(pieces)
    for text, piece, is_kept in [
        (b' "', b' "', False),  # ' "A' may come
        (b' "na', b' "', True),  # no token goes on from '"na', nor from ' "na'
        (b"name", b"name", False),  # spelled otherwise where 'e:' may come
        (b"name", b"n", True),
        (b"nam", b"n", False),
        (b"{e", b"{", True),  # the first token stands in any case
        (b"{e", b"{e", False),  # here it would be another
    ]:
        spellings.keep((7, text), 3, piece)
        assert ((7, text) in spellings) == is_kept, text
        assert spellings.only((7, text)) == (3 if is_kept else None)
        rest = text[len(piece) :] if text.startswith(piece) else b""
        assert spellings.after((7, text)) == (3, rest)
        assert (8, text) not in spellings
        spellings = Spellings(pieces)


@pytest.mark.parametrize(
    "asked", [{"json": SCHEMA}, {"json": BOUNDED}, {"regex": "(model|mode) a{2,9} guess(es)?"}]
)
def test_choices_without_a_mask_are_taken_as_a_mask_would(asked, tokenizer):
    """Also those whose forced text was spelled before, by this sequence or another."""
    grammar, rng = GrammarCompiler(tokenizer)(StructuredOutput(**asked)), random.Random(5)
    num_known = num_refused = 0
    for _ in range(30):
        matcher = grammar.matcher()
        mask_MV = np.zeros((1, tokenizer.vocab_size), dtype=np.bool_)
        words = np.zeros((1, -(-tokenizer.vocab_size // 32)), dtype=np.int32)
        for _ in range(24):
            fill(matcher, [], [], mask_MV)
            allowed = np.flatnonzero(mask_MV).tolist()
            fill_all([Job(matcher, [], [], 0)], words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            assert np.flatnonzero(bits).tolist() == allowed
            ahead = matcher.forced(8)[:1]  # the engine's own, or one that merely fits
            others = [t for t in range(tokenizer.vocab_size) if matcher.parser.validate_tokens([t])]
            others = [*others, rng.randrange(tokenizer.vocab_size)]
            token = rng.choice([*allowed[:50], *ahead, *others[:50]])
            num_known += matcher._forced_text() in grammar.spellings
            place, matcher._parser = matcher.parser, WithoutMasks(matcher.parser, depth=99)
            is_taken = matcher.consume_chosen([token], 0) == 1
            matcher._parser = place
            assert is_taken == (token in allowed)
            if not is_taken:
                num_refused += 1
                assert not matcher.can_wait()  # the next choice has a mask
                token = rng.choice(allowed)
                assert matcher.consume([token]) == 1
            if token in tokenizer.eos_ids:
                break
    assert num_refused > 5
    assert num_known > 50 or "regex" in asked


def test_what_is_known_of_tokens_beforehand_changes_no_mask(tokenizer):
    """The engine's shortcuts inside strings, beside masks that are made without any."""
    known = _tokenizer_of(tokenizer)
    source = LLMatcher.grammar_from_json_schema(BOUNDED)
    fast, plain = LLMatcher(known, source), LLMatcher(known.with_slices([]), source)
    for token in tokenizer.encode('{"name": "a model", "size": 12}'):
        assert fast.compute_bitmask() == plain.compute_bitmask()
        assert fast.consume_token(token)
        assert plain.consume_token(token)


@pytest.mark.parametrize("is_tree", [False, True])
def test_masks_of_drafts_hold_where_a_guess_is_forbidden(is_tree, grammar, tokenizer):
    """Chains are read in place, trees beside it; nothing may follow a forbidden guess."""
    text, rng = tokenizer.encode('{"model": "a'), random.Random(3)
    word = tokenizer.encode('b", "token": 1}')
    jobs, first = [], 0
    for forbidden in range(len(word)):
        tokens = [*word[:forbidden], rng.randrange(tokenizer.vocab_size), *word[forbidden + 1 :]]
        parents = list(range(-1, len(tokens) - 1))
        if is_tree:
            tokens, parents = [*tokens, word[0]], [*parents, -1 if tokens[0] != word[0] else 0]
        matcher = grammar.matcher()
        matcher.consume(text)
        jobs.append(Job(matcher, tokens, parents, first))
        first += 1 + len(tokens)
    num_words = -(-tokenizer.vocab_size // 32)
    apart, together = (np.zeros((first, num_words), dtype=np.int32) for _ in "ab")
    for job in jobs:
        here = slice(job.first, job.first + 1 + len(job.tokens))
        job.matcher.fill(job.tokens, job.parents, apart[here])
        together[job.first] = -1
    fill_all(jobs, together)
    assert (apart == together).all()
