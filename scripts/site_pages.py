"""Define MkDocs hooks that add API pages and project files, rewrite links to files outside docs/, and show formulas."""

import posixpath
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import mlx_sparse
from mlx_sparse import cuda_ref
from mlx_sparse.api import functions
from mlx_sparse.api.functions import public_functions
from mlx_sparse.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile("`[^`]*`")
PRIME = re.compile(r"<msup>(<mi>\w</mi><mi>&#x02032;</mi>)</msup>")  # fonts draw U+2032 raised already
NUMBER = re.compile(r"\\tag\{([\w.]+)\}\s*$")
# Defined in a class of `functions`. The functions of the baselines are generated from `METHODS`.
WRITTEN = {name: getattr(functions.Functions, name) for name in public_functions("ops")}
# Modules of the functions that packages import on first use.
HOMES = {
    "mlx_sparse": {name: f"{function.__module__}.{function.__qualname__}" for name, function in WRITTEN.items()},
    "cuda_ref": {name: f"cuda_ref.api.parts.{name}" for name in cuda_ref._HOMES["api.parts"].split()},
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show blocks of the language `math` as formulas."""
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [{"name": "math", "class": "", "format": _formula}]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated API pages and project files to the site if the navigation lists them.

    A project file is added only if docs/ does not contain the file.
    """
    made = {"api/mlx_sparse.md": _api(), "api/methods.md": _methods(), "api/cuda_ref.md": _cuda_ref()}
    for path in _paths(config.nav):
        if path in made:
            files.append(File.generated(config, path, content=made[path]))
        elif files.get_file_from_path(path) is None and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite each relative link to a file.

    If the file has a page on the site, the link points to the page. Otherwise, if `repo_url` is set, the link points to
    the file in the repository. If `repo_url` is not set, the link is replaced with the name of the file.
    """
    if page.file.abs_src_path is None:
        return markdown
    folder, url = Path(page.file.abs_src_path).parent, page.file.src_uri
    known = {file.abs_src_path: file.src_uri for file in files if not file.inclusion.is_excluded()}

    def rewritten(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        path = (folder / target).resolve()
        path = path / "README.md" if (path / "README.md").is_file() else path
        if (uri := known.get(str(path))) is not None:
            return f"{image}[{text}]({posixpath.relpath(uri, posixpath.dirname(url) or '.')}{anchor})"
        if not path.exists():
            return link[0]  # mkdocs reports it
        name = path.relative_to(ROOT).as_posix()
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{name}{anchor})"
        if name.endswith(text.strip("`")):
            return f"`{name}`"
        return text if name in text else f"{text} (`{name}`)"

    # In the code of a table cell, GitHub renders \| as |, and Python-Markdown keeps the backslash.
    rows = re.compile(r"^\|.*\|$", re.MULTILINE)
    markdown = rows.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, files: Files, **kwargs: Any) -> str:
    """Prevent line breaks in options and before ±. On the API pages, link each page name to its page."""
    html = html.replace(" ± ", "&nbsp;±&nbsp;")
    html = re.sub(r"(?<=[>\s])([\w.]*-[\w.-]{1,24})(?=(?:\s[^<]*)?</code>)", r'<span class="whole">\1</span>', html)
    if not page.file.src_uri.startswith("api/"):
        return html

    def linked(name: re.Match[str]) -> str:
        file = files.get_file_from_path(name[1])
        return f'<a href="{file.url_relative_to(page.file)}">{name[0]}</a>' if file else name[0]

    return re.sub(r"\bdocs/([\w/]+\.md)", linked, html)


def on_post_page(output: str, **kwargs: Any) -> str:
    """Prevent the theme's script from requesting the number of stars of the repository."""
    return output.replace('data-md-component="source"', "")


on_post_template = on_post_page  # 404.html


class PublicNames(griffe.Extension):
    """Griffe extension that adds the functions in `HOMES`, which griffe's static analysis does not find."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, home in HOMES.get(pkg.name, {}).items():
            pkg.set_member(name, griffe.Alias(name, home, parent=pkg))
            parameters = pkg[home.removeprefix(f"{pkg.name}.")].parameters
            if "self" in parameters:  # the functions are defined as methods
                del parameters["self"]


def _formula(latex: str, *args: Any, **kwargs: Any) -> str:
    """Convert LaTeX to MathML, which browsers show without a script. The number in a final \\tag becomes an anchor."""
    number = NUMBER.search(latex)
    tag = f'<span id="{number[1]}">({number[1]})</span>' if number else ""
    formula = PRIME.sub(r"<mrow>\1</mrow>", convert(NUMBER.sub("", latex), display="block"))
    return f'<div class="formula">{formula}{tag}</div>'


def _paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _paths(entry)


def _api() -> str:
    rest = [name for name in dir(mlx_sparse) if name not in WRITTEN and not name.endswith(("_attention", "__"))]
    models = ["enable", "sparse", "disable", "report"]
    errors = [name for name in rest if name.endswith("Error") or name == "BackendUnavailable"]
    values = [name for name in rest if name not in models + errors]
    made = [f"`{name}_attention`" for name in METHODS if f"{name}_attention" not in WRITTEN]
    parts = [f"# mlx_sparse\n\n{cleandoc(mlx_sparse.__doc__)}", "## Models", *map(_entry, models)]
    parts += ["## Functions on arrays", cleandoc(functions.__doc__)]
    for kind in functions.Functions.__bases__:
        names = [name for name in WRITTEN if name in vars(kind)]
        parts += [f"## {cleandoc(kind.__doc__)}".rstrip("."), *map(_entry, names)] if names else []
    parts += [f"## Other methods\n\n{', '.join(made)} take the settings of their [methods](methods.md) as arguments."]
    values += ["mlx_sparse.api.call_report.Report", "mlx_sparse.calibrate.Calibration"]
    parts += ["## Parameters and results", *map(_entry, values), "## Errors", *map(_entry, errors)]
    return "\n\n".join(parts)


def _methods() -> str:
    parts = [f"# mlx_sparse.methods\n\n{cleandoc(mlx_sparse.methods.__doc__)}"]
    parts += [
        f"## `{name}`\n\n{_entry(f'{cls.__module__}.{cls.__name__}')}\n    options: {{members: false}}"
        for name, cls in METHODS.items()
    ]
    return "\n\n".join(parts)


def _cuda_ref() -> str:
    same = [f"[`{name}`](mlx_sparse.md#mlx_sparse.{name})" for name in public_functions("triton")]
    parts = [f"# mlx_sparse.cuda_ref\n\n{cleandoc(cuda_ref.__doc__)}", "## Functions"]
    parts += [f"On torch tensors, with the arguments that they have on MLX arrays: {', '.join(same)}."]
    parts += [_entry(f"cuda_ref.{name}") for name in (*cuda_ref._HOME_OF, "unavailable")]
    return "\n\n".join(parts)


def _entry(name: str) -> str:
    return f"::: {name if '.' in name else f'mlx_sparse.{name}'}"
