"""The drafters that come with hunch: small files for the default model, found by method, and a
table of common words for every other one."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
COMMON_WORDS = _HERE / "common" / "words.safetensors.xz"
_FILES = {"smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf"}  # a model's name -> its file's


def shipped(method: str, model: str, path: Path) -> Path | None:
    """The directory of the drafter for a model asked for as `model`, whose file is `path`."""
    for name, file in _FILES.items():
        folder = _HERE / name / method
        if (model.lower() == name or path.name == file) and (folder / "config.json").is_file():
            return folder
    return None
