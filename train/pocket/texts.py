# SPDX-License-Identifier: Apache-2.0
"""Writes training documents of the pocket model as text files, for `lodestone train`: books with facts and questions
between their sentences, made of training words, wordings and books only. Needs no GPU.

    python texts.py --corpus BOOKS --tokenizer ../../models/pocket/tokenizer.json --out TEXTS --count 12 --tokens 8192
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np

from documents import Generator
from tokenizer import Encoder, is_held_out


def encode_some(books: list[Path], encoder: Encoder, out: Path) -> None:
    tokens: list[int] = []
    for book in books:
        tokens += encoder(book.read_text(encoding="utf-8").strip() + "\n\n")
    np.savez(out, train=np.array(tokens, dtype=np.uint16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of plain text books, *.txt")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192, help="length of each document")
    parser.add_argument("--books", type=int, default=8, help="books that the documents are cut from")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    books = sorted(b for b in arguments.corpus.glob("*.txt") if not is_held_out(b))
    random.Random(arguments.seed).shuffle(books)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.npz"
        encode_some(books[: arguments.books], Encoder(arguments.tokenizer), corpus)
        generator = Generator(corpus, arguments.tokenizer, "train", arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for i in range(arguments.count):
        tokens = generator.fact_document(arguments.tokens - 1)[0]
        (arguments.out / f"document-{i:02}.txt").write_text(generator.encoder.decode(tokens.tolist()), encoding="utf-8")


if __name__ == "__main__":
    main()
