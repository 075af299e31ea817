# SPDX-License-Identifier: Apache-2.0
"""Facts and questions of every family, as text.

Each method makes `count` facts, in the order in which the document will tell them, and the questions that they
allow. Where the facts go, and which questions are asked, is for documents.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from language import Language

# Families whose answers are learned (and counted) apart; the position is the family's number in a document's kinds.
FAMILIES = ("needle", "values", "keys", "code", "person", "kv", "vt", "freq", "cwe", "fwe", "passkey", "number",
            "recite", "echo", "count", "listing", "denial", "comparison")


@dataclass(slots=True)
class Fact:
    text: str
    echo: str = ""  # a part of text (with its leading space) that repeats an earlier name, and is learned


@dataclass(slots=True)
class Question:
    family: str
    text: str
    answer: str
    after: int  # index of the last fact that it needs
    prefix: str = ""  # the beginning of the answer that may be given away, as RULER does
    answers: tuple[str, ...] = ()  # the values that recall is scored on


@dataclass(slots=True)
class Material:
    facts: list[Fact] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def merge(materials: list[Material], rng: Any) -> Material:
    """Shuffles the families' facts into one order that keeps each family's own."""
    owners = [i for i, m in enumerate(materials) for _ in m.facts]
    rng.shuffle(owners)
    places: list[list[int]] = [[] for _ in materials]
    for place, owner in enumerate(owners):
        places[owner].append(place)
    cursors = [iter(m.facts) for m in materials]
    merged = Material([next(cursors[owner]) for owner in owners])
    for material, own in zip(materials, places):
        for question in material.questions:
            question.after = own[question.after]
            merged.questions.append(question)
    rng.shuffle(merged.questions)
    return merged


class Families:
    def __init__(self, language: Language) -> None:
        self.language, self.rng = language, language.rng

    def _wording(self, entry: dict[str, Any], name: str) -> str:
        return self.language.pick(self.language.wordings(entry, name))

    def _keys(self, kind: str, count: int, few: bool) -> list[str]:
        """Different keys; with `few`, pairs share their halves as often as they can, so that they are easily mixed up."""
        if kind != "pair" or not few:
            return self.language.unique(lambda: self.language.value(kind), count)
        side = math.isqrt(count) + 2
        halves = [self.rng.sample(words, min(side, len(words)))
                  for words in (self.language.words["adjectives"], self.language.words["nouns"])]
        return self.language.unique(lambda: "-".join(self.language.pick(h) for h in halves), count)

    def magic(self, count: int, repeats: tuple[int, int] = (1, 1), keys: tuple[int, int] | None = None,
              few: bool = False, asked_repeats: int | None = None) -> Material:
        """Magic numbers. `repeats`: values of one key, from and to; `keys`: keys in one question, from and to.
        With `asked_repeats` the first key has just so many values and only keys with so many are asked."""
        entry, rng = self.language.families["magic"], self.rng
        key_kind, value_kind = self.language.pick(entry["keys"]), self.language.pick(list(entry["values"]))
        kind = entry["values"][value_kind]
        sizes = [asked_repeats] if asked_repeats else []
        while sum(sizes) < count:
            sizes.append(min(rng.randint(*repeats), count - sum(sizes)))
        names = self._keys(key_kind, len(sizes), few)
        owners = [name for name, size in zip(names, sizes) for _ in range(size)]
        rng.shuffle(owners)
        values = self.language.unique(lambda: self.language.value(value_kind), len(owners), set(names))
        told: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
        facts = []
        for place, (name, value) in enumerate(zip(owners, values)):
            facts.append(Fact(self._wording(entry, "facts").format(kind=kind, key=name, value=value)))
            told[name].append((place, value))
        if keys:
            return Material(facts, self._questions_of_keys(entry, kind, told, keys))
        return Material(facts, self._questions_of_values(entry, kind, told, asked_repeats))

    def _questions_of_values(self, entry: dict[str, Any], kind: str, told: dict[str, list[tuple[int, str]]],
                             only: int | None) -> list[Question]:
        questions = []
        for name, places in told.items():
            if not places or (only and len(places) != only):
                continue
            values = [value for _, value in places]
            if len(values) == 1:
                text = self._wording(entry, "questions").format(kind=kind, key=name)
            else:
                number = self.language.words["counts"][len(values) - 1]
                text = self.language.pick(entry["questions_values"]).format(kind=kind, key=name, count=number)
            prefix = entry["answer_prefix"].format(kind=kind, key=name) if len(values) == 1 else ""
            questions.append(Question("needle" if len(values) == 1 else "values", text,
                                      entry["list_separator"].join(values), places[-1][0], prefix, tuple(values)))
        return questions

    def _questions_of_keys(self, entry: dict[str, Any], kind: str, told: dict[str, list[tuple[int, str]]],
                           keys: tuple[int, int]) -> list[Question]:
        questions = []
        names = [name for name, places in told.items() if len(places) == 1]
        for _ in range(len(names)):
            if len(names) < 2:
                break
            asked = self.rng.sample(names, min(self.rng.randint(*keys), len(names)))
            joined = entry["key_separator"].join(asked[:-1]) + entry["last_key_separator"] + asked[-1]
            values = [told[name][0][1] for name in asked]
            after = max(told[name][0][0] for name in asked)
            text = self.language.pick(entry["questions_keys"]).format(kind=kind, keys=joined)
            questions.append(Question("keys", text, entry["list_separator"].join(values), after, "", tuple(values)))
        return questions

    def code(self, count: int, few: bool = False) -> Material:
        entry, rng, words = self.language.families["code"], self.rng, self.language.words
        lists = [words["attributes"], words["cities"], words["places"]]
        if few:  # just enough words of each for the keys to exist, so that most share two parts of three
            side = math.ceil((2 * count) ** (1 / 3)) + 1
            lists = [rng.sample(w, min(len(w), side)) for w in lists]
        keys = self.language.unique(lambda: tuple(self.language.pick(w) for w in lists), count)
        kind = self.language.pick(entry["values"])
        material = Material()
        for place, (attribute, city, building) in enumerate(keys):
            value = self.language.value(kind)
            slots = {"attribute": attribute, "city": city, "place": building, "value": value}
            material.facts.append(Fact(self._wording(entry, "facts").format(**slots)))
            material.questions.append(Question("code", self._wording(entry, "questions").format(**slots), value, place,
                                               entry["answer_prefix"].format(**slots)))
        return material

    def person(self, count: int, few: bool = False, reverse: float = 0.15) -> Material:
        relations, rng = self.language.families["person"]["relations"], self.rng
        people = max(-(-count // len(relations)), count // rng.randint(1, 6), 1)
        persons = self._people(people, few)
        pairs = [(p, r) for p in persons for r in range(len(relations))]
        chosen = rng.sample(pairs, min(count, len(pairs)))
        values = [self.language.pick(self.language.words[relations[r]["values"]]) for _, r in chosen]
        times: dict[tuple[int, str], int] = {}
        for (_, r), value in zip(chosen, values):
            times[r, value] = times.get((r, value), 0) + 1
        material = Material()
        for place, ((name, r), value) in enumerate(zip(chosen, values)):
            relation = relations[r]
            material.facts.append(Fact(self._wording(relation, "facts").format(person=name, value=value)))
            if times[r, value] == 1 and rng.random() < reverse:
                question = Question("person", relation["reverse"].format(value=value), name, place)
            else:
                question = Question("person", self._wording(relation, "questions").format(person=name), value, place)
            material.questions.append(question)
        return material

    def kv(self, count: int) -> Material:
        entry = self.language.families["kv"]
        strings = self.language.unique(lambda: self.language.value("hex8"), 2 * count)
        material = Material()
        for place, (key, value) in enumerate(zip(strings[::2], strings[1::2])):
            material.facts.append(Fact(self._wording(entry, "facts").format(key=key, value=value)))
            material.questions.append(Question("kv", self._wording(entry, "questions").format(key=key), value, place))
        return material

    def vt(self, count: int, hops: tuple[int, int] = (0, 4), ends_only: bool = False) -> Material:
        """Chains of assignments; `ends_only` asks only for the last variable of a chain of full length."""
        entry, rng = self.language.families["vt"], self.rng
        names = iter(self.language.unique(lambda: self.language.value("variable"), count))
        chains, left = [], count
        while left:
            chains.append([next(names) for _ in range(min(rng.randint(*hops) + 1, left))])
            left -= len(chains[-1])
        chain_facts = []
        for chain in chains:
            value = self.language.value(entry["values"][0])
            lines = [Fact(entry["assign_value"].format(name=chain[0], value=value))]
            lines += [Fact(entry["assign_variable"].format(name=b, source=a)) for a, b in zip(chain, chain[1:])]
            questions = []
            for i, name in enumerate(chain):
                if ends_only and i < hops[1]:
                    continue
                answer = entry["link"].join([*chain[i::-1], value])
                questions.append(Question("vt", self._wording(entry, "questions").format(name=name), answer, i))
            chain_facts.append(Material(lines, questions))
        return merge(chain_facts, rng)

    def freq(self, count: int, lists: int, words_per_line: int, vocabulary: int, winner_share: float) -> Material:
        entry, rng = self.language.families["freq"], self.rng
        lists = min(lists, count)
        cities = self.language.unique(lambda: self.language.word("city"), lists)
        material = Material()
        lines: list[list[list[str]]] = []
        for index, city in enumerate(cities):
            of_list = len(range(index, count, lists))
            words = self.language.unique(lambda: self.language.word("noun"), vocabulary)
            total = of_list * words_per_line
            winner = max(math.ceil(winner_share * total), 2)
            rest, others = total - winner, words[1:]
            drawn = [words[0]] * winner + [others[i % len(others)] for i in range(rest)]
            while drawn.count(words[0]) < drawn.count(others[0]) + 2:  # the winner leads by two at least
                drawn[drawn.index(others[0])] = words[0]
            rng.shuffle(drawn)
            lines.append([drawn[i::of_list] for i in range(of_list)])
            text = self._wording(entry, "questions").format(city=city)
            after = index + (of_list - 1) * lists
            material.questions.append(Question("freq", text, words[0], after))
        for place in range(count):
            words_of_line = entry["word_separator"].join(lines[place % lists].pop())
            material.facts.append(Fact(entry["line"].format(city=cities[place % lists], words=words_of_line)))
        return material

    def single(self, family: str) -> Material:
        """passkey and number: one fact, one question."""
        entry = self.language.families[family]
        value = self.language.value(entry["values"][0])
        fact = Fact(self.language.pick(entry["facts"]).format(value=value))
        return Material([fact], [Question(family, self._wording(entry, "questions"), value, 0, entry["answer_prefix"])])

    def _people(self, count: int, few: bool) -> list[str]:
        """Different persons; with `few`, they share first and last names as often as they can."""
        if not few:
            return self.language.unique(lambda: self.language.value("person"), count)
        side = math.isqrt(count) + 2
        names = [self.rng.sample(w, min(len(w), side)) for w in
                 (self.language.words["first_names"], self.language.words["last_names"])]
        return self.language.unique(lambda: " ".join(self.language.pick(n) for n in names), count)

    def sightings(self, count: int, few: bool = False) -> Material:
        """People seen in places, and the questions that need all facts of a place: how many, who, was a person among
        them, and which of two places had more."""
        told = self._places(count)
        people = self._people(sum(told.values()), few)
        owners = [city for city, size in told.items() for _ in range(size)]
        self.rng.shuffle(owners)
        places: dict[str, list[int]] = {city: [] for city in told}
        material, entry = Material(), self.language.families["sighting"]
        for place, (city, person) in enumerate(zip(owners, people)):
            material.facts.append(Fact(self._wording(entry, "facts").format(person=person, city=city)))
            places[city].append(place)
        for city in places:
            material.questions += self._questions_of_place(entry, city, places, people)
        self.rng.shuffle(material.questions)
        return material

    def _places(self, count: int) -> dict[str, int]:
        """Places with the number of people in each, `count` in all."""
        fewest, most = self.language.tasks["count"]["people"]
        sizes: list[int] = []
        while (left := count - sum(sizes)) >= 2 * fewest:
            sizes.append(self.rng.randint(fewest, min(most, left - fewest)))
        if left:
            sizes.append(left)
        cities = self.language.unique(lambda: self.language.word("city"), len(sizes))
        return dict(zip(cities, sizes))

    def _questions_of_place(self, entry: dict[str, Any], city: str, places: dict[str, list[int]],
                            people: list[str]) -> list[Question]:
        own, rng = places[city], self.rng
        seen = tuple(people[i] for i in own)

        def text(kind: str, **slots: str) -> str:
            return self._wording(entry, f"questions_{kind}").format(**slots)

        questions = [Question("count", text("count", city=city), str(len(own)), own[-1]),
                     Question("listing", text("listing", city=city), entry["list_separator"].join(seen), own[-1],
                              "", seen)]
        for _ in range(2):
            among = rng.random() < 0.5
            fact = rng.choice(own) if among else rng.randrange(len(people))
            answer = entry["yes" if fact in own else "no"]
            questions.append(Question("denial", text("denial", person=people[fact], city=city), answer,
                                      max(own[-1], fact)))
        others = [c for c in places if len(places[c]) != len(own)]
        for other in rng.sample(others, min(2, len(others))):
            first, second = rng.sample((city, other), 2)
            more = max(city, other, key=lambda c: len(places[c]))
            questions.append(Question("comparison", text("comparison", first=first, second=second), more,
                                      max(own[-1], places[other][-1])))
        return questions

    def names(self, count: int) -> Material:
        """Invented names that are introduced once and come back, without any question."""
        templates = self.language.families["echo"]["names"]
        pairs = []
        for _ in range(max(1, count // 2)):
            template = self.language.pick(templates)
            slots = {s: self.language.word(s) for s in ("city", "place", "person", "invented", "adjective", "noun")}
            name = " {invented}" if "{invented}" in template["first"] else " {adjective} {noun}"
            again = Fact(self.language.pick(template["again"]).format(**slots), name.format(**slots))
            pairs.append(Material([Fact(template["first"].format(**slots)), again]))
        return merge(pairs, self.rng)

    def common_words(self, items: int, common: int | None = None) -> tuple[str, list[str], Question]:
        """cwe: the intro, the list's items, and the question."""
        entry, task, rng = self.language.families["cwe"], self.language.tasks["cwe"], self.rng
        common = common or task["common"]
        pool = [w for name in task["lists"] for w in self.language.words[name]]
        rng.shuffle(pool)
        winners, rest = pool[:common], items - int(items * task["common_share"])
        others = pool[common:][: max(2, rest // task["other_times"])]
        words = [winners[i % common] for i in range(items - rest)] + [others[i % len(others)] for i in range(rest)]
        rng.shuffle(words)
        listed = [entry["item"].format(number=i + 1, word=word) for i, word in enumerate(words)]
        text = self._wording(entry, "questions").format(count=self.language.words["counts"][common - 1])
        answer = entry["list_separator"].join(winners)
        return entry["intro"], listed, Question("cwe", text, answer, 0, "", tuple(winners))

    def frequent_words(self, items: int) -> tuple[str, list[str], Question]:
        """fwe: the intro, the coded text's words, and the question."""
        entry, task, rng = self.language.families["fwe"], self.language.tasks["fwe"], self.rng
        answers = task["answers"]
        while True:
            words = self.language.unique(lambda: self.language.value(task["values"]), task["vocabulary"])
            weights = [(r + 1) ** -task["zeta"] for r in range(len(words))]
            drawn = rng.choices(words, weights, k=items)
            counts = sorted(((drawn.count(w), w) for w in words[: answers + 5]), reverse=True)
            if all(a[0] > b[0] for a, b in zip(counts[:answers], counts[1:])):
                break
        winners = tuple(w for _, w in counts[:answers])
        number = self.language.words["counts"][answers - 1]
        text = self._wording(entry, "questions").format(count=number)
        return entry["intro"].format(count=number), drawn, Question(
            "fwe", text, entry["list_separator"].join(winners), 0, "", winners)
