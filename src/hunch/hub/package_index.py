"""Files of Python packages from the indexes that pip is configured for, without pip."""

from __future__ import annotations

import base64
import configparser
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen

PYPI = "https://pypi.org/simple"
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 3
_MAX_PAGE = 16 << 20  # bytes of an index page
_LINK = re.compile(rb"""<a\s[^>]*?href\s*=\s*["']([^"']+)["']""", re.IGNORECASE)


class Sources:
    """Where packages are looked for, in pip's order of configuration: its files, then PIP_*."""

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        for file in _config_files():
            parser = configparser.RawConfigParser()
            try:
                parser.read(file, encoding="utf-8")
            except (configparser.Error, UnicodeDecodeError):
                continue  # pip itself complains about it
            for section in ("global", "download", "install"):
                if parser.has_section(section):
                    self._options |= {k.replace("_", "-"): v for k, v in parser.items(section)}
        for name, value in os.environ.items():
            if name.startswith("PIP_"):
                self._options[name[4:].lower().replace("_", "-")] = value

    @property
    def folders(self) -> list[str]:
        """Directories, and pages of links."""
        return self._options.get("find-links", "").split()

    @property
    def indexes(self) -> list[str]:
        if self._options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            return []
        first = self._options.get("index-url") or PYPI
        return [first, *self._options.get("extra-index-url", "").split()]

    @property
    def certificates(self) -> str | None:
        names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
        told = [self._options.get("cert"), *map(os.environ.get, names)]
        return next((file for file in told if file and Path(file).is_file()), None)


def _config_files() -> list[Path]:
    """pip's, from the weakest to the strongest."""
    home = Path.home()
    users = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    places = [Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf"), home / ".pip" / "pip.conf"]
    if sys.platform == "darwin":
        places.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    places += [users / "pip" / "pip.conf", Path(sys.prefix) / "pip.conf"]
    if own := os.environ.get("PIP_CONFIG_FILE"):
        places.append(Path(own))
    return places


def fetch_wheel(
    project: str, version: str, target: Path, advance: Callable[[int, int], None]
) -> None:
    """The project's pure wheel, written to `target`; OSError where no source has it.

    `advance` hears of bytes that are there and of all there will be.
    """
    sources = Sources()
    name = f"{re.sub('[-_.]+', '_', project)}-{version}-py3-none-any.whl"
    context = ssl.create_default_context(cafile=sources.certificates)
    problems: list[str] = []
    for address in _addresses(sources, project, name, context, problems):
        for attempt in range(ATTEMPTS):
            try:
                _copy(address, target, context, advance)
                return
            except (URLError, TimeoutError, ConnectionError, EOFError) as error:
                if attempt == ATTEMPTS - 1:
                    problems.append(f"{_shown(address)}: {_reason(error)}")
    raise LookupError("; ".join(problems) or f"no index or folder is configured that has {name}")


def _addresses(
    sources: Sources, project: str, name: str, context: ssl.SSLContext, problems: list[str]
) -> Iterator[str]:
    """Where the file lies, one source after the other; what went wrong goes to `problems`."""
    page_name = re.sub("[-_.]+", "-", project).lower()
    for folder in sources.folders:
        if (path := Path(unquote(folder.removeprefix("file://"))).expanduser()).is_dir():
            if (path / name).is_file():
                yield (path / name).resolve().as_uri()
        elif "://" in folder:
            yield from _links(folder, name, context, problems)
    for index in sources.indexes:
        page = f"{index.rstrip('/')}/{page_name}/"
        if page.startswith("file:"):
            page += "index.html"
        yield from _links(page, name, context, problems)


def _links(page: str, name: str, context: ssl.SSLContext, problems: list[str]) -> Iterator[str]:
    try:
        with _open(page, context) as answer:
            base = getattr(answer, "url", page)
            content = answer.read(_MAX_PAGE)
    except (URLError, TimeoutError, ConnectionError) as error:
        problems.append(f"{_shown(page)}: {_reason(error)}")
        return
    for found in _LINK.findall(content):
        address = urljoin(base, unescape(found.decode("utf-8", "replace"))).partition("#")[0]
        if unquote(urlsplit(address).path).rpartition("/")[2] == name:
            yield _with_login(address, page)
            return
    problems.append(f"{_shown(page)} does not list {name}")


def _copy(
    address: str, target: Path, context: ssl.SSLContext, advance: Callable[[int, int], None]
) -> None:
    with _open(address, context) as answer, target.open("wb") as sink:
        total, done = int(answer.headers.get("Content-Length") or 0), 0  # type: ignore[attr-defined]
        while part := answer.read(1 << 18):
            sink.write(part)
            done += len(part)
            advance(done, max(total, done))
    if total and done != total:
        raise EOFError(f"the connection ended after {done} of {total} bytes")


def _open(address: str, context: ssl.SSLContext) -> IO[bytes]:
    parts = urlsplit(address)
    headers = {"User-Agent": "hunch", "Accept": "text/html, */*;q=0.1"}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        address = _shown(address)
    opened: IO[bytes] = urlopen(Request(address, headers=headers), timeout=TIMEOUT, context=context)
    return opened


def _with_login(address: str, page: str) -> str:
    """An index that wants a login wants it for its files too, where it keeps them itself."""
    parts, index = urlsplit(address), urlsplit(page)
    if index.username is None or parts.hostname != index.hostname or parts.username is not None:
        return address
    return urlunsplit(parts._replace(netloc=index.netloc))


def _shown(address: str) -> str:
    """Without a login."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
