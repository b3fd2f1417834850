"""Opens the finished site in headless Chromium, as a reader would. `make docs` runs it.

    python tests/site_check.py [build/site] [--shots DIR]

Every page is opened over HTTP on this machine: no console error, every formula drawn, no request
to anywhere else, nothing wider than a phone. The search finds "anchor". Every internal link, its
place on the page included, leads somewhere. The browser is spoken to through a pipe (DevTools'
protocol), so nothing but Python and Chromium is needed. Without Chromium it says so and leaves;
under CI that is an error.
"""

import argparse
import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = 390

# What a page tells about itself once MathJax is done.
LOOK = """(async () => {
  if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
  const maths = [...document.querySelectorAll('.math')];
  const bare = maths.filter(m => !m.querySelector('mjx-container'));
  const bad = document.querySelectorAll('[data-mjx-error], mjx-merror');
  const page = document.documentElement;
  let wide = '';
  if (page.scrollWidth > page.clientWidth) {
    const all = [...document.querySelectorAll('article *')];
    const out = all.find(e => e.getBoundingClientRect().right > page.clientWidth + 1);
    wide = (out || page).outerHTML.slice(0, 120);
  }
  const ghosts = [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src);
  return {maths: maths.length, bare: bare.map(m => m.textContent.slice(0, 60)),
          bad: [...bad].map(m => m.textContent.slice(0, 60)), wide, ghosts};
})()"""


