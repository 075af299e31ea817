# SPDX-License-Identifier: Apache-2.0
"""Training documents and evaluation samples: book text with facts between its sentences, then questions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import numpy as np
import regex

from families import FAMILIES, Fact, Families, Material, Question, merge
from language import Language
from tokenizer import BOS, EOS, VOCABULARY, Encoder

# What a token is, as a target: nothing to learn, book text, words of facts and questions, or ANSWER + a family's number.
SILENT, TEXT, TEMPLATE, ANSWER = 0, 1, 2, 8
ECHO = ANSWER + FAMILIES.index("echo")
MAX_POSITION = 131072

# How often a document with facts takes each family.
WEIGHTS = {"single": 0.16, "values": 0.26, "keys": 0.18, "code": 0.12, "person": 0.18, "kv": 0.09, "vt": 0.08,
           "freq": 0.17, "passkey": 0.03, "number": 0.04, "names": 0.06, "sightings": 0.9}
WIDE, MORE_WORDINGS = 0.45, 0.3  # share of documents with the wide vocabulary, share of the further wordings

Piece = tuple[np.ndarray, np.ndarray]  # tokens (n,) uint16 and kinds (n,) uint8


@dataclass(slots=True)
class Document:
    tokens: np.ndarray  # (T,) uint16
    kinds: np.ndarray  # (T,) uint8
    positions: np.ndarray  # (T,) int32


def piece(tokens: list[int] | np.ndarray, kind: int) -> Piece:
    return np.asarray(tokens, dtype=np.uint16), np.full(len(tokens), kind, dtype=np.uint8)


class Haystack:
    """The books of one split as one token stream, with the places where a sentence begins or ends."""

    def __init__(self, corpus: Path, split: str, encoder: Encoder) -> None:
        self.tokens: np.ndarray = np.load(corpus)[split]  # (N,) uint16
        texts = encoder.texts()
        ends = np.array([bool(regex.search(r"[.!?][\"')]*$", t)) for t in texts])  # (vocabulary,)
        begins = np.array([bool(regex.match(r" [A-Z\"]", t)) for t in texts])
        breaks = np.array([bool(regex.match(r"[ \n]", t)) for t in texts])
        self.word = np.array([bool(regex.match(r" \p{L}", t)) for t in texts])
        self.letters = np.array([bool(regex.search(r"\p{L}$", t)) for t in texts])
        after_end = np.concatenate([[False], ends[self.tokens[:-1]]])  # (N,)
        self.starts = np.flatnonzero(after_end & begins[self.tokens])  # a sentence starts here, inside a paragraph
        self.stops = np.flatnonzero(after_end & breaks[self.tokens])  # a sentence stopped before here

    def vocabulary(self, encoder: Encoder, rng: random.Random, tokens: int = 400_000) -> list[str]:
        """Lower-case words of a sample of the text."""
        start = rng.randrange(max(1, len(self.tokens) - tokens))
        text = encoder.decode(self.tokens[start : start + tokens].tolist())
        return sorted(set(regex.findall(r"\b[a-z]{4,10}\b", text)))

    def window(self, length: int, rng: random.Random) -> Window:
        start = int(self.starts[rng.randrange(np.searchsorted(self.starts, len(self.tokens) - length - 1))])
        return Window(self, start, length)


class Window:
    """A stretch of the haystack; places count from its own beginning."""

    def __init__(self, haystack: Haystack, start: int, length: int) -> None:
        self.tokens = haystack.tokens[start : start + length]
        self.haystack = haystack
        self.starts, self.stops = (
            places[np.searchsorted(places, start) : np.searchsorted(places, start + length)] - start
            for places in (haystack.starts, haystack.stops)
        )

    def gap(self, place: float, end: int) -> int:
        """The first gap between sentences at or after a place, at most `end`."""
        i = np.searchsorted(self.starts, place)
        return min(int(self.starts[i]), end) if i < len(self.starts) else end

    def passage(self, place: float, least: int, most: int) -> tuple[int, int] | None:
        """A passage of whole sentences, `least` to `most` tokens, near a place: (from, to)."""
        i = np.searchsorted(self.starts, place)
        if i == len(self.starts):
            return None
        start = int(self.starts[i])
        first, last = np.searchsorted(self.stops, (start + least, start + most + 1))
        return (start, int(self.stops[first])) if first < last else None

    def opening(self, start: int, stop: int, words: int) -> int | None:
        """Where the passage's first words end: before a new word, after a letter, so that it reads and splits cleanly."""
        tokens = self.tokens[start:stop]
        clean = np.flatnonzero(self.haystack.word[tokens[1:]] & self.haystack.letters[tokens[:-1]]) + 1
        enough = clean[np.cumsum(self.haystack.word[tokens])[clean] > words]  # words that began before the cut, and it
        return start + int(enough[0]) if len(enough) else None


