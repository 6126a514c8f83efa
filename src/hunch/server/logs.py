"""Log lines: text for people, JSON for machines, each with the id of the request it is about."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

log = logging.getLogger("hunch.server")


def event(level: int, message: str, **fields: Any) -> None:
    """A line with named values."""
    log.log(level, message, extra={"fields": fields})


class _Formatter(logging.Formatter):
    def __init__(self, *, is_json: bool) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        current = request_id.get()
        if current is not None:
            fields.setdefault("request_id", current)
        text = record.getMessage()
        stack = self.formatException(record.exc_info) if record.exc_info else None
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{stamp}.{int(record.msecs):03d}Z"
        if self._is_json:
            line = {"time": stamp, "level": record.levelname.lower(), "logger": record.name}
            if stack:
                fields["stack"] = stack
            return json.dumps({**line, "message": text, **fields}, default=str)
        words = "".join(f" {name}={_word(value)}" for name, value in fields.items())
        line_text = f"{stamp} {record.levelname} {text}{words}"
        return f"{line_text}\n{stack}" if stack else line_text


def hide_requests() -> None:
    """No line for a request that went well."""

    def is_shown(record: logging.LogRecord) -> bool:
        fields = getattr(record, "fields", {})
        is_good = fields.get("status", 200) < 400 and fields.get("reason") != "error"
        return record.getMessage() not in ("http", "request") or not is_good

    log.addFilter(is_shown)


def _word(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if any(c.isspace() or not c.isprintable() for c in text) else text


def set_up(log_format: str, level: str) -> None:
    """Send everything of hunch's and uvicorn's to stderr, in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(is_json=log_format == "json"))
    for name in ("hunch", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    for name in ("uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)  # we log requests ourselves
    if level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
