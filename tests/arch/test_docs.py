"""The docs can be read in an editor, and what they promise can be had."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from hunch.registry import MODELS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAX_LINE = 160  # sentences are wrapped at 120; a word that a change adds need not wrap a page anew
NAMED_BY = {  # words of a target's name -> the architecture that must load for it
    "MiMo": "MiMoForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "20B-code": "GPTBigCodeForCausalLM",
    "34B-code": "GPTBigCodeForCausalLM",
    "Qwen3-Next": "Qwen3NextForCausalLM",
    "DeepSeek": "DeepseekV3ForCausalLM",
    "OPT": "OPTForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Llama": "LlamaForCausalLM",
    "Qwen2.5": "Qwen2ForCausalLM",
}


def test_known_pairs_are_of_targets_that_load() -> None:
    text = (DOCS / "methods.md").read_text()
    table = text.partition("## Known pairs")[2].partition("## ")[0]
    targets = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    assert len(targets) > 8
    for word, architecture in NAMED_BY.items():
        named = any(word in target for target in targets)
        assert not named or architecture in MODELS, f"{word} needs {architecture}"


def test_every_family_is_in_the_table_of_models() -> None:
    text = (DOCS / "models.md").read_text()
    assert [name for name in MODELS if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem
)
def test_sentences_fit_an_editor(page: Path) -> None:
    """Tables, commands and code aside, which cannot be wrapped."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        is_wrapped = not line.startswith(("    ", "<")) and not line.lstrip().startswith("|")
        if is_wrapped and not is_code:
            assert len(line) <= MAX_LINE, f"{page.name}:{number} has {len(line)} columns"


LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Names that headings can be linked by, as GitHub makes them."""
    found = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"([\w./-]+\.(?:py|cpp|h))(?:: (\w+)(?:\.(\w+))?)?")
FOLDERS = ("src", "tests", "tools", "examples")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
NAMED: defaultdict[str, list[Path]] = defaultdict(list)
for path in FILES:
    NAMED[path.name].append(path)
OTHERS_FILES = {"lm_heads.h"}  # of llama.cpp and the like


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_of_tables_are_whole(page: Path) -> None:
    """A line of a table that is wrapped ends the table."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("|"):
            assert line.rstrip().endswith("|"), f"{page.name}:{number}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    """Also `FILE: NAME`: what is said to stand in a file does."""
    for span in SPAN.findall(page.read_text(encoding="utf-8")):
        match = FILE.fullmatch(span)
        if match is None or match[1] in OTHERS_FILES:
            continue
        found = [path for path in NAMED[Path(match[1]).name] if path.match(match[1])]
        assert found, f"{page.name} names {match[1]}"
        for name in filter(None, match.groups()[1:]):
            assert any(re.search(rf"\b{name}\b", path.read_text()) for path in found), span


NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
OF_CODE = [DOCS / "tour.md", DOCS / "adding-a-drafter.md", *sorted((DOCS / "decisions").glob("*"))]
OTHERS_NAMES = {"cp.async.bulk.prefetch.L2"}  # an instruction


@cache
def words_of_code() -> set[str]:
    text = "".join(path.read_text() for path in FILES if path.suffix in (".py", ".cpp", ".h"))
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("page", OF_CODE, ids=lambda page: page.stem)
def test_names_of_code_exist(page: Path) -> None:
    """Names in backquotes on pages about the source: those with a dot, an underscore, or mixed."""
    for span in SPAN.findall(page.read_text(encoding="utf-8")):
        is_name = NAME.fullmatch(span) and re.search(r"[._]|[a-z][A-Z]", span)
        if is_name and span not in OTHERS_NAMES and not FILE.fullmatch(span):
            assert set(re.findall(r"\w+", span)) <= words_of_code(), f"{page.name} names {span}"
