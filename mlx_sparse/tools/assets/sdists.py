"""Fetch pinned source archives and read texts out of them. Nothing in them is run.

pip builds what it downloads as a source archive, so it is asked only where its indexes are.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from zlib import error as ZlibError

from ...checks import ArtefactError
from ...common.files import naming
from .store import check_file

INDEX = "https://pypi.org/simple"
PAGE_LIMIT = 16_000_000  # bytes of an index's page
WHOLE_LIMIT = 200_000_000  # bytes that an archive may unpack to
TIMEOUT = 60


def fetch_sdist(requirement: str, sha256: str, cache: Path, *, limit: int) -> Path:
    """Return the ``.tar.gz`` of ``name==version`` with this SHA-256, downloading it into ``cache`` once.

    Raises:
        ArtefactError: it cannot be had, is larger than ``limit`` bytes, or is another file.
    """
    target = cache / f"{requirement.replace('==', '-')}-{sha256[:12]}.tar.gz"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with naming(target), tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
            new = Path(scratch) / target.name
            new.write_bytes(_download(requirement, target, limit))
            check_file(new, sha256, f"the source archive of {requirement}")
            new.rename(target)
    check_file(target, sha256, f"the source archive of {requirement}")
    return target


def read_texts(archive: Path, pattern: str, *, limit: int) -> dict[str, str]:
    """UTF-8 texts in a ``.tar.gz`` whose names match ``pattern``, by their last name, sorted.

    Raises:
        ArtefactError: no file matches, one is larger than ``limit`` bytes or has an unsafe name, the archive is damaged
            or unpacks to more than `WHOLE_LIMIT`.
    """
    try:
        with tarfile.open(archive, "r|gz") as tar:
            found = dict(_matching(tar, archive, pattern, limit))
    except ArtefactError:
        raise
    # A chain of headers that each announce another is read by recursion.
    except (tarfile.TarError, EOFError, OSError, ZlibError, ValueError, RecursionError) as error:
        raise ArtefactError(f"{archive}: expected an archive of texts, got {error}. Move it away.") from error
    if not found:
        raise ArtefactError(f"{archive}: expected files {pattern}, got none. Move it away and run again.")
    return dict(sorted(found.items()))


def _matching(tar: tarfile.TarFile, archive: Path, pattern: str, limit: int) -> Iterator[tuple[str, str]]:
    whole = 0
    for member in tar:
        whole += member.size
        if whole > WHOLE_LIMIT:  # before the member is skipped, which unpacks it
            raise ArtefactError(f"{archive}: expected at most {WHOLE_LIMIT:,} bytes, got more. Do not use it.")
        if not fnmatchcase(member.name, pattern):
            continue
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or not member.isreg():
            raise ArtefactError(f"{member.name}: expected a file inside the archive, got an unsafe one. Do not use it.")
        if member.size > limit:
            raise ArtefactError(f"{member.name}: expected at most {limit:,} bytes, got {member.size:,}. Do not use it.")
        file = tar.extractfile(member)
        assert file is not None
        yield name.name, file.read().decode("utf-8")


def _download(requirement: str, target: Path, limit: int) -> bytes:
    """The archive's bytes, from the first of pip's indexes that has it."""
    name, version = requirement.split("==")
    wanted = f"{name}-{version}.tar.gz"
    settings = _pip_settings()
    indexes = [settings.get("index-url", INDEX), *settings.get("extra-index-url", "").split()]
    reason = "no http index"
    for index in indexes if settings.get("no-index", "no").lower() in ("0", "false", "no", "off") else []:
        if urlsplit(index).scheme not in ("http", "https"):
            continue
        page = f"{index.rstrip('/')}/{name}/"
        try:
            links = _Links()
            links.feed(_get(page, settings, PAGE_LIMIT).decode("utf-8"))
            for link in links.found:
                url = urljoin(page, link)
                if unquote(urlsplit(url).path).endswith(f"/{wanted}"):
                    return _get(url, settings, limit)
            reason = f"an index without {wanted}"
        except (OSError, HTTPException, ValueError) as error:
            reason = f"`{error}`"
    raise ArtefactError(
        f"{requirement}: expected {wanted} from pip's index, got {reason}. Check the network and pip's index settings, "
        f"or put the file there as {target}."
    )


class _Links(HTMLParser):
    """What a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _get(url: str, settings: Mapping[str, str], limit: int) -> bytes:
    """What is there, at most ``limit`` bytes of it; a name and password in the address are sent to its host alone."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"a link to {parts.scheme}")
    login, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit((parts.scheme, host, parts.path, parts.query, "")))
    request.add_header("Accept", "text/html, */*;q=0.1")
    if login:
        secret = base64.b64encode(unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=_trust(settings.get("cert")))]
    if "proxy" in settings:
        handlers.append(urllib.request.ProxyHandler(dict.fromkeys(("http", "https"), settings["proxy"])))
    with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as response:
        content: bytes = response.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"more than {limit:,} bytes")
    return content


def _trust(certificates: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates)
    if certificates is None and importlib.util.find_spec("certifi") is not None:
        import certifi  # mlx-lm brings it; Python from python.org has no certificates of its own on a Mac

        context.load_verify_locations(certifi.where())
    return context


def _pip_settings() -> dict[str, str]:
    """pip's settings by name, from its files and the environment, which goes first."""
    if importlib.util.find_spec("pip") is None:
        return {}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    found: dict[tuple[int, str], str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        order = ("global", "download", ":env:").index(section) if section in ("global", "download", ":env:") else None
        if order is not None:
            found[order, name] = str(ast.literal_eval(value))
    return {name: value for (_, name), value in sorted(found.items())}
