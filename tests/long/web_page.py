#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Drives the server's web page in Chromium as a person would, with the shipped model: upload, ask, stream, highlights,
reload, restart. Usage: web_page.py [FOLDER FOR SCREENSHOTS]. Needs Debian's chromium and chromium-driver."""

import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

from browser import Browser  # noqa: E402
from server import Server  # noqa: E402

QUESTION = "What is the profession of Clara Whitaker?"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & \U0001F9ED "


def document(folder: pathlib.Path) -> pathlib.Path:
    """Part of the shipped document, with text in front that would do harm as HTML."""
    path = folder / "chronicle of aldermere.txt"
    path.write_text(HOSTILE + (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:12000], encoding="utf-8")
    return path


def check(condition, what: str):
    print(("ok   " if condition else "FAIL ") + what)
    if not condition:
        sys.exit(1)


def ask(browser: Browser, question: str):
    before = browser.run("return document.querySelectorAll('.turn').length")
    browser.type("#question", question + "\ue007")  # Enter
    browser.wait_for(f"return document.querySelectorAll('.turn').length > {before}")
    browser.wait_for("return document.querySelectorAll('.answer.live').length == 0 && document.querySelector('.turn:last-child .figures') != null && !document.querySelector('#send').disabled", 120)


def desktop(server: Server, file: pathlib.Path, shots: pathlib.Path):
    with Browser(1440, 900) as browser:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("return document.querySelector('#status').textContent == 'ready'")
        browser.screenshot(shots / "empty.png")
        browser.type("#file", str(file))
        browser.wait_for("return document.querySelector('.document .bar') != null", 20)
        browser.screenshot(shots / "reading.png")
        browser.wait_for("return !document.querySelector('#question').disabled", 180)
        browser.wait_for("return document.querySelector('#page').textContent.length > 11000")
        check(browser.run("return document.title") == "Lodestone", "a document's text is text, never HTML")
        check(browser.run("return document.querySelector('#page').textContent").startswith("<img"), "and shown as it is")
        browser.run("const s = document.querySelector('#second'); s.value = 'full'; s.dispatchEvent(new Event('change'))")
        ask(browser, QUESTION)
        answers = browser.run("return [...document.querySelectorAll('.answer .text')].map(one => one.textContent)")
        check(answers == ["bookbinder", "bookbinder"], f"two methods answer: {answers}")
        marked = browser.run("return document.querySelector('mark.at').textContent")
        check("Clara Whitaker" in marked, f"the passage that was looked at is lit up: {marked!r}")
        visible = browser.run("const r = document.querySelector('mark.at').getBoundingClientRect(), p = document.querySelector('#page').getBoundingClientRect(); return r.top >= p.top && r.bottom <= p.bottom")
        check(visible, "and scrolled to")
        browser.screenshot(shots / "answer.png")
        browser.click(".answer .source")
        check("Clara Whitaker" in browser.run("return document.querySelector('mark.at').textContent"), "a source jumps to its place")
        browser.run("document.activeElement.blur(); document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))")
        check(browser.run("return document.activeElement.id") == "question", "the slash goes to the question")
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("return document.querySelectorAll('.document').length == 1 && !document.querySelector('#question').disabled")
        check(True, "a reload finds the document")
        outside = browser.run("return performance.getEntriesByType('resource').map(one => one.name).filter(one => !one.startsWith(location.origin) && !one.startsWith('data:'))")
        check(outside == [], f"nothing is loaded from outside: {outside}")
        check(browser.complaints() == [], f"no complaint of the browser: {browser.complaints()}")


def after_a_restart(server: Server, shots: pathlib.Path):
    with Browser(1440, 900, dark=True) as browser:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("return !document.querySelector('#question').disabled")
        ask(browser, QUESTION)
        check(browser.run("return document.querySelector('.answer .text').textContent") == "bookbinder", "a restart answers as before")
        browser.screenshot(shots / "dark.png")


def phone(server: Server, shots: pathlib.Path):
    with Browser(390, 844, phone=True) as browser:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("return document.querySelectorAll('.document').length == 1")
        browser.screenshot(shots / "phone-documents.png")
        browser.click(".document")
        ask(browser, QUESTION)
        browser.screenshot(shots / "phone-answer.png")
        browser.click(".answer .source")
        browser.wait_for("return document.querySelector('main').dataset.tab == 'reader'")
        browser.screenshot(shots / "phone-text.png")
        check(browser.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the phone")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="lodestone-page-") as name:
        folder = pathlib.Path(name)
        shots = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else folder
        shots.mkdir(parents=True, exist_ok=True)
        arguments = ("-m", ROOT / "models" / "pocket", "-a", "kmeans:probes=48,window=512", "-a", "squeezed", "--quiet")
        with Server(folder / "contexts", *arguments) as server:
            desktop(server, document(folder), shots)
        with Server(folder / "contexts", *arguments) as server:
            after_a_restart(server, shots)
            phone(server, shots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
