"""The exception tree: everything hunch raises on purpose.

HunchError
 ├─ ConfigError            an argument that cannot work (also a ValueError)
 ├─ RequestError           one request is wrong; others go on (also a ValueError)
 │   ├─ GrammarError       a grammar that does not compile, or is too large
 │   └─ TemplateError      a chat template that fails or is not allowed
 ├─ ModelError             model files
 │   ├─ ModelNotFoundError nothing under that name, and how to get it
 │   ├─ ModelFormatError   truncated, corrupt or unsafe files
 │   ├─ UnsupportedModelError  an architecture or tensor type hunch does not know
 │   └─ VocabMismatchError a drafter whose vocabulary does not fit the target's
 ├─ CapacityError          not enough memory for what was asked
 ├─ TrainingError          training cannot go on; what was good so far is kept
 ├─ QueueFullError         the engine takes no more requests right now
 └─ EngineError            the engine stopped; open requests are lost
"""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path


class HunchError(Exception):
    """Base of every error hunch raises on purpose; its text is meant for the user."""


class ConfigError(HunchError, ValueError):
    """An argument that cannot work."""


class RequestError(HunchError, ValueError):
    """One request is wrong; others go on."""


class GrammarError(RequestError):
    """A grammar that does not compile, or is too large."""


class TemplateError(RequestError):
    """A chat template that fails, or asks for what it may not have."""


class ModelError(HunchError):
    """Model files that cannot be used."""


class ModelNotFoundError(ModelError):
    """Nothing is known under that name."""


class ModelFormatError(ModelError):
    """Truncated, corrupt or unsafe files."""


class UnsupportedModelError(ModelError):
    """An architecture or tensor type hunch does not know."""


class VocabMismatchError(ModelError):
    """A drafter whose vocabulary does not fit the target's."""


class CapacityError(HunchError):
    """Not enough memory for what was asked."""


class TrainingError(HunchError):
    """Training cannot go on; what was good so far is kept."""


class QueueFullError(HunchError):
    """The engine takes no more requests right now."""


class EngineError(HunchError):
    """The engine stopped; open requests are lost."""


def check_file(path: Path, hint: str = "") -> None:
    """A user's path that leads to no file is an error of ours that says what is there."""
    if path.is_file():
        return
    there = "is a directory" if path.is_dir() else "is no file, but a pipe or a device"
    raise RequestError(f"{path}: {there if path.exists() else 'no such file'}{hint}")


@contextmanager
def readable(path: PathLike[str]) -> Iterator[None]:
    """A user's file that is no text, or may not be read, is an error of ours that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from None
