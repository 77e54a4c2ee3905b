"""Test the mechanical part of the writing rules in CONTRIBUTING: first words, words to avoid and sentence length."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 30  # words in a sentence of the documentation
NO_VERB = re.compile(
    r"(What|Who|Whoever|Of|Those|That|Whether|Where|By|In|As|Why|How|Until|Nobody|Which|It|None|From|For|When|If)\b"
)
DIALECT = re.compile(
    r"\b(whoever|from where on|turned back|beside a cache|pieces? of (a|the) prompt|contenders?|of its own accord"
    r"|quantis\w+|normalis\w+|initialis\w+|knows? of|is told|was told|is asked for|hears? of|by itself alone)\b",
    re.IGNORECASE,
)


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown page outside code, tables, headings and link targets."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^( {4}|\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "]", text)
    return re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[*\-\d]+\.?\s", text)


def test_docstrings_start_with_a_verb_or_a_noun_and_use_the_terms_of_the_field():
    wrong = []
    for path in tracked("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else None
            if text and (NO_VERB.match(text) or DIALECT.search(text)):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)


def test_pages_use_the_terms_of_the_field_in_short_sentences():
    wrong = []
    for path in tracked("*.md"):
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path.relative_to(ROOT)}: {found[0]}" for found in DIALECT.finditer(text)]
        long = [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST]
        wrong += [f"{path.relative_to(ROOT)}: {len(found.split())} words: {found[:80]}" for found in long]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)
