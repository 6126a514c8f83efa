"""What to write after speculate= for every registry entry, on a small model."""

from functools import cache
from pathlib import Path

import head_files

NETWORKS = (
    "draft",
    "text",
    "mlp",
    "medusa",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
    "dflash2",
)
# Heads that small learn a text by heart rather than a language: these are texts the laws ask for.
TEXTS = ("the model and the guess", "fast token fast token fast token fast", "a")


@cache
def _study(target: Path) -> head_files.Study:
    return head_files.study(target, prompts=TEXTS)


# Small random models teach a drafter that its guesses fail; the tests want guesses all the same.
ALWAYS = {"ngram": "ngram:adaptive=false", "suffix": "suffix:adaptive=false"}


def speculate_for(speculate: str, target: Path, files: Path) -> str:
    """A registry name, or a whole speculate text, made runnable: networks get their files."""
    name, *options = speculate.split(":")
    if name not in NETWORKS:
        return ALWAYS.get(speculate, speculate)
    path = files / name
    if not path.exists():
        _write(name, target, path)
    if "adaptive" not in speculate:
        options = [*options, "adaptive=false"]
    return ":".join([name, str(path), *options])


def _write(name: str, target: Path, path: Path) -> None:
    if name in ("draft", "text"):
        head_files.make_draft(target, path, noise=0.05)
    else:
        getattr(head_files, f"make_{name}")(_study(target), path)


def untrained(method: str, study: head_files.Study, draft: Path, path: Path) -> str:
    """The same with networks that have learned nothing, of any target's width."""
    if method in ("draft", "text"):
        return f"{method}:{draft}"
    if method not in NETWORKS:
        return ALWAYS.get(method, method)
    getattr(head_files, f"make_{method}")(study, path / method, num_steps=0)
    return f"{method}:{path / method}:adaptive=false"
