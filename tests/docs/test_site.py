"""Test the site: the build, public names, and the same content as on a Git host."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import markdown
import pytest
from markdown_it import MarkdownIt
from mkdocs.config import load_config
from mkdocs.structure.files import get_files
from mkdocs.structure.pages import Page

import mlx_sparse
from mlx_sparse import cuda_ref
from mlx_sparse.methods import METHODS

pytestmark = pytest.mark.slow  # the site

ROOT = Path(__file__).parents[2]
ELEMENTS = re.compile(r"<(ul|ol|li|table|tr|td|th|pre|h[1-6]|blockquote|img|em|strong|a)\b")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_no_external_files(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        elements = re.findall(r"<(?:script|img|link|iframe|source|video)\b[^>]*>", page.read_text(encoding="utf-8"))
        external = [element for element in elements if re.search(r"(?:src|href)=\"?(?:https?:)?//", element)]
        assert not external, page


def test_every_public_name_is_shown(site: Path) -> None:
    shown = (site / "api" / "mlx_sparse" / "index.html").read_text(encoding="utf-8")
    for name in dir(mlx_sparse):
        baseline = METHODS.get(name.removesuffix("_attention"))
        assert f'id="mlx_sparse.{name}"' in shown or (baseline and f">{name}<" in shown) or name == "__version__", name
    shown = (site / "api" / "cuda_ref" / "index.html").read_text(encoding="utf-8")
    for name in (*cuda_ref._HOME_OF, "unavailable"):
        assert f'id="cuda_ref.{name}"' in shown, name
    shown = (site / "api" / "methods" / "index.html").read_text(encoding="utf-8")
    for method in METHODS.values():
        assert f'id="{method.__module__}.{method.__name__}"' in shown, method


def test_formulas_are_mathml_with_their_numbers(site: Path) -> None:
    count = 0
    for path in sorted((ROOT / "docs" / "spec").glob("*.md")):
        html = (site / "spec" / path.stem / "index.html").read_text(encoding="utf-8")
        sources = re.findall(r"```math\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        shown = re.findall(r'<div class="formula">(<math.*?</math>)(.*?)</div>', html, re.DOTALL)
        for source, (formula, number) in zip(sources, shown, strict=True):
            tag = re.search(r"\\tag\{(.*)\}", source)
            assert number == (f'<span id="{tag[1]}">({tag[1]})</span>' if tag else ""), source
            read = "".join(ElementTree.fromstring(formula).itertext())
            assert "\\" not in read and "$" not in read, read  # an unknown command stays LaTeX
        count += len(shown)
    assert count > 50


def pages(repo_url: str) -> dict[str, tuple[str, str]]:
    """Return the Markdown of every page, as written and as passed to mkdocs."""
    config = load_config(str(ROOT / "mkdocs.yml"), repo_url=repo_url)
    files = config.plugins.on_files(get_files(config), config=config)
    found = {}
    for file in files.documentation_pages():
        if file.abs_src_path:  # API pages have no file
            page = Page(None, file, config)
            given = config.plugins.on_page_markdown(file.content_string, page=page, config=config, files=files)
            found[file.src_uri] = file.content_string, given
    return found


def test_external_links_lead_to_the_repository() -> None:
    body, forge = "onnx_export/bodies/sparq.onnxtxt", "https://forge.example/project"
    for repo_url in ("", forge):
        given = {path: text for path, (_, text) in pages(repo_url).items()}
        link = f"[{body}]({forge}/blob/HEAD/{body})" if repo_url else f"`{body}`"
        assert f"\n**Body**: {link}: " in given["spec/operators.md"]
        notebook = "examples/quality_vs_bytes.ipynb"
        link = f"[{Path(notebook).name}]({forge}/blob/HEAD/{notebook})" if repo_url else f"`{notebook}`"
        assert f"| {link} |" in given["examples.md"]
        # Links to pages of the site stay relative, wherever the files are.
        assert "](spec/sparq.md)" in given["index.md"]
        assert "](tests/msl/README.md)" in given["limits.md"]
        assert "](../quality.svg)" in given["results/quality.md"]


def test_pages_render_like_commonmark() -> None:
    def looks(html: str) -> tuple[Counter[str], list[str]]:
        return Counter(ELEMENTS.findall(html)), unescape(re.sub("<[^>]+>", " ", html)).split()

    forge = MarkdownIt("commonmark").enable("table")
    for path, (written, given) in pages("https://forge.example/project").items():
        here = markdown.markdown(given, extensions=["tables", "fenced_code"])
        assert looks(here) == looks(forge.render(written)), path
