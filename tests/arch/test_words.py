"""One vocabulary: words that the glossary replaced do not come back.

Ordinary English stays ordinary: most of these are looked for in names of code alone (identifiers
and the names inside backquotes), a few that have no business here at all in prose as well.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from arch.parsed import parse, parsed

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hunch"

# A part of a name between underscores or capitals -> what to say instead.
NAMES = {
    "gait": "step shape",
    "crew": "rows",
    "flight": "pending step",
    "flights": "pending steps",
    "flying": "pending",
    "aloft": "pending",
    "grounded": "on the host",
    "mail": "download",
    "slip": "draft",
    "calm": "steady",
    "pace": "policy",
    "judge": "chooser",
    "lesson": "loss",
    "land": "apply",
    "landing": "results",
}
# Words that say nothing of what a name holds; tests may use them.
SOURCE_NAMES = {
    "said": "what was said: tokens, text, messages",
    "thoughts": "reasoning",
    "fresh": "new",
    "letter": "download, sign",
    "way": "method, setting",
    "ways": "methods, settings",
}
# `kind` is that of a captured step (`StepKind`), where those are captured and nowhere else.
KIND = "what it is: format, json_type, layer_type, category, class"
KIND_NAMES = ("captured_step", "row_extras", "step_graphs", "step_kinds")
KIND_FILES = {f"step/{name}.py" for name in KIND_NAMES}
PHRASES = ("under_way", "output_kind")  # in names, not taken apart; the second is vLLM's
# In prose too, whatever the sentence.
PROSE = re.compile(
    r"\b(aloft|gaits?|crew|judg(e|es|ed|ing)|in flight|flying steps?"
    r"|steps? (that )?(fly|flies|flew))\b",
    re.IGNORECASE,
)


@cache
def parts_of(name: str) -> frozenset[str]:
    """The words a name is made of: `StepPace` and `step_pace` are both step, pace."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    for phrase in PHRASES:
        words = words.replace(phrase, "")
    return frozenset(words.split("_"))


def problems(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = [f"says {match[0]!r}" for match in PROSE.finditer(text)]
    if path.suffix == ".py":
        words = dict(NAMES)
        if path.is_relative_to(SOURCE):
            words |= SOURCE_NAMES
            if str(path.relative_to(SOURCE)) not in KIND_FILES:
                words |= {"kind": KIND, "kinds": KIND}
        for name in sorted(parsed(path).names | {path.stem}):
            found += [f"{name}: say {words[part]}" for part in sorted(parts_of(name) & set(words))]
    return found


def checked() -> list[Path]:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return sorted(
        [*SOURCE.rglob("*.py"), *tests, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    )


def test_words() -> None:
    found = {str(path.relative_to(ROOT)): problems(path) for path in checked()}
    assert {path: words for path, words in found.items() if words} == {}


def test_the_test_finds_them(tmp_path: Path) -> None:
    file = tmp_path / "step_pace.py"
    file.write_text('"""A step that flies."""\n\ndef land(calm_until): ...\n')
    assert problems(file) == [
        "says 'step that flies'",
        "calm_until: say steady",
        "land: say apply",
        "step_pace: say policy",
    ]


def test_numpys_and_rays_kind_is_theirs() -> None:
    for ours in ("def sort(kind): ...", "made(kind=1)", "part.kind"):
        assert "kind" in parse(ours).names
    theirs = "np.argsort(key, kind='stable'), given.accelerator_config.kind"
    assert "kind" not in parse(theirs).names
