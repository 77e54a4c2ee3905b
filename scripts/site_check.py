#!/usr/bin/env python3
"""Check a built site: every internal link and anchor exists, and no page loads external files.

python3 scripts/site_check.py [FOLDER]

The default FOLDER is build/site. The script prints all problems. If there are any, the exit status is 1.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

LOADED = {"script", "img", "iframe", "source", "video"}
SHOWN = {"stylesheet", "icon", "preload", "preconnect"}


class Html(HTMLParser):
    """An HTML page with its anchors, links, loaded files and canonical address."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded, self.address = set(), [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        link = attrs.get("href") or attrs.get("src")
        if attrs.get("rel") == "canonical":
            self.address = link
        elif link:
            self.links.append(link)
            if tag in LOADED or SHOWN & set((attrs.get("rel") or "").split()):
                self.loaded.append(link)


def check(site):
    """Check the site in the folder ``site``. Return the problems, the number of pages and the number of links."""
    pages = {path: Html(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    home = pages[site / "index.html"].address or "http://site/"
    wrong, count = [], 0
    for path, page in pages.items():
        here = path.relative_to(site).as_posix()
        at = urljoin(home, here.removesuffix("index.html"))
        wrong += [f"{here}: loads {link}" for link in page.loaded if urlsplit(link).scheme not in ("", "data")]
        for link in page.links:
            url, anchor = urldefrag(urljoin(at, link))
            if urlsplit(link).scheme:
                continue
            count += 1
            target = site / unquote(url.removeprefix(home))
            target = target / "index.html" if target.is_dir() else target
            if not url.startswith(home) or not target.is_file():
                wrong.append(f"{here}: {link} does not exist")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                wrong.append(f"{here}: {link} has no such anchor")
    return wrong, len(pages), count


def main():
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")
    if not (site / "index.html").is_file():
        sys.exit(f"{site}: expected a built site, found no index.html. Run `mkdocs build --strict`.")
    wrong, pages, links = check(site)
    print(*wrong, f"{pages} pages, {links} links: {len(wrong)} wrong", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
