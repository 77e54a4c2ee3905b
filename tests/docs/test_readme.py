"""Test that README and docs match the program."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import methods_page
import pytest

from mlx_sparse.methods import METHODS, SparQ

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHODS_PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))


def test_matrix_is_up_to_date() -> None:
    again = "python tests/testing/methods_page.py writes the table again"
    assert methods_page.readme(README) == README, again


def test_readme_has_at_most_700_words() -> None:
    assert len(re.sub(r"<!-- matrix -->.*<!-- /matrix -->", "", README, flags=re.DOTALL).split()) <= 700


def test_methods_page_is_up_to_date() -> None:
    for name, method in METHODS.items():
        row = f"| `{name}` | {method.reads.replace('](docs/', '](')} | {method.source} |"
        assert (row in METHODS_PAGE) == (name != "dense"), name


def test_parameter_tables_are_up_to_date() -> None:
    again = "python tests/testing/methods_page.py writes the tables again"
    assert methods_page.page(METHODS_PAGE) == METHODS_PAGE, again
    rooms = {method.__module__.split(".")[-2] for method in METHODS.values()} - {"core", "patterns"}
    assert {found[1] for found in methods_page.SECTION.finditer(METHODS_PAGE)} == rooms


def test_documented_crossover_lengths() -> None:
    assert "Where nothing was measured it is `16 * top_k`" in METHODS_PAGE
    assert SparQ(top_k=200).shortest_context() == 3200
    assert SparQ(top_k=127).shortest_context() == 128


@pytest.mark.parametrize(
    "spec", sorted(set(re.findall(r"`((?:sparq|streaming)(?::[\w=,]+)?)`", README + METHODS_PAGE)))
)
def test_documented_specifications_parse(spec: str) -> None:
    from mlx_sparse.methods import parse

    assert type(parse(spec)[0]) is METHODS[spec.partition(":")[0]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_linked_files_exist(page: Path) -> None:
    for link in re.findall(r"\]\(((?!http|#)[^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_files_of_journeys_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    journeys = text[text.index("## Journeys") : text.index("## Add a method")]
    named = set(re.findall(r"`([\w./]+/?)`", journeys)) - {"sample", "."}
    rooms = [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    files = [f"/{path.relative_to(ROOT)}" for room in rooms for path in room.rglob("*")]
    for name in named:
        assert any(file.endswith(f"/{name.rstrip('/')}") for file in files), name
    for row in journeys.splitlines()[4:]:
        assert row.count("`, `") < 12, row


def test_files_of_the_map_of_the_code_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = re.split(r"^(?=\w[\w/]*/ )", text.split("## Map of the code")[1].split("```")[1], flags=re.MULTILINE)[1:]
    assert [room.split()[0] for room in rooms][:2] == ["mlx_sparse/", "metal/"]
    for room in rooms:
        for name in re.findall(r"[\w/]+\.py", room):
            assert list((ROOT / room.split()[0]).rglob(name)) or (ROOT / name).exists(), room.split()[0] + name


def test_pages_mention_every_option() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = set()
    for room in ("mlx_sparse", "onnx_export", "cuda_ref"):
        for path in (ROOT / room).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = call.func if isinstance(call, ast.Call) else None
                if (getattr(name, "attr", None) or getattr(name, "id", "")) in ("add_argument", "add_number"):
                    found |= {arg.value for arg in call.args if isinstance(arg, ast.Constant)}
    options = {option for option in found if str(option).startswith("--")} - {"--help", "--version", "--output"}
    assert len(options) > 60
    assert not [option for option in sorted(options) if not re.search(rf"{option}(?![\w-])", pages)]
