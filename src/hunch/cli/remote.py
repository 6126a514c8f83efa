"""Answers from a running server, streamed: what `hunch chat --server URL` talks through."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from typing import Any

from hunch.errors import RequestError

SECONDS = 600.0


def answer_of(
    server: str, show: Callable[[str], None], messages: Sequence[dict[str, str]], **fields: Any
) -> tuple[str, dict[str, Any]]:
    """Stream one chat answer; returns its text and its stats."""
    body = {"messages": list(messages), "stream": True, **fields}
    body = {name: value for name, value in body.items() if value is not None}
    text = ""
    stats: dict[str, Any] = {}
    root = server.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given it with /v1
    for chunk in _events(root + "/v1/chat/completions", body):
        if "error" in chunk:
            raise RequestError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            show(piece)
            text += piece
        stats = chunk.get("hunch", {}).get("stats", stats)
    return text, stats


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("HUNCH_API_KEY"):
        headers["Authorization"] = f"Bearer {key.split(',')[0]}"
    if not url.startswith(("http://", "https://")):
        raise RequestError(f"{url}: a server's address begins with http:// or https://")
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        with error:
            raise RequestError(f"the server says: {_problem(error)}") from None
    except (urllib.error.URLError, HTTPException, ValueError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise RequestError(f"no answer from {url}: {reason}") from None


def _problem(error: urllib.error.HTTPError) -> str:
    """What an answer says is wrong; its status alone, where it is not of OpenAI's form."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}; is it one that speaks OpenAI's API?"
