#!/usr/bin/env python3
"""Look at every page of a built site in a browser, on screens of 1200 and of 420 pixels, light and dark.

python3 scripts/site_shots.py [FOLDER] [OUT], by default build/site and build/shots, takes a picture of the first
3,000 pixels of every page, prints what is wrong and ends with 1 if anything is: a page that is wider than the screen,
asks another server for something, lacks a file, or raises an error. Needs `pip install playwright`, and Chromium
or Chrome.
"""

import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import site_check
from playwright.sync_api import sync_playwright

WIDTHS, SCHEMES, HEIGHT = (1200, 420), ("light", "dark"), 3000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Server(SimpleHTTPRequestHandler):
    """Serves the site where it believes to be: below `base`."""

    def __init__(self, *args, base, **kwargs):
        self.base = base
        super().__init__(*args, **kwargs)

    def translate_path(self, path):
        return super().translate_path("/" + path.removeprefix(self.base))

    def log_message(self, *args):
        pass


def watch(tab, address, wrong):
    """Have what goes wrong in a tab put into this list."""

    def asked(request):
        if not request.url.startswith((address, "data:", "blob:")):
            wrong.append(f"{tab.url}: asks for {request.url}")

    def answered(response):
        if response.status >= 400:
            wrong.append(f"{tab.url}: {response.url} answers {response.status}")

    tab.on("request", asked)
    tab.on("response", answered)
    tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))


def look(site, out, address):
    """Take the pictures; what is wrong with the pages, as lines."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        sys.exit(f"browser: expected one of {', '.join(BROWSERS)} on PATH, found none.")
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    wrong = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path)
        for width in WIDTHS:
            for scheme in SCHEMES:
                tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                watch(tab, address, wrong)
                for page in pages:
                    tab.goto(f"{address}{page}", wait_until="load")
                    wide, high = tab.evaluate("[document.scrollingElement.scrollWidth, document.body.scrollHeight]")
                    if wide > width:
                        wrong.append(f"{page}: {wide} pixels wide on a screen of {width}")
                    name = page.removesuffix(".html").removesuffix("/index").replace("/", "-")
                    clip = {"x": 0, "y": 0, "width": width, "height": min(high, HEIGHT)}
                    tab.screenshot(path=out / f"{name}-{width}-{scheme}.png", full_page=True, clip=clip)
                tab.close()
        browser.close()
    print(*wrong, f"{len(pages)} pages at {WIDTHS} pixels, light and dark: {len(wrong)} wrong", sep="\n")
    return wrong


def main():
    site, out = (Path(given) for given in (*sys.argv[1:], *("build/site", "build/shots")[len(sys.argv) - 1 :]))
    out.mkdir(parents=True, exist_ok=True)
    base = urlsplit(site_check.Html((site / "index.html").read_text(encoding="utf-8")).address or "/").path
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site, base=base))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.exit(bool(look(site, out, f"http://127.0.0.1:{server.server_port}{base}")))


if __name__ == "__main__":
    main()
