"""Test the texts for `--text`: files, and books from pinned packages whose code never runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.files import cache_directory
from mlx_sparse.tools.evaluate import texts
from mlx_sparse.tools.evaluate.texts import gutenberg, read


def test_default_text_is_the_python_reference() -> None:
    (text,) = read(None)
    assert (text.name, len(text.text) > 400_000) == ("python", True)
    assert 'The "assert" statement' in text.text
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()


def test_files_take_precedence_over_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novels").write_bytes("Mine: é\r\n".encode())
    Path("other.txt").write_text("Other.")
    assert [(text.name, text.text) for text in read(["novels", "other.txt"])] == [
        ("novels", "Mine: é\n"),
        ("other.txt", "Other."),
    ]
    Path("python").mkdir()  # a folder is not a text
    assert read(["python"]) == read(None)


def test_unreadable_texts_are_an_error(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xe9t\xe9")
    names = "python, shakespeare, novels"
    for name in ("nowhere", str(tmp_path), str(latin)):
        with pytest.raises(ConfigError, match=f"^--held-out: expected readable UTF-8 .* or one of {names}, got .+"):
            read([name], "--held-out")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new cache folder that shares the downloads with the user's cache."""
    folder, shared = tmp_path_factory.mktemp("cache"), cache_directory()
    archives = [
        texts.fetch(texts.PLAYS, texts.PLAYS_SHA256, shared, source=True),
        texts.fetch(texts.BOOKS, texts.BOOKS_SHA256, shared),
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
def test_plays_and_novels_are_extracted_from_packages(
    cache: Path, name: str, size: int, phrases: tuple[str, ...]
) -> None:
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


def test_books_are_cut_at_their_markers() -> None:
    start, end = "*** START OF THE PROJECT GUTENBERG EBOOK, {} ***", "*** END OF THE PROJECT GUTENBERG EBOOK, {} ***"
    shelf = "\n".join(
        f"Header of {title}\n{start.format(title)}\n\nText of {title}.\n\n{end.format(title)}\nLicense\n"
        for title in ("ONE", "TWO")
    )
    assert gutenberg(shelf, "TWO") == "Text of TWO."
    with pytest.raises(ArtefactError, match="THREE: expected this book"):
        gutenberg(shelf, "THREE")


def test_pipes_are_not_opened_by_the_check(tmp_path: Path) -> None:
    """Test a pipe, such as a shell's <(command), which can be read only once. Opening it would block."""
    os.mkfifo(tmp_path / "pipe")
    texts.check([str(tmp_path / "pipe"), "novels"])
