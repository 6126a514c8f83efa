"""The prompts a server was asked, on request: what `hunch train --resume` learns from later."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from hunch.errors import ConfigError

log = logging.getLogger("hunch")


class PromptLog:
    """One JSON line per prompt, with the token ids that were served. Answers are not kept."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.is_open = True
        self._add("")  # a place that cannot be written is said at the start

    def write(self, ids: list[int], text: str) -> None:
        """A full disk ends the log, never a request."""
        if not self.is_open:
            return
        try:
            self._add(json.dumps({"prompt": text, "prompt_ids": ids}) + "\n")
        except ConfigError as error:
            self.is_open = False
            log.warning("%s; no more prompts are kept", error)

    def _add(self, line: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"prompt_log={self.path}: {error.strerror}") from None
