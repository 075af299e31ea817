#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the shipped model's answers about a long PDF cite the right page.

Writes PDFs of generated prose with facts on known pages, indexes each, asks one question a fact, and counts right answers, those
whose first source stands on the fact's page, and those where one of the three does. A model that finds few of many facts needs
several documents with fewer facts in each.

  scripts/cited_pages.py                                                   # 60 pages, 30 questions, the shipped model
  scripts/cited_pages.py --model SmolLM2.gguf --pages 10 --lines 36 --questions 12 --documents 6 --sorts
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))
import documents  # noqa: E402

CITIES = ("Lisbon Cairo Madrid Vienna Dublin Prague Athens Warsaw Berlin London Paris Rome Geneva Boston Moscow Tokyo Lima Oslo Havana "
          "Delhi Sofia Riga Tunis Naples Venice Zurich Munich Hamburg Cologne Seville Porto Bergen Krakow Turin Lyon Ghent Basel Leipzig Malmo Tampa "
          "Quito Bogota Nairobi Dakar Accra Osaka Kyoto Hanoi Manila Seoul Dakota Austin Dallas Denver Quebec Calgary Bern Bremen Dresden Graz "
          "Bruges Antwerp Utrecht Cadiz").split()


def run(*words) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout


class Fact(NamedTuple):
    sentence: str
    question: str
    answer: str
    page: int = 0


# What a small model does not mistake for each other, as it does codes of many archives.
SORTS = ("entry code of the {} archive|telephone number of the {} bakery|price of the {} painting|height of the {} tower|weight of the {} bell|"
         "number of books in the {} library|number of the {} traveller's ticket|depth of the {} mine|length of the {} railway|"
         "licence number of the {} ferry|number of soldiers in the {} fort|rent of the {} mill").split("|")


def facts_of(chance: random.Random, alike: bool, count: int) -> list[Fact]:
    """Facts about a city each: its archive's code, or of so many sorts."""
    cities, sorts = chance.sample(CITIES, count), SORTS[:1] * count if alike else chance.sample(SORTS, count)
    subjects = [sort.format(city) for sort, city in zip(sorts, cities)]
    codes = ["".join(chance.choice("123456789") for _ in range(5)) for _ in cities]
    return [Fact(f"The {subject} is {code}.", f"What is the {subject}?", code) for subject, code in zip(subjects, codes)]


def document(flags, seed: int) -> tuple[list[list[str]], list[Fact]]:
    """Typeset pages, and the facts that they mention."""
    chance = random.Random(seed)
    prose = run(flags.program, "tasks", "prose", "-m", flags.model, "--tokens", flags.pages * flags.tokens_a_page, "--seed", seed, "--quiet")
    facts = facts_of(chance, not flags.sorts, flags.questions)
    typeset = documents.pages_of(" ".join([*(fact.sentence for fact in facts), prose]), flags.lines)
    fits = int(0.98 * len(prose) * min(1, flags.pages / len(typeset)))  # so that no fact stands behind the last page
    gaps = [i + 2 for i in range(fits) if prose[i : i + 2] == ". "]
    for fact, at in zip(facts, sorted(chance.sample(gaps, len(facts)), reverse=True)):
        prose = f"{prose[:at]}{fact.sentence} {prose[at:]}"
    pages = documents.pages_of(prose, flags.lines)[: flags.pages]
    there = [fact._replace(page=n) for fact in facts for n, page in enumerate(pages, 1) if fact.answer in " ".join(page)]
    return pages, there


def pages_of(source: dict) -> range:
    """A sentence that goes over to the next page stands on both."""
    return range(source["start_page_number"], source["end_page_number"])


def measure(flags, place: pathlib.Path, seed: int) -> list[int]:
    """Questions, right answers, first sources on the right page, any source there; and, of the right answers, the last two."""
    pages, facts = document(flags, seed)
    report, indexed = documents.write(place, f"report{seed}.pdf", documents.pdf(pages, "The Annals of the Harbour", numbered=True)), place / f"report{seed}.lode"
    if not indexed.exists():
        print(run(flags.program, "index", "-m", flags.model, "-f", report, "-o", indexed).splitlines()[0], flush=True)
    said = run(flags.program, "ask", indexed, *(fact.question for fact in facts), "-a", flags.attention, "--show-sources", "--json")
    counts = [len(facts), 0, 0, 0, 0, 0]
    for fact, answer in zip(facts, json.loads(said)["answers"]):
        cited = [pages_of(source) for source in answer["sources"]]
        first, among = (any(fact.page in pages for pages in some) for some in (cited[:1], cited))
        right = fact.answer in answer["answer"]
        counts = [a + b for a, b in zip(counts, (0, right, first, among, right and first, right and among))]
        print(f"{fact.question} Page {fact.page}, cited {[*map(list, cited)]} with {[round(s['weight'], 2) for s in answer['sources']]}, "
              f"answer {answer['answer']!r} ({fact.answer})", flush=True)
    print(f"{len(pages)} pages, {told(counts)}", flush=True)
    return counts


def told(counts: list[int]) -> str:
    asked, right, first, among, first_of_right, among_of_right = counts
    return (f"{asked} questions: {right} answers right, {first} first sources on the right page, {among} among the first three; of the "
            f"right answers {first_of_right} have their page first, {among_of_right} among the first three")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/lodestone")
    arguments.add_argument("--model", type=pathlib.Path, default=ROOT / "models/pocket")
    arguments.add_argument("--pages", type=int, default=60)
    arguments.add_argument("--lines", type=int, default=documents.LINES_A_PAGE, help="of a page")
    arguments.add_argument("--tokens-a-page", type=int, default=900, help="tokens of prose to typeset for a page; what is too much is left out")
    arguments.add_argument("--questions", type=int, default=30, help=f"of a document, at most {len(CITIES)}")
    arguments.add_argument("--documents", type=int, default=1)
    arguments.add_argument("--sorts", action="store_true", help=f"facts of different sorts, at most {len(SORTS)} a document; else codes of archives")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("-a", "--attention", default="full")
    arguments.add_argument("--keep", type=pathlib.Path, help="folder for the PDFs and what is indexed of them")
    flags = arguments.parse_args()
    folder = tempfile.TemporaryDirectory()
    total = [0] * 6
    for seed in range(flags.seed, flags.seed + flags.documents):
        total = [a + b for a, b in zip(total, measure(flags, flags.keep or pathlib.Path(folder.name), seed))]
    if flags.documents > 1:
        print(f"{flags.documents} documents, {told(total)}")


if __name__ == "__main__":
    main()
