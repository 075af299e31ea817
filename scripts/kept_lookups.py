#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many of the lookups that full attention answers rightly do sparse methods keep, with a small chat model and texts that fill its context?

Each document is a passage of a book with made-up facts between its paragraphs, each of another sort and about another town, behind the
start and in front of the window. It is indexed once in the model's chat template and asked about every fact under all methods; question and answer both
attend sparsely. Only questions count that `full` answers rightly; documents follow until there are enough of them. `streaming`, which sees sink and
window alone, shows what can be guessed. Intervals are Wilson's of 95 %. With --keep FILE, documents that FILE holds are not asked again.

  scripts/kept_lookups.py build/release/lodestone -m SmolLM2-135M-Instruct.Q4_1.gguf --books BOOKS/*.txt --keep answers.jsonl
"""

import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

# A model of 135 M parameters confuses facts of one sort, such as codes of many archives, and towns far less.
SORTS = """entry code of the {} archive|telephone number of the {} bakery|price of the {} painting|height of the {} tower|weight of the {} bell
number of books in the {} library|depth of the {} mine|length of the {} railway|licence number of the {} ferry|number of soldiers in the {} fort
rent of the {} mill|number of beds in the {} hospital|age of the {} oak|speed of the {} steamer|width of the {} canal|number of pupils of the {} school
area of the {} park|number of prisoners in the {} jail|toll of the {} bridge|volume of the {} reservoir|wage of the {} gardener|number of sheep of the {} farm
tax of the {} brewery|value of the {} diamond|power of the {} engine|number of pages of the {} chronicle|fare of the {} tram|number of rooms of the {} hotel
capacity of the {} warehouse|number of graves in the {} cemetery""".replace("\n", "|").split("|")
TOWNS = """Lisbon Cairo Madrid Vienna Dublin Prague Athens Warsaw Berlin London Paris Rome Geneva Boston Moscow Tokyo Lima Oslo Havana Delhi Sofia Riga
Tunis Naples Venice Zurich Munich Hamburg Cologne Seville Porto Bergen Krakow Turin Lyon Ghent Basel Leipzig""".split()
FIRST, LAST = 0.03, 0.88  # where in the text facts may stand: the last eighth, some 950 tokens of 8,000, is wider than the window
TOKENS_A_FACT = 17
SPECS = ["kmeans:window=511", "squeezed:sparsity=0.9,window=511", "streaming:window=511"]


def run(*command, text=None):
    done = subprocess.run([str(word) for word in command], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-500:]}")
    return done.stdout


def facts_of(draw, count):
    """(sentence, question, number), no two of a sort, of a town or with the same number."""
    numbers = draw.sample([n for n in range(111, 1000) if n % 10], count)
    subjects = [sort.format(town) for sort, town in zip(draw.sample(SORTS, count), draw.sample(TOWNS, count))]
    return [(f"The {subject} is {number}.", f"According to the text, what is the {subject}?", str(number)) for subject, number in zip(subjects, numbers)]


def document_of(flags, book, draw, folder):
    """A passage of the book from the start of a paragraph on, as long as the model's tokens say, and the facts that were put into it."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", book.read_text(encoding="utf-8"))
    most = 6 * flags.tokens  # characters: English has some 4 a token
    if len(text) < 2 * most:
        sys.exit(f"{book}: expected a text of at least {2 * most} characters, found {len(text)}: name longer books")
    at = text.index("\n\n", draw.randrange(len(text) // 10, len(text) - most - most // 2)) + 2
    passage = text[at : at + 3 * flags.tokens]
    (folder / "passage.txt").write_text(passage, encoding="utf-8")
    told = run(flags.lodestone, "estimate", "-m", flags.model, "-f", folder / "passage.txt", "-a", "full", "--quiet", "--device", "cpu")
    facts = facts_of(draw, flags.facts)
    length = int(len(passage) / int(told.split()[0]) * (flags.tokens - TOKENS_A_FACT * len(facts)))
    passage = text[at : at + length]
    gaps = [i for i in range(int(FIRST * length), int(LAST * length)) if passage.startswith("\n\n", i)]
    if len(gaps) < len(facts):
        return document_of(flags, book, draw, folder)
    for (sentence, _, _), gap in zip(facts, sorted(draw.sample(gaps, len(facts)), reverse=True)):
        passage = f"{passage[:gap]}\n\n{sentence}{passage[gap:]}"
    return passage, facts


def measure(flags, number, folder):
    """One document's answers: {"settings", "document", "tokens", "asked": [{"question", "number", "answers": [of full, of each spec], "bytes"}]}."""
    book = flags.books[number % len(flags.books)]
    passage, facts = document_of(flags, book, random.Random(f"{flags.seed} {number}"), folder)
    file, context = folder / "text.txt", folder / "text.lode"
    file.write_text(passage, encoding="utf-8")
    specs = ["full", *flags.specs]
    attention = [word for spec in specs for word in ("-a", spec)]
    common = ["--json", "--quiet", "--device", "cpu"]
    indexed = json.loads(run(flags.lodestone, "index", "-m", flags.model, "-f", file, "-o", context, "--chat", "on", "--kv-type", flags.kv_type,
                             *attention, *common))
    # A line is enough: what the model goes on with is not its answer.
    said = json.loads(run(flags.lodestone, "ask", context, "-n", 24, "--stop", "\\n", *attention, *common,
                          text="\n".join(question for _, question, _ in facts)))["answers"]
    rows = [said[i : i + len(specs)] for i in range(0, len(said), len(specs))]
    asked = [{"question": question, "number": right, "answers": [a["answer"] for a in row], "bytes": [a["density"] for a in row]}
             for (_, question, right), row in zip(facts, rows, strict=True)]
    return {"settings": settings_of(flags), "document": number, "tokens": indexed["tokens"], "asked": asked}


def settings_of(flags):
    return {"model": flags.model.name, "books": [book.name for book in flags.books], "tokens": flags.tokens, "facts": flags.facts, "seed": flags.seed,
            "kv_type": flags.kv_type, "specs": flags.specs}


def kept_documents(flags):
    if not flags.keep or not flags.keep.exists():
        return []
    found = [json.loads(line) for line in flags.keep.read_text().splitlines()]
    for document in found:
        if document["settings"] != settings_of(flags):
            sys.exit(f"{flags.keep}: expected documents with the settings {settings_of(flags)}, found {document['settings']}: name another file")
    return found


def verdicts(question):
    """Whether each answer names the number: full's first."""
    return [re.search(rf"(?<!\d){question['number']}(?!\d)", answer.replace(",", "")) is not None for answer in question["answers"]]


def wilson(hits, count, z=1.96):
    """95 % interval of a share, in percent."""
    share = hits / count
    middle, half = share + z * z / (2 * count), z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return [100 * (middle + sign * half) / (1 + z * z / count) for sign in (-1, 1)]


def show(flags, documents):
    asked = [question for document in documents for question in document["asked"]]
    judged = [verdicts(question) for question in asked]
    counted = [right for right in judged if right[0]]
    tokens = [document["tokens"] for document in documents]
    print(f"{len(documents)} documents of {min(tokens)} to {max(tokens)} tokens, {len(asked)} questions, {len(counted)} answered rightly by full")
    print("| attention | kept of these | share | 95 % | right of all questions | KV bytes read |")
    print("|---" * 6 + "|")
    for n, spec in enumerate(["full", *flags.specs]):
        kept = sum(right[n] for right in counted)
        low, high = wilson(kept, max(1, len(counted)))
        density = sum(question["bytes"][n] for question in asked) / len(asked)
        print(f"| {spec} | {kept} of {len(counted)} | {100 * kept / max(1, len(counted)):.1f} % | {low:.1f} to {high:.1f} % | "
              f"{sum(right[n] for right in judged)} of {len(asked)} | {100 * density:.1f} % |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone", type=pathlib.Path)
    parser.add_argument("-m", "--model", type=pathlib.Path, required=True, help="with a chat template")
    parser.add_argument("--books", type=pathlib.Path, nargs="+", required=True, help="plain text with blank lines between paragraphs; one document of each, then a second")
    parser.add_argument("-a", dest="specs", action="append", default=[], help=f"compared with full [default: {' '.join(SPECS)}]")
    parser.add_argument("--tokens", type=int, default=7900, help="of a document, nearly")
    parser.add_argument("--facts", type=int, default=12, help=f"of a document, each asked about; at most {len(SORTS)}")
    parser.add_argument("--wanted", type=int, default=200, help="questions that full answers rightly")
    parser.add_argument("--documents", type=int, default=40, help="at most")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=pathlib.Path, help="file for every answer as JSON lines, a document each")
    flags = parser.parse_args()
    flags.specs = flags.specs or SPECS
    documents = kept_documents(flags)
    while len(documents) < flags.documents:
        judged = [verdicts(question) for document in documents for question in document["asked"]]
        if sum(right[0] for right in judged) >= flags.wanted:
            break
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            documents.append(measure(flags, len(documents), pathlib.Path(folder)))
        if flags.keep:
            with flags.keep.open("a") as file:
                file.write(json.dumps(documents[-1]) + "\n")
        judged = [verdicts(question) for question in documents[-1]["asked"]]
        kept = ", ".join(f"{sum(right[0] and right[n] for right in judged)} by {spec}" for n, spec in enumerate(flags.specs, 1))
        print(f"document {len(documents)}, {documents[-1]['tokens']} tokens, {time.monotonic() - begin:.0f} s: of {len(judged)} questions "
              f"{sum(right[0] for right in judged)} answered rightly by full, of these {kept}", file=sys.stderr, flush=True)
    show(flags, documents)


if __name__ == "__main__":
    main()