class Writer:
    """Turns facts and questions into tokens."""

    def __init__(self, encoder: Encoder, language: Language) -> None:
        self.encode, self.language, self.prompt = encoder, language, language.prompt
        self.end = encoder(self.prompt["terminator"])
        self.glued = self._glued()

    def _glued(self) -> np.ndarray:
        """For every token that is a mark, the one token that it becomes before a blank line, else 0: (vocabulary,)."""
        glued = np.zeros(VOCABULARY, dtype=np.uint16)
        for token, text in enumerate(self.encode.texts()):
            if regex.fullmatch(r"[^\s\p{L}\p{N}\p{C}]+", text) and len(both := self.encode(text + "\n\n")) == 1:
                glued[token] = both[0]
        return glued

    def glue(self, written: Piece) -> Piece:
        """Writes `.` + blank line before a header as the one token that encoding both together gives. A prompt may be
        encoded whole or in two parts, so training shows both. EOS fills up the length."""
        tokens, kinds = written
        blank = self.end[0]
        places = np.flatnonzero((tokens[1:] == blank) & (kinds[1:] == TEMPLATE) & (self.glued[tokens[:-1]] > 0))
        tokens[places + 1] = self.glued[tokens[places]]
        fill = piece([EOS] * len(places), SILENT)
        return join([(np.delete(tokens, places), np.delete(kinds, places)), fill])

    def fact(self, fact: Fact) -> Piece:
        text = " " + fact.text
        if not fact.echo:
            return piece(self.encode(text), TEMPLATE)
        before, after = text.split(fact.echo, 1)
        return join([piece(self.encode(before), TEMPLATE), piece(self.encode(fact.echo), ECHO),
                     piece(self.encode(after), TEMPLATE)])

    def question(self, question: Question, give_prefix: bool = False) -> Piece:
        text = self.prompt["question"].format(question=question.text)
        if give_prefix and question.prefix:
            text += " " + question.prefix
        answer = self.encode(self.prompt["answer"].format(answer=question.answer)) + self.end
        return join([piece(self.encode(text), TEMPLATE), piece(answer, ANSWER + FAMILIES.index(question.family))])

    def recite(self, window: Window, passage: tuple[int, int], words: int) -> Piece | None:
        """The question for a passage by its first words. Book tokens are used as they are: both cuts are clean."""
        start, stop = passage
        cut = window.opening(start, stop, words)
        if cut is None or stop - cut < 10:
            return None
        shape = self.language.pick(self.language.wordings(self.language.families["recite"], "questions"))
        before, after = self.prompt["question"].format(question=shape).split(" {words}")
        return join([piece(self.encode(before), TEMPLATE), piece(window.tokens[start:cut], TEMPLATE),
                     piece(self.encode(after), TEMPLATE),
                     piece([*window.tokens[cut:stop], *self.end], ANSWER + FAMILIES.index("recite"))])


def join(pieces: list[Piece]) -> Piece:
    return np.concatenate([p[0] for p in pieces]), np.concatenate([p[1] for p in pieces])


