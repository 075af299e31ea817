# SPDX-License-Identifier: Apache-2.0
"""Trains the byte-level BPE tokenizer on the training books and encodes all books.

    python tokenizer.py --corpus DIR --out BUILD

writes BUILD/tokenizer.json and BUILD/corpus.npz (token streams of both splits).
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import numpy as np
import regex
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from language import TASKS, load_tasks

VOCABULARY = 4096
BOS, EOS = 0, 1
SPECIAL = ["<|bos|>", "<|eos|>", *(f"<|reserved_{i}|>" for i in range(2, 16))]

# Qwen2's pre-tokenizer: contractions, words with the space before them, single digits, punctuation, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Encoder:
    """Encodes text like the tokenizer does, without BOS, remembering each pre-token: some twenty times faster on
    template sentences, and exact because BPE never merges across pre-tokens."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.split = regex.compile(PATTERN).findall
        self.memory: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.split(text):
            found = self.memory.get(piece)
            if found is None:
                found = self.memory[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += found
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def texts(self) -> list[str]:
        """The text of every token by itself (broken UTF-8 as replacement characters)."""
        return [self.tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCABULARY)]


def is_held_out(book: Path) -> bool:
    """The split rule of tasks.json, by the crc32 of the file name."""
    rule = load_tasks()["held_out"]["books"]
    return zlib.crc32(book.name.encode()) % rule["modulus"] == rule["residue"]


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,  # take the ids from 0 on
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte stays encodable
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", pair=f"{SPECIAL[BOS]} $A $B", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return tokenizer


def encode_books(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """One stream of all books and where each begins: (tokens (N,) uint16, starts (books,) int64)."""
    books = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    starts = np.cumsum([0] + [len(b) for b in books[:-1]])
    return np.concatenate(books), starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of plain text books, *.txt")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    books = sorted(arguments.corpus.glob("*.txt"))
    texts = {
        split: [b.read_text(encoding="utf-8").strip() + "\n\n" for b in books if is_held_out(b) == (split == "held_out")]
        for split in ("train", "held_out")
    }
    tokenizer = train(texts["train"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)
    arrays = {}
    for split, of_split in texts.items():
        arrays[split], arrays[f"{split}_starts"] = encode_books(tokenizer, of_split)
        characters = sum(len(t) for t in of_split)
        count = len(arrays[split])
        print(f"{split}: {len(of_split)} books, {count} tokens, {characters / count:.2f} characters a token")
    np.savez(arguments.out / "corpus.npz", **arrays)
    print(f"task language: {TASKS}")


if __name__ == "__main__":
    main()
