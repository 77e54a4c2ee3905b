#!/usr/bin/env python3
"""Look at every page of a built site in a browser: no page may be wider than a screen of 1200 and of 420 pixels.

python3 scripts/site_shots.py [FOLDER] [OUT], by default build/site and build/shots: a picture of the first
3,000 pixels of every page, at both widths, light and dark. Needs playwright (the extra `docs`) and Chromium or Chrome.
"""

import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS, SCHEMES, HEIGHT = (1200, 420), ("light", "dark"), 3000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


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
                tab.on("requestfailed", lambda request: wrong.append(f"{request.url} cannot be had"))
                tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))  # noqa: B023
                for page in pages:
                    tab.goto(f"{address}/{page}", wait_until="load")
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
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.exit(bool(look(site, out, f"http://127.0.0.1:{server.server_port}")))


if __name__ == "__main__":
    main()