class Generator:
    """Makes training documents of any length. `stretch`: share of documents with stretched positions."""

    def __init__(self, corpus: Path, tokenizer: Path, split: str, seed: int, stretch: float = 0.5) -> None:
        self.rng = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.encoder = Encoder(tokenizer)
        self.language = Language(split, self.rng)
        self.families = Families(self.language)
        self.haystack = Haystack(corpus, split, self.encoder)
        self.writer = Writer(self.encoder, self.language)
        self.stretch = stretch
        self.training = split == "train"
        if self.training:
            self.language.more_wordings = MORE_WORDINGS
            self.listed = self.language.words
            self.wide = self.language.widen(self.haystack.vocabulary(self.encoder, self.rng))

    def document(self, length: int) -> Document:
        if self.training:
            self.language.words = self.wide if self.rng.random() < WIDE else self.listed
        roll = self.rng.random()
        plain = 0.09 if length <= 1024 else 0.04
        lists = 0.16 if length <= 4096 else 0.06
        if roll < plain:
            tokens, kinds = piece(self.haystack.window(length - 1, self.rng).tokens, TEXT)
        elif roll < plain + lists:
            tokens, kinds = self.list_document(length - 1)
        else:
            tokens, kinds = self.fact_document(length - 1)
        if self.rng.random() < 0.4:
            tokens, kinds = self.writer.glue((tokens, kinds))
        in_loss = min(1.0, (1024 / length) ** 0.5)  # the corpus is small: long documents seldom teach their text
        if self.rng.random() > in_loss:
            kinds[kinds == TEXT] = SILENT
        first = piece([BOS], SILENT)
        tokens, kinds = join([first, (tokens, kinds)])
        return Document(tokens, kinds, self.positions(length))

    def positions(self, length: int) -> np.ndarray:
        """Position ids: plain, or with random gaps that stretch the document to a log-uniform span up to the longest,
        so that every distance is seen from the first minute on."""
        positions = np.arange(length, dtype=np.int64)  # (T,)
        if length >= MAX_POSITION or self.rng.random() > self.stretch:
            return positions.astype(np.int32)
        spare = int(math.exp(self.rng.uniform(math.log(length), math.log(MAX_POSITION)))) - length
        gaps = self.rng.randint(1, 8)
        shares = self.numpy.multinomial(spare, self.numpy.dirichlet(np.ones(gaps + 1)))[:gaps]  # the last stays unused
        for place, share in zip(self.numpy.integers(1, length, gaps), shares):
            positions[place:] += share
        return positions.astype(np.int32)

    # Documents without a haystack

    def list_document(self, length: int) -> Piece:
        """cwe or fwe over the whole document, cut to size by making a first guess smaller until it fits."""
        make = self.families.common_words if self.rng.random() < 0.5 else self.families.frequent_words
        items = int(length / (8 if make == self.families.common_words else 4))
        items = max(60, int(items * self.rng.choice((1, 1, 0.5))))
        while True:
            intro, listed, question = make(items)
            if question.family == "cwe":  # the common words come in no order: any may be learned first
                question.answer = ", ".join(self.rng.sample(question.answers, len(question.answers)))
            body = self.encoder(intro + " ".join(listed))
            asked = join([piece(self.encoder(self.header()), TEMPLATE), self.writer.question(question)])
            filler = length - len(body) - len(asked[0])
            if filler >= 0 or items < 20:
                break
            items = int(items * 0.9 * (length - len(asked[0])) / len(body))
        text = piece(self.haystack.window(max(filler, 1), self.rng).tokens[: max(filler, 0)], TEXT)
        return tuple(a[-length:] for a in join([text, piece(body, SILENT), asked]))

    # Documents with a haystack

    def how_many(self, length: int, dense: bool) -> int:
        most = length // 34 if dense else min(max(length // 64, 8), 640)
        if dense or self.rng.random() < 0.4:
            return self.rng.randint(max(1, most // 4), max(1, most))
        return int(math.exp(self.rng.uniform(0, math.log(most + 1))))

    def material(self, count: int) -> Material:
        kinds = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=min(self.rng.choice((1, 1, 2, 3)), count))
        cuts = sorted(self.rng.sample(range(1, count), len(set(kinds)) - 1)) if count > 1 else []
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, count])]
        return merge([self.family(kind, n) for kind, n in zip(sorted(set(kinds)), counts)], self.rng)

    def family(self, kind: str, count: int) -> Material:
        families, few = self.families, self.rng.random() < 0.5
        match kind:
            case "single":
                return families.magic(count, few=few)
            case "values":
                return families.magic(count, repeats=self.rng.choice(((1, 4), (1, 3), (2, 4))), few=few)
            case "keys":
                return families.magic(count, keys=(2, 4), few=few)
            case "code":
                return families.code(count, few)
            case "person":
                return families.person(count, few)
            case "sightings":
                return families.sightings(count, few)
            case "freq":
                rng = self.rng
                return families.freq(count, rng.randint(1, 5), rng.randint(5, 7), 6, rng.uniform(0.32, 0.45))
            case "passkey" | "number":
                return families.single(kind)
            case _:
                return getattr(families, kind)(count)

    def header(self) -> str:
        headers = self.writer.prompt["training_headers"]
        return self.writer.prompt["header"] if self.rng.random() < 0.6 else self.language.pick(headers)

    def fact_document(self, length: int) -> Piece:
        dense = self.rng.random() < (0.6 if length < 768 else 0.4 if length < 1536 else 0.06)
        count = self.how_many(length, dense)
        while True:  # smaller until the facts leave room for their questions
            material = self.material(count)
            facts = [self.writer.fact(f) for f in material.facts]
            size = sum(len(f[0]) for f in facts)
            if size < 0.6 * length or count == 1:
                break
            count = max(1, count // 2)
        depths = sorted(self.rng.random() for _ in facts)
        blocks = self.blocks(length, material.questions, depths, length - size - 40, 0.5 if dense else 0.25)
        size += sum(len(b[0]) for _, b in blocks)
        window = self.haystack.window(length, self.rng)
        inserts = [*zip(depths, facts)]
        if length >= 900 and not dense:
            blocks, echoes = self.quotations(window, blocks, length - size)
            inserts += echoes
            size = sum(len(p[0]) for _, p in inserts) + sum(len(b[0]) for _, b in blocks)
        return self.lay_out(window, inserts, blocks, length)

    def blocks(self, length: int, questions: list[Question], depths: list[float], room: int,
               share: float) -> list[tuple[float, Piece]]:
        """Question blocks with their depths, the last at the end; each asks only about facts told before it."""
        places = [1.0]
        if length >= 2000 and self.rng.random() < 0.5:
            places = sorted([self.rng.random() for _ in range(self.rng.randint(1, 9))]) + [1.0]
        asked: list[list[Piece]] = [[] for _ in places]
        room = min(room, int(share * length))
        for question in questions[:200]:
            allowed = [i for i, place in enumerate(places) if place > depths[question.after]]
            written = self.writer.question(question, self.rng.random() < 0.2)
            room -= len(written[0])
            if room < 30 * len(places):
                break
            asked[self.rng.choice([*allowed, len(places) - 1])].append(written)
        return [(place, join([piece(self.encoder(self.header()), TEMPLATE), *block]))
                for place, block in zip(places, asked) if block]

    def quotations(self, window: Window, blocks: list[tuple[float, Piece]],
                   room: int) -> tuple[list[tuple[float, Piece]], list[tuple[float, Piece]]]:
        """Adds recite questions to the last block, and passages that are quoted again without a question."""
        rng, scale = self.rng, 1 + int(math.log2(room / 512)) if room > 512 else 1
        recited, echoes = [], []
        spare = room // 4
        text = room - 2 * spare  # the haystack has at least so many tokens, whatever the quotations take
        if rng.random() < 0.35:
            for _ in range(rng.randint(1, 2 * scale)):
                passage = window.passage(rng.random() * text * 0.9, 18, 70)
                written = passage and self.writer.recite(window, passage, rng.randint(6, 10))
                if written and len(written[0]) < spare and passage[1] < text:
                    recited.append(written)
                    spare -= len(written[0])
        spare = room // 4
        if rng.random() < 0.4:
            for _ in range(rng.randint(1, 2 * scale)):
                passage = window.passage(rng.random() * text * 0.8, 24, min(200, max(30, spare)))
                if passage and passage[1] < text and passage[1] - passage[0] + 10 < spare:
                    echo = self.echo(window, *passage)
                    echoes.append((rng.uniform(min(1.0, passage[1] / text + 0.02), 1.0), echo))
                    spare -= len(echo[0])
        if recited:
            header = [] if blocks and blocks[-1][0] == 1.0 else [piece(self.encoder(self.header()), TEMPLATE)]
            blocks = [*blocks, (1.0, join([*header, *recited]))]
        return blocks, echoes

    def echo(self, window: Window, start: int, stop: int) -> Piece:
        lead = self.language.pick(self.language.families["echo"]["leads"]).rstrip()
        known = 4  # nobody can guess these first tokens
        return join([piece(self.encoder(" " + lead) if lead else [], TEMPLATE),
                     piece(window.tokens[start : start + known], TEMPLATE),
                     piece(window.tokens[start + known : stop], ECHO)])

    def lay_out(self, window: Window, inserts: list[tuple[float, Piece]], blocks: list[tuple[float, Piece]],
                length: int) -> Piece:
        """Puts everything at its depth into as much of the window as makes `length` tokens."""
        everything = sorted([*inserts, *blocks], key=lambda item: item[0])  # stable: the last blocks stay in order
        text = length - sum(len(p[0]) for _, p in everything)
        if text < 0:  # too much was asked for: keep the end, where the questions are
            return tuple(a[-length:] for a in join([p for _, p in everything]))
        pieces, done = [], 0
        for depth, written in everything:
            gap = max(done, window.gap(depth * text, text)) if depth < 1 else text
            pieces += [piece(window.tokens[done:gap], TEXT), written]
            done = gap
        pieces.append(piece(window.tokens[done:text], TEXT))
        return join(pieces)


def micro_batches(generator: Generator, lengths: dict[int, float], tokens: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless micro-batches of `tokens` tokens, all documents of one length, drawn by the shares in `lengths`:
    tokens (B, T) uint16, kinds (B, T) uint8, positions (B, T) int32."""
    while True:
        length = generator.rng.choices(list(lengths), list(lengths.values()))[0]
        documents = [generator.document(length) for _ in range(tokens // length)]
        yield tuple(np.stack([getattr(d, name) for d in documents]) for name in ("tokens", "kinds", "positions"))
