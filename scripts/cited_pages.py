#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the shipped model's answers about a long PDF cite the right page.

Writes a PDF of generated prose with facts on known pages, indexes it, asks one question a fact, and counts right answers, those
whose first source stands on the fact's page, and those where one of the three does.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

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


def document(program: pathlib.Path, model: pathlib.Path, pages: int, questions: int, seed: int) -> tuple[list[list[str]], dict[str, str]]:
    """Typeset pages, and the code of each city whose archive they mention."""
    chance = random.Random(seed)
    prose = run(program, "tasks", "prose", "-m", model, "--tokens", pages * 860, "--seed", seed, "--quiet")
    codes = {city: "".join(chance.choice("123456789") for _ in range(5)) for city in CITIES[:questions]}
    gaps = [i + 2 for i in range(len(prose) - 2) if prose[i : i + 2] == ". "]
    for city, at in zip(codes, sorted(chance.sample(gaps, len(codes)), reverse=True)):
        prose = f"{prose[:at]}The entry code of the {city} archive is {codes[city]}. {prose[at:]}"
    return documents.pages_of(prose)[:pages], codes


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/lodestone")
    arguments.add_argument("--model", type=pathlib.Path, default=ROOT / "models/pocket")
    arguments.add_argument("--pages", type=int, default=60)
    arguments.add_argument("--questions", type=int, default=30, help=f"at most {len(CITIES)}")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("-a", "--attention", default="full")
    arguments.add_argument("--keep", type=pathlib.Path, help="folder for the PDF and what is indexed of it")
    flags = arguments.parse_args()
    folder = tempfile.TemporaryDirectory()
    place = flags.keep or pathlib.Path(folder.name)
    pages, codes = document(flags.program, flags.model, flags.pages, flags.questions, flags.seed)
    report, indexed = documents.write(place, "report.pdf", documents.pdf(pages, "The Annals of the Harbour", numbered=True)), place / "report.lode"
    if not indexed.exists():
        print(run(flags.program, "index", "-m", flags.model, "-f", report, "-o", indexed), end="", flush=True)
    there = {city: n for city, code in codes.items() for n, page in enumerate(pages, 1) if code in " ".join(page)}
    questions = [f"What is the entry code of the {city} archive?" for city in there]
    answers = json.loads(run(flags.program, "ask", indexed, *questions, "-a", flags.attention, "--show-sources", "--json"))["answers"]
    right = first = among = of_right = 0
    for (city, page), answer in zip(there.items(), answers):
        cited = [source.get("start_page_number") for source in answer["sources"]]
        right += codes[city] in answer["answer"]
        first += cited[:1] == [page]
        among += page in cited
        of_right += codes[city] in answer["answer"] and cited[:1] == [page]
        print(f"{city}: page {page}, cited {cited} with {[round(s['weight'], 2) for s in answer['sources']]}, answer {answer['answer']!r} ({codes[city]})")
    print(f"{len(pages)} pages, {len(there)} questions: {right} answers right, {first} first sources on the right page, {among} among the first three; "
          f"of the right answers {of_right} have their page first")


if __name__ == "__main__":
    main()
