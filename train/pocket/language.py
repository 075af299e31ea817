# SPDX-License-Identifier: Apache-2.0
"""The task language of assets/tasks.json: words, values and wordings of one split."""

from __future__ import annotations

import json
import random
import zlib
from functools import cache
from pathlib import Path
from typing import Any, Callable, Sequence, TypeVar

TASKS = Path(__file__).resolve().parents[2] / "assets" / "tasks.json"
HEX = "0123456789abcdef"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SLOTS = {"city": "cities", "place": "places", "attribute": "attributes", "adjective": "adjectives", "noun": "nouns"}

T = TypeVar("T")


@cache
def load_tasks() -> dict[str, Any]:
    return json.loads(TASKS.read_text(encoding="utf-8"))


class Language:
    """Draws words and values that belong to one split, "train" or "held_out", and hands out its wordings.

    The wordings are the usual ones, unless `new_wordings` asks for the held-out ones. Training mixes further wordings in
    (`more_wordings`), and `widen` lends it a vocabulary far wider than the lists.
    """

    def __init__(self, split: str, rng: random.Random, new_wordings: bool = False) -> None:
        tasks = load_tasks()
        self.prompt, self.families, self.tasks = tasks["prompt"], tasks["families"], tasks["tasks"]
        self.kinds, self.syllables = tasks["values"], tasks["invented"]
        self.held = split == "held_out"
        self.rules = tasks["held_out"]
        self.rng = rng
        self.new_wordings = new_wordings
        self.more_wordings = 0.0  # share of the wordings that come from the lists named ..._more
        split_lists = self.rules["words"]["lists"]
        self.words = {
            name: [w for w in words if name not in split_lists or self._of_split(w, "words")]
            for name, words in tasks["words"].items()
        }

    def _of_split(self, text: str, rule: str) -> bool:
        r = self.rules[rule]
        return (zlib.crc32(text.encode()) % r["modulus"] == r["residue"]) == self.held

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.random() * len(choices))]

    def wordings(self, entry: dict[str, Any], name: str) -> list[str]:
        if self.new_wordings:
            return entry[f"{name}_held_out"]
        if self.more_wordings and f"{name}_more" in entry and self.rng.random() < self.more_wordings:
            return entry[f"{name}_more"]
        return entry[name]

    def widen(self, corpus_words: list[str]) -> dict[str, list[str]]:
        """The word lists with all words that are copied as answers replaced: by words of the corpus, or by invented names
        where the list's words begin with a capital. A model that only ever copies a few hundred words learns those
        words; it should learn to copy."""
        names = self.unique(lambda: self.value("invented"), 3000)
        plain = [w for w in corpus_words if self._of_split(w, "words")]
        kept = ("counts", "attributes", "places")
        return {name: words if name in kept else names if words[0][0].isupper() else plain
                for name, words in self.words.items()}

    def word(self, slot: str) -> str:
        """A word for a template's slot: {city}, {noun}, {person}, {invented}, ..."""
        return self.pick(self.words[SLOTS[slot]]) if slot in SLOTS else self.value(slot)

    def value(self, kind: str) -> str:
        """A string of a kind in tasks.json's "values"."""
        spec = self.kinds[kind]
        return getattr(self, f"_{spec['type']}")(spec)

    def unique(self, draw: Callable[[], T], count: int, known: set[T] | None = None) -> list[T]:
        """`count` different draws, fewer when the supply runs dry."""
        seen: dict[T, None] = {}
        known = known or set()
        for _ in range(20 * count + 50):
            if len(seen) == count:
                break
            if (drawn := draw()) not in known:
                seen[drawn] = None
        return list(seen)

    def _template(self, spec: dict[str, Any]) -> str:
        return spec["template"].format_map(_Draw(self))

    def _digits(self, spec: dict[str, Any]) -> str:
        length, rule = spec["length"], self.rules["numbers"]
        while True:
            if "alphabet" in spec:
                alphabet = self.rng.sample("123456789", spec["alphabet"])
                text = "".join(self.rng.choices(alphabet, k=length))
            else:
                text = str(self.rng.randrange(10 ** (length - 1), 10**length))
            if (int(text) % rule["modulus"] == rule["residue"]) == self.held:
                return text

    def _string(self, draw: Callable[[], str]) -> str:
        while True:
            if self._of_split(text := draw(), "strings"):
                return text

    def _hex(self, spec: dict[str, Any]) -> str:
        return self._string(lambda: "".join(self.rng.choices(HEX, k=spec["length"])))

    def _letters(self, spec: dict[str, Any]) -> str:
        return self._string(lambda: "".join(self.rng.choices(LETTERS, k=spec["length"])))

    def _invented(self, spec: dict[str, Any]) -> str:
        s = self.syllables

        def draw() -> str:
            count = self.pick(s["syllables"])
            parts = (self.pick(s[part]) for _ in range(count) for part in ("onsets", "vowels", "codas"))
            return "".join(parts).capitalize()

        return self._string(draw)


class _Draw(dict[str, str]):
    """Fills a template's {list} slots, each with a word drawn when it is asked for."""

    def __init__(self, language: Language) -> None:
        self.language = language

    def __missing__(self, name: str) -> str:
        return self.language.pick(self.language.words[name])
