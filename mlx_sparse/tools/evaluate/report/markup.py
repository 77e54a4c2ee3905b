"""Elements of an HTML page, escaped by construction: text is never put together with tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from .style import REPLACEMENT

Child = Element | str


def tag(name: str, /, *children: Child, **attributes: str) -> Element:
    """An element; of attributes that Python reserves, such as ``class_``, the last underscore goes."""
    element = Element(name, {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()})
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif last is None:
            element.text = (element.text or "") + printable(child)
        else:
            last.tail = (last.tail or "") + printable(child)
    return element


def printable(text: str) -> str:
    """``text`` without the control characters that no page may hold."""
    return "".join(letter if letter.isprintable() or letter == "\n" else REPLACEMENT for letter in text)


def table(header: Sequence[str], rows: Iterable[tuple[str, Sequence[Child]]]) -> Element:
    """Rows are a class, and cells."""
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    body = tag("tbody")
    for kind, cells in rows:
        row = tag("tr", *(tag("td", cell) for cell in cells))
        if kind:
            row.set("class", kind)
        body.append(row)
    return tag("div", tag("table", head, body), class_="wide")


def document(root: Element) -> bytes:
    """The file."""
    text: str = tostring(root, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n".encode()