class Browser:
    """One Chromium and one tab, spoken to in JSON through two pipes."""

    def __init__(self, program: str, folder: str):
        there, self.write = os.pipe()
        self.read, back = os.pipe()

        def hand_over():  # the protocol wants file descriptors 3 and 4
            one, two = os.dup(there), os.dup(back)
            os.dup2(one, 3)
            os.dup2(two, 4)

        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}"], preexec_fn=hand_over,
            close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there)
        os.close(back)
        self.buffer, self.count, self.events, self.session = b"", 0, [], None
        tab = self.ask("Target.createTarget", url="about:blank")["targetId"]
        asked = {"targetId": tab, "flatten": True}
        self.session = self.ask("Target.attachToTarget", **asked)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def message(self, seconds: float) -> dict:
        """The next message, answer or event."""
        import select

        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise TimeoutError("Chromium is silent")
            chunk = os.read(self.read, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium has left")
            self.buffer += chunk
        first, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(first)

    def ask(self, method: str, **params) -> dict:
        """One command and its answer; events on the way are kept."""
        self.count += 1
        said = {"id": self.count, "method": method, "params": params}
        if self.session:
            said["sessionId"] = self.session
        os.write(self.write, json.dumps(said).encode() + b"\0")
        while True:
            one = self.message(30)
            if one.get("id") == self.count:
                if "error" in one:
                    raise RuntimeError(f"{method}: {one['error']}")
                return one["result"]
            self.events.append(one)

    def open(self, url: str) -> list[dict]:
        """Go to a page and wait until it is loaded; returns what happened."""
        self.events = []
        self.ask("Page.navigate", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message(30))
        return self.events

    def evaluate(self, code: str):
        """The value of a JavaScript expression, waited for."""
        found = self.ask(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def view(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window, and the reader's colour scheme."""
        phone = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)

    def shot(self, path: Path) -> None:
        """A picture of what is seen."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(10)


def complaints(events: list[dict], base: str) -> list[str]:
    """Console errors, exceptions and requests that leave the machine."""
    found = []
    for event in events:
        method, p = event.get("method"), event.get("params", {})
        if method == "Log.entryAdded" and p["entry"]["level"] == "error":
            found.append(f"console: {p['entry']['text']} {p['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and p["type"] in ("error", "assert"):
            found.append("console: " + " ".join(str(a.get("value")) for a in p["args"]))
        elif method == "Runtime.exceptionThrown":
            found.append(f"exception: {p['exceptionDetails'].get('text')}")
        elif method == "Network.requestWillBeSent":
            url = p["request"]["url"]
            if not url.startswith((base, "data:", "blob:", "about:")):
                found.append(f"a request leaves the machine: {url}")
    return found


class Links(HTMLParser):
    """What a page points at, and the places on it that can be pointed at."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.places = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.places |= {known[k] for k in ("id", "name") if known.get(k)}
        self.targets += [known[k] for k in ("href", "src") if known.get(k)]


def dead_links(site: Path) -> list[str]:
    """Internal links that lead nowhere, in every page."""
    pages = {p.resolve(): Links(p.read_text()) for p in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            to = to / "index.html" if to.is_dir() else to
            place = unquote(parts.fragment)
            if not to.exists():
                found.append(f"{path.relative_to(site.resolve())}: {target} is not there")
            elif place and place != "top" and to in pages and place not in pages[to].places:
                found.append(f"{path.relative_to(site.resolve())}: {target} names no place")
    return sorted(set(found))


def serve(site: Path) -> http.server.ThreadingHTTPServer:
    """The site on a free port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def search(browser: Browser, base: str, word: str, wanted: str) -> list[str]:
    """Whether the site's search finds a page."""
    events = browser.open(f"{base}search.html?q={word}")
    for _ in range(100):
        found = browser.evaluate(
            "[...document.querySelectorAll('#search-results li a')].map(a => a.href)"
        )
        if any(wanted in link for link in found):
            return complaints(events + browser.events, base)
        time.sleep(0.1)
    return [f"the search for {word!r} found {len(found)} pages, and not {wanted}"]


def take_shots(browser: Browser, base: str, folder: Path) -> None:
    """Pictures to look at: four pages, both colour schemes, both widths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["docs/index", "tutorial/13_anchors", "docs/equations", "docs/results", "docs/glossary",
             "notebooks/00_tour", "docs/_generated/spec", "docs/_generated/rooms"]  # fmt: skip
    for name in names:
        for width, height in ((1280, 900), (PHONE, 844)):
            for dark in (False, True):
                browser.view(width, height, dark)
                browser.open(f"{base}{name}.html")
                browser.evaluate(LOOK)
                scheme = "dark" if dark else "light"
                browser.shot(folder / f"{name.replace('/', '_')}-{width}-{scheme}.png")


def main() -> int:
    """Check a site; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, nargs="?", default=Path("build/site"))
    parser.add_argument("--shots", type=Path, metavar="DIR", help="write screenshots there")
    args = parser.parse_args()
    begun, wrong = time.monotonic(), dead_links(args.site)
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        wrong += ["Chromium is missing"] if os.environ.get("CI") else []
        print("the site was not opened in a browser: no Chromium here", file=sys.stderr)
    else:
        wrong += opened(program, args.site, args.shots)
    for line in wrong:
        print(line, file=sys.stderr)
    count = len(list(args.site.rglob("*.html")))
    state = f"{len(wrong)} complaints" if wrong else "all well"
    print(f"{count} pages, {state}, {time.monotonic() - begun:.0f} s")
    return bool(wrong)


def opened(program: str, site: Path, shots: Path | None) -> list[str]:
    """What a browser complains of."""
    wrong, server = [], serve(site)
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        try:
            drawn = 0
            for path in sorted(site.rglob("*.html")):
                name = path.relative_to(site).as_posix()
                if name.startswith("_modules/") or name in ("index.html", "genindex.html"):
                    continue  # source listings: their links are checked, nothing runs on them
                browser.view(PHONE, 844)
                events = browser.open(base + name)
                seen = browser.evaluate(LOOK)
                drawn += seen["maths"]
                found = complaints(events + browser.events, base)
                found += [f"a formula is not drawn: {m}" for m in seen["bare"]]
                found += [f"a formula is wrong: {m}" for m in seen["bad"]]
                found += [f"a picture is missing: {m}" for m in seen["ghosts"]]
                found += [f"wider than a phone: {seen['wide']}"] if seen["wide"] else []
                wrong += [f"{name}: {line}" for line in found]
            wrong += [] if drawn > 100 else [f"only {drawn} formulas on the whole site"]
            wrong += search(browser, base, "anchor", "tutorial/13_anchors.html")
            if shots:
                take_shots(browser, base, shots)
        finally:
            browser.close()
            server.shutdown()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
