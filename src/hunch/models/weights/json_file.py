"""A JSON file with one object in it, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hunch.errors import ModelFormatError


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFormatError(f"{path} is missing; download the model again") from None
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelFormatError(f"{path} should hold one JSON object")
    return content
