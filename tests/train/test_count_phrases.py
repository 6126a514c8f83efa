"""A phrase table counted from a target's answers guesses better than the request's text alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from train_setup import ENGINE, check_no_text_changes, new_job

from hunch import LLM
from hunch.errors import ConfigError
from hunch.kernels.phrases import FILE, NUM_LEVELS, read_phrases
from hunch.kernels.successor_entries import CERTAIN
from hunch.kernels.successors import Successors
from hunch.train.job import run_job
from hunch.train.phrases import Counting, count, make_table, replay
from hunch.train.progress import Progress
from hunch.train.texts import Texts

VOCAB = 100
PHRASE = [11, 12, 13, 14]  # most texts say it once, between words that never come again


def texts_of(num_texts: int, seed: int = 0) -> Texts:
    rng = np.random.default_rng(seed)
    texts = [
        [*rng.integers(20, VOCAB, 5), *PHRASE, *rng.integers(20, VOCAB, 4)]
        for _ in range(num_texts)
    ]
    offset = np.cumsum([0, *map(len, texts)])
    return Texts(np.concatenate(texts).astype(np.int64), offset, np.full(num_texts, 2))


def test_what_is_said_often_is_kept_and_the_rest_is_not() -> None:
    table = make_table(texts_of(200), VOCAB, Counting())
    assert table.find([50, 11])[0] == 12  # type: ignore[index]
    assert table.find([11, 12, 13])[0] == 14  # type: ignore[index]
    assert len(table.hash_E) < 20
    assert table.level_E.max() == NUM_LEVELS - 1


def test_nothing_of_prompts_is_counted() -> None:
    texts = texts_of(200)
    texts.prompt_len[:] = 10  # the phrase is the user's
    assert make_table(texts, VOCAB, Counting()).find([11, 12]) is None


def test_successors_are_counted_for_trees(tmp_path: Path) -> None:
    """Of answers alone, and as a file has them."""
    data = make_table(texts_of(200), VOCAB, Counting()).files()
    save_file(data, tmp_path / FILE)
    known = read_phrases(tmp_path, VOCAB).successors
    assert known is not None
    successors = Successors.create(VOCAB, "cpu", known)
    (token, chance), *_ = successors.find(12, 13)
    assert (token, chance > 0.9 * CERTAIN**2) == (14, True)
    assert [token for token, _ in successors.find(-1, 11)] == [12]
    save_file({**data, "successors_next": data["successors_next"] + VOCAB}, tmp_path / FILE)
    with pytest.raises(ConfigError, match="target does not have"):
        read_phrases(tmp_path, VOCAB)


def test_what_the_own_text_knows_needs_no_entry() -> None:
    """A text that repeats itself is guessed from itself."""
    lines = [[i, *PHRASE] * 12 for i in range(20, 60)]
    texts = Texts(np.concatenate(lines), np.cumsum([0, *map(len, lines)]), np.full(len(lines), 50))
    assert len(count(replay(texts, 3), Counting(max_order=3)).hash_E) == 0


def test_few_texts_make_a_table_too() -> None:
    for num_texts in (1, 2, 6):
        table = make_table(texts_of(num_texts), VOCAB, Counting())
        assert np.isfinite(table.own_odds).all()
        table.find([11, 12])


@pytest.fixture(scope="module")
def counted(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("phrases")
    job = new_job(target, prompts, out, "phrases", min_gain=0.1)
    assert run_job(job, Progress(is_quiet=True)).tokens_per_pass > 1.0
    return out


def test_a_job_writes_a_table_and_its_card(counted: Path, target: Path) -> None:
    assert (counted / FILE).is_file()
    card = (counted / "README.md").read_text()
    for words in ("Measured", "without", "Data", "prompts.jsonl", "min_gain: 0.1", "GPU"):
        assert words in card


def test_it_changes_no_text(counted: Path, target: Path) -> None:
    check_no_text_changes(target, f"suffix:phrases={counted}", f"auto:phrases={counted}")


def test_a_table_that_is_not_there_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no phrase table there"):
        LLM(str(target), speculate=f"suffix:phrases={tmp_path}", **ENGINE)
