#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `index` reads of files that common tools wrote: LibreOffice, pandoc, pdfLaTeX. Text, order, footnotes, hyphenation, pages.

  apt install pandoc libreoffice-writer-nogui texlive-latex-recommended lmodern
  tests/long/common_tools.py

A source of known sentences is turned into DOCX, ODT, EPUB, HTML and PDF by each tool that can. Every file is indexed, and its text
has to hold each sentence once, in their order, and nothing of the markup."""

import base64
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

import documents  # noqa: E402
from documents_test import places_of, text_of  # noqa: E402
from program import PROGRAM  # noqa: E402

MODEL = ROOT / "models/pocket"
# Words that pdfLaTeX hyphenates in a narrow column.
LONG = "extraordinarily misunderstandings characteristically responsibilities internationalisation incomprehensible"
CHAPTERS = 6
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


def sentence(chapter: int, n: int) -> str:
    words = LONG.split()
    return (f"In chapter {chapter} the keeper number {n} wrote of {words[(chapter + n) % len(words)]} and of "
            f"{words[(chapter * n + 1) % len(words)]} matters in the year {1500 + 37 * chapter + n}.")


def footnote(chapter: int) -> str:
    return f"A note tells of the {['lamp', 'widow', 'harbour bell', 'ship', 'quay', 'old annals'][chapter - 1]} and of {LONG.split()[-chapter]} things."


def sentences() -> list[str]:
    return [sentence(c, n) for c in range(1, CHAPTERS + 1) for n in range(1, 13)]


def markdown(image: bool) -> str:
    parts = ["---\ntitle: The Keepers\nlang: en-GB\n---\n"]
    for c in range(1, CHAPTERS + 1):
        parts.append(f"# Chapter {c}: “Größe” & Maß\n")
        if image:
            parts.append("![A dot](dot.png)\n")
        parts += [sentence(c, n) + (f"[^n{c}]" if n == 6 else "") + "\n" for n in range(1, 13)]
        parts.append(f"[^n{c}]: {footnote(c)}\n")
    return "\n".join(parts)


def latex(columns: int) -> str:
    body = []
    for c in range(1, CHAPTERS + 1):
        body.append(f"\\section{{Chapter {c}: ``Gr\\\"o\\ss e'' \\& Ma\\ss}}")
        text = " ".join(sentence(c, n) + (f"\\footnote{{{footnote(c)}}}" if n == 6 else "") for n in range(1, 13))
        body.append(text + ("\\clearpage" if columns == 1 else ""))
    option = ",twocolumn" if columns == 2 else ""
    return ("\\documentclass[a4paper" + option + "]{article}\n\\usepackage[T1]{fontenc}\\usepackage{lmodern}\n\\title{The Keepers}\\author{A. Nobody}\n"
            "\\begin{document}\n\\maketitle\n" + "\n\n".join(body) + "\n\\end{document}\n")


def run(*words, where: pathlib.Path) -> None:
    done = subprocess.run([str(w) for w in words], cwd=where, capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        sys.exit(f"{words[0]}: {done.stdout[-1500:]}{done.stderr[-1500:]}")


def make(place: pathlib.Path) -> dict[str, pathlib.Path]:
    """Files by what made them; a tool that is not here is named and left out."""
    made: dict[str, pathlib.Path] = {}
    (place / "dot.png").write_bytes(PIXEL)
    (place / "keepers.md").write_text(markdown(image=True), encoding="utf-8")
    if shutil.which("pandoc"):
        for kind in ("docx", "odt", "epub", "html"):
            made[f"pandoc {kind}"] = place / f"pandoc.{kind}"
            run("pandoc", "-s", "keepers.md", "-o", f"pandoc.{kind}", where=place)
    else:
        print("left out: pandoc is not here (apt install pandoc)")
    if shutil.which("soffice") and "pandoc docx" in made:
        for kind in ("odt", "pdf", "docx", "html"):
            (place / kind).mkdir()
            source = "pandoc.odt" if kind == "docx" else "pandoc.docx"
            run("soffice", "--headless", f"-env:UserInstallation=file://{place}/office", "--convert-to", kind, "--outdir", place / kind, source, where=place)
            made[f"LibreOffice {kind}"] = place / kind / f"pandoc.{kind}"
    else:
        print("left out: LibreOffice, or the pandoc whose files it converts, is not here (apt install libreoffice-writer-nogui pandoc)")
    if shutil.which("pdflatex"):
        for columns in (1, 2):
            (place / f"latex{columns}.tex").write_text(latex(columns), encoding="utf-8")
            run("pdflatex", "-interaction=batchmode", f"latex{columns}.tex", where=place)
            made[f"pdfLaTeX, {columns} column{'s' * (columns > 1)}"] = place / f"latex{columns}.pdf"
    else:
        print("left out: pdfLaTeX is not here (apt install texlive-latex-recommended lmodern)")
    for encoding in ("utf-16", "latin-1", "cp1252", "utf-8-sig"):
        text = "\n".join(["Größe und Maß.", *sentences()])
        made[f"text in {encoding}"] = documents.write(place, f"{encoding}.txt", text.encode(encoding))
    return made


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\u00a0", " ").replace("\u00ad", ""))


def faults(text: str, kind: str) -> list[str]:
    found, at, flat = [], 0, plain(text)
    for wanted in sentences():
        # A footnote's mark may stand right behind the sentence's last word.
        where = flat.find(wanted[:-1], at)
        if where < 0:
            found.append(f"not found in its order: {wanted}")
        else:
            at = where
        if flat.count(wanted[:-1]) > 1:
            found.append(f"more than once: {wanted}")
    if "Größe" not in flat:
        found.append("'Größe' is not as it was written")
    if "text" not in kind:
        found += [f"the footnote of chapter {c} is missing" for c in range(1, CHAPTERS + 1) if footnote(c) not in flat]
    found += [f"markup: {mark}" for mark in ("<p", "</", "{http", "\\section", "endobj", "word/") if mark in text]
    return found


def pages_right(path: pathlib.Path) -> tuple[int, int]:
    """Of the one-column PDF, where each chapter has a page: chapters whose first sentence is placed on it."""
    text, (_, marks) = text_of(path), places_of(path)
    right = 0
    for c in range(1, CHAPTERS + 1):
        at = len(text[: text.index(f"In chapter {c} the keeper number 1 ")].encode())
        right += [mark for mark in marks if mark[0] <= at][-1][1] == c
    return right, CHAPTERS


def main() -> None:
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        for kind, path in make(place).items():
            output = place / "read.lode"
            run(ROOT / PROGRAM, "index", "-m", MODEL, "-f", path, "-o", output, "--force", "--restart", "--quiet", where=place)
            wrong = faults(text_of(output), kind)
            if kind == "pdfLaTeX, 1 column" and (pages := pages_right(output))[0] != pages[1]:
                wrong.append(f"pages: {pages[0]} of {pages[1]} chapters stand on their page")
            bad += bool(wrong)
            print(f"{kind}: " + ("right" if not wrong else f"{len(wrong)} faults, first: {wrong[0]}"), flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
