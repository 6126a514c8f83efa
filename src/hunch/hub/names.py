"""Names to local files: the default model, directories, GGUF files, Hugging Face ids."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hunch.errors import ModelFormatError, ModelNotFoundError
from hunch.hub.catalogue import ALIASES, suggest
from hunch.hub.gguf_file import first_part
from hunch.hub.hugging_face import fetch_config, fetch_gguf, fetch_snapshot
from hunch.hub.wheel import KNOWN, fetch_model

log = logging.getLogger("hunch")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PAGE = re.compile(rf"https://huggingface\.co/({_HUB_ID.pattern})")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # beside a config.json
_POINTER = b"version https://git-lfs"  # how a file begins that stands for one not fetched
_QUANT = re.compile(rf"({_HUB_ID.pattern}):([A-Za-z0-9_]+)")  # one file of a GGUF repository


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine. It can be used wherever a path can."""

    name: str  # what the user asked for
    path: Path  # the .gguf file, or the directory in Hugging Face form
    is_gguf: bool  # else a directory

    def __fspath__(self) -> str:
        return str(self.path)


def resolve(
    name: str, *, revision: str | None = None, progress: bool = True, directory: str | None = None
) -> ModelFiles:
    """The files behind `name`, fetched first where that is needed and possible.

    What is fetched goes to the user's cache, or to `directory`.
    """
    if not name.strip():
        raise ModelNotFoundError("the model's name is empty; give a name, a path or a hub id")
    if page := _HUB_PAGE.match(name):
        name = page[1]
    path = Path(name).expanduser()
    if revision is not None and (name.lower() in KNOWN or path.exists()):
        log.warning("revision %s has no effect: %s is no Hugging Face id", revision, name)
    if name.lower() in KNOWN:  # a local path of the same name is written ./name
        fetched = fetch_model(name.lower(), progress, directory)
        return ModelFiles(name=name, path=fetched, is_gguf=True)
    if path.is_file():
        return _local_file(name, path)
    if path.is_dir():
        return _local_directory(name, path)
    if quantised := _QUANT.fullmatch(name):
        repository, quant = quantised.groups()
        found = fetch_gguf(repository, quant, revision, progress, directory)
        return ModelFiles(name=name, path=found, is_gguf=True)
    if name.lower() in ALIASES:
        name = ALIASES[name.lower()]
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _local_directory(name, fetch_snapshot(name, revision, progress, directory))
    raise ModelNotFoundError(_not_found(name))


def find_description(name: str) -> Path:
    """What says how large a model is: its .gguf file, or its config.json. Of a repository on the
    hub no more than that is fetched."""
    path = Path(name).expanduser()
    if page := _HUB_PAGE.match(name):
        name = page[1]
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    source = ALIASES.get(name.lower(), name)
    if not path.exists() and name.lower() not in KNOWN and _HUB_ID.fullmatch(source):
        return fetch_config(source)
    files = resolve(name)
    return files.path if files.is_gguf else files.path / "config.json"


def _local_file(name: str, path: Path) -> ModelFiles:
    _check_fetched(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":
        raise ModelFormatError(
            f"{path} is not a GGUF file; for safetensors give the directory that also holds "
            "config.json and tokenizer.json"
        )
    return ModelFiles(name=name, path=first_part(path), is_gguf=True)


def _local_directory(name: str, path: Path) -> ModelFiles:
    path = _snapshot(path)
    found = sorted({first_part(file) for file in path.glob("*.gguf")})
    found = [file for file in found if not file.name.startswith("mmproj")] or found  # for images
    has_weights = any(file for pattern in _WEIGHTS for file in path.glob(pattern))
    if (path / "config.json").is_file() and (has_weights or len(found) != 1):
        for file in (*path.glob("*.safetensors"), path / "tokenizer.json"):
            _check_fetched(file)
        return ModelFiles(name=name, path=path, is_gguf=False)
    if len(found) == 1:
        return ModelFiles(name=name, path=found[0], is_gguf=True)
    if found:
        names = ", ".join(file.name for file in found[:8])
        raise ModelNotFoundError(f"{path} holds several GGUF files; name one of them: {names}")
    raise ModelNotFoundError(
        f"{path} holds no model: neither config.json nor a .gguf file{_what_else(path)}"
    )


def _what_else(path: Path) -> str:
    """What a folder without a model seems to be, and what to do with it; often nothing."""
    if (path / "adapter_config.json").is_file():
        return ". It is an adapter: give its base model, and lora=PATH with this folder"
    if any(path.glob("consolidated*")) or (path / "params.json").is_file():
        return ". It has the makers' own form: take the model's files in Hugging Face form, or GGUF"
    if any(path.glob("*.safetensors")):
        return ". Copy config.json and the tokenizer's files from the model's repository beside it"
    return ""


def _snapshot(path: Path) -> Path:
    """Where the files are in a folder of Hugging Face's cache (models--org--name)."""
    found = [one for one in (path / "snapshots").glob("*") if one.is_dir()]
    newest = path / "refs" / "main"
    named = newest.read_text().strip() if newest.is_file() else ""
    chosen = [one for one in found if one.name == named] or (found if len(found) == 1 else [])
    return chosen[0] if chosen else path


def _check_fetched(file: Path) -> None:
    """Raise where it is no file, or stands for another: a link to nothing, a Git LFS pointer."""
    if file.is_dir():
        raise ModelFormatError(f"{file} is a directory, in place of a file of that name")
    if file.is_symlink() and not file.exists():
        raise ModelFormatError(f"{file} is a link to {file.readlink()}, which does not exist")
    if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_POINTER):
        raise ModelFormatError(
            f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
        )


def _not_found(name: str) -> str:
    looks_like_path = name.endswith(".gguf") or name.startswith((".", "~", "/")) or os.sep in name
    if looks_like_path:
        return f"{name}: no such file or directory"
    near = " or ".join(repr(other) for other in suggest(name))
    hint = f"; did you mean {near}?" if near else "."
    return (
        f"no model is known as {name!r}{hint} A model is a name that `hunch models` lists, a "
        ".gguf file, a directory with config.json, or a Hugging Face id such as 'org/name' (of "
        "GGUF files 'org/name:Q4_K_M')"
    )
