"""Short names for models hunch runs, and what of them lies on this machine. No torch."""

from __future__ import annotations

import difflib
import shutil
from dataclasses import dataclass
from pathlib import Path

from hunch.errors import ModelNotFoundError
from hunch.hub.wheel import KNOWN, cache_directory

# Short name -> Hugging Face id of safetensors.
ALIASES = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the catalogue, or one that was fetched by its own name."""

    name: str
    source: str  # a Hugging Face id, or the package that carries it
    num_bytes: int | None = None  # on this machine; None: not here
    path: Path | None = None


def suggest(name: str) -> list[str]:
    """Names of the catalogue that `name` probably meant, best first."""
    known = [*KNOWN, *ALIASES]
    wanted = name.lower()
    family = [other for other in known if other.startswith(wanted.split(":")[0])]
    return (family or difflib.get_close_matches(wanted, known, n=3, cutoff=0.6))[:3]


def entries() -> list[Entry]:
    """The whole catalogue and everything else that was fetched."""
    cached = _cached_repositories()
    found = [_packaged(name) for name in KNOWN]
    for name, source in ALIASES.items():
        num_bytes, path = cached.pop(source, (None, None))
        found.append(Entry(name, source, num_bytes, path))
    found += [Entry(name, name, size, path) for name, (size, path) in sorted(cached.items())]
    return found


def remove(entry: Entry) -> None:
    """Delete a model's files from this machine."""
    assert entry.path is not None
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink()


def find_here(name: str) -> Entry:
    """A model whose files are on this machine."""
    wanted = ALIASES.get(name.lower(), name).partition(":")[0].lower()
    for entry in entries():
        if entry.path is not None and wanted in (entry.name.lower(), entry.source.lower()):
            return entry
    here = ", ".join(entry.name for entry in entries() if entry.path) or "none"
    raise ModelNotFoundError(f"{name!r} is not on this machine; models that are: {here}")


def _packaged(name: str) -> Entry:
    wheel = KNOWN[name]
    path = cache_directory() / "models" / Path(wheel.member).name
    is_here = path.is_file()
    size = path.stat().st_size if is_here else None
    return Entry(name, wheel.requirement, size, path if is_here else None)


def _cached_repositories() -> dict[str, tuple[int, Path]]:
    """Models in Hugging Face's own cache: id -> size and folder."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    return {
        repository.repo_id: (repository.size_on_disk, Path(repository.repo_path))
        for repository in repositories
        if repository.repo_type == "model"
    }
