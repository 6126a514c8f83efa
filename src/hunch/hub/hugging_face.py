"""Snapshots of Hugging Face repositories: the local cache first, then the network."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hunch.errors import ModelNotFoundError
from hunch.hub.gguf_file import parts_of
from hunch.hub.wheel import disk_problem

_TEXTS = ["*.json", "*.safetensors", "tokenizer*", "*.txt", "*.model"]
_FILES = [*_TEXTS, "*.jinja"]
_PICKLES = ["*.bin", "*.pt"]  # only where a repository has no safetensors
_INDEX, _PICKLE_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
# Second copies of the weights in another layout; of folders, templates alone are wanted.
_SKIP = ["consolidated*", *(f"*/{pattern}" for pattern in (*_TEXTS, *_PICKLES, "*.gguf"))]


def fetch_snapshot(
    name: str, revision: str | None, progress: bool, directory: str | None = None
) -> Path:
    """A snapshot's directory: from the local cache where it is whole, else over the network.

    The cache is Hugging Face's own, or one of the same layout in `directory`.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    try:
        cached = _fetch(name, revision, _FILES, directory, is_local=True)
        if _is_whole(cached):
            return cached
    except hub.LocalEntryNotFoundError:
        pass  # not here yet, or not all of it
    except hub.HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is not a Hugging Face id: {error}") from None

    (enable_progress_bars if progress else disable_progress_bars)()
    with _explained(name, revision):
        fetched = _fetch(name, revision, _FILES, directory)
        if not any(fetched.glob("*.safetensors")):
            fetched = _fetch(name, revision, _FILES + _PICKLES, directory)
    if not _is_whole(fetched):
        raise ModelNotFoundError(
            f"{name} on Hugging Face has no config.json with safetensors; of a repository of GGUF "
            f"files take one .gguf file, say {name}:Q4_K_M, or give the path of one"
        )
    return fetched


def fetch_config(name: str) -> Path:
    """A repository's config.json: from the cache, else fetched without the rest."""
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    with _explained(name, None):
        try:
            return Path(hf_hub_download(name, "config.json"))
        except hub.LocalEntryNotFoundError:
            raise  # the hub was not reached
        except hub.EntryNotFoundError:
            words = f"{name} on Hugging Face has no config.json; give the path of a .gguf file"
            raise ModelNotFoundError(words) from None


def fetch_gguf(
    name: str, quant: str, revision: str | None, progress: bool, directory: str | None = None
) -> Path:
    """One GGUF file of a repository, by its quantisation: from the cache, else fetched."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    try:
        folder = _fetch(name, revision, ["*.gguf"], directory, is_local=True)
        cached = [path.name for path in folder.glob("*.gguf")]
        if _of_quant(cached, quant):
            found = folder / _pick(name, cached, quant)
            if all(part.is_file() for part in parts_of(found)):
                return found
    except hub.LocalEntryNotFoundError:
        pass
    (enable_progress_bars if progress else disable_progress_bars)()
    with _explained(name, revision):
        files = HfApi().list_repo_files(name, revision=revision)
        file = _pick(name, [path for path in files if path.endswith(".gguf")], quant)
        fetched = [
            Path(hf_hub_download(name, part.as_posix(), revision=revision, cache_dir=directory))
            for part in parts_of(Path(file))
        ]
        return fetched[0]


def _of_quant(files: list[str], quant: str) -> list[str]:
    ending = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?:-00001-of-\d+)?\.gguf", re.IGNORECASE)
    return sorted((file for file in files if ending.search(file)), key=len)


def _pick(name: str, files: list[str], quant: str) -> str:
    found = _of_quant(files, quant)
    if not found:
        stems = [re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file) for file in files]
        formats = sorted({stem.replace(".", "-").split("-")[-1] for stem in stems})
        there = f"it has {', '.join(formats)}" if formats else "it holds no GGUF files"
        raise ModelNotFoundError(f"{name} has no file of quantisation {quant!r}; {there}")
    return found[0]


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """The hub's and the disk's errors as ours, with what to do about them."""
    from huggingface_hub import errors as hub

    their_log = logging.getLogger("huggingface_hub")
    level = their_log.level
    their_log.setLevel(logging.ERROR)  # it tells of every try; what came of them is said below
    try:
        yield
    except hub.GatedRepoError:
        raise ModelNotFoundError(
            f"{name} is gated: accept its terms on its page, run `hf auth login`, and try again"
        ) from None
    except hub.RevisionNotFoundError:
        raise ModelNotFoundError(f"{name} has no revision {revision!r}") from None
    except hub.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"Hugging Face knows no model {name!r} (or it is private: run `hf auth login`)"
        ) from None
    except (OSError, hub.HTTPError) as error:
        if words := disk_problem(error, name):
            raise ModelNotFoundError(words) from None
        # No network, offline mode, a server that does not answer.
        raise ModelNotFoundError(
            f"{name} is neither a local path nor in the Hugging Face cache, and the hub cannot be "
            f"reached ({type(error).__name__}). Try again with a network; or run "
            f"`hf download {name} --local-dir DIR` on a machine that has one, copy DIR here and "
            "give its path as the model"
        ) from error
    finally:
        their_log.setLevel(level)


def _fetch(
    name: str,
    revision: str | None,
    patterns: list[str],
    directory: str | None,
    *,
    is_local: bool = False,
) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name,
        revision=revision,
        cache_dir=directory,
        local_files_only=is_local,
        allow_patterns=patterns,
        ignore_patterns=_SKIP,
    )
    return Path(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has its config and all the weights it speaks of."""
    if not (folder / "config.json").is_file():
        return False
    has_safetensors = any(folder.glob("*.safetensors"))
    index = folder / (_INDEX if has_safetensors or (folder / _INDEX).is_file() else _PICKLE_INDEX)
    if not index.is_file():
        return has_safetensors or any(path for pattern in _PICKLES for path in folder.glob(pattern))
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)
