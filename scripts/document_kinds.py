# SPDX-License-Identifier: Apache-2.0
"""Documents of several kinds with facts in them, and questions whose answers are known: made from a seed."""

import random

KINDS = ("prose", "code", "table", "list", "log", "mixture")
WORDS = """amber anchor apple arch ash autumn barley basin beacon bell birch bridge brook candle canyon cedar chapel
cliff cloud clover coast copper coral cotton crane creek crown daisy delta dune eagle ember falcon fern field fjord
flint forest fountain frost garden glacier granite grove harbor hazel heath heron hill hollow island ivory ivy jade
juniper lagoon lantern larch lark laurel lilac linden lotus maple marble marsh meadow mill mint moss mountain oak olive
onyx orchard otter owl pearl pebble pine plaza pond poplar quarry quartz raven reed ridge river robin rose rowan saddle
sage salmon sand shell silver slate sparrow spring spruce stone storm summit swallow thistle thorn tide timber tower
valley velvet violet walnut water willow wind winter wolf wren yarrow""".split()
PEOPLE = "The miller|A traveller|Her brother|The old captain|The teacher|A merchant|The doctor|My neighbour".split("|")
DEEDS = """walked along the {0} towards the {1}|spoke for a while about the {0} and the {1}|carried a {0} past the {1}
sold the {0} beside the {1}|remembered the {0} and forgot the {1}|painted the {0} under the {1}""".replace(
    "\n", "|"
).split("|")


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.facts = {}  # name -> number

    def name(self, between):
        while True:
            name = between.join(self.random.sample(WORDS, 2))
            if name not in self.facts:
                return name

    def fact(self, between):
        name = self.name(between)
        self.facts[name] = str(self.random.randrange(10000, 99999))
        return name, self.facts[name]

    def filler(self):
        deed = self.random.choice(DEEDS).format(*self.random.sample(WORDS, 2))
        return f"{self.random.choice(PEOPLE)} {deed}."

    def sentence(self):
        """A fact as any kind of text may hold one, with its question."""
        name, number = self.fact(" ")
        return f"The entry code of the {name} archive is {number}.", (
            f"What is the entry code of the {name} archive?",
            number,
        )

    def prose(self):
        sentences = [self.filler() for _ in range(6)]
        fact, question = self.sentence()
        sentences.insert(self.random.randrange(7), fact)
        return " ".join(sentences) + "\n", [question]

    def code(self):
        fact, question = self.sentence()
        name, a, b = self.name("_"), *self.random.sample(WORDS, 2)
        text = f"def {name}({a}, {b}=None):\n    # {fact}\n    if {b} is None:\n        {b} = {a} + 1\n"
        return text + f"    {a}.update({b})\n    return {self.random.randrange(100)}\n\n", [question]

    def table(self):
        fact, question = self.sentence()
        a, b = self.random.sample(WORDS, 2)
        return f"| {a} | {self.random.randrange(100)} % | {fact} | {b} |\n", [question]

    def list(self):
        fact, question = self.sentence()
        return f"- {self.random.choice(WORDS)}\n- {fact}\n", [question]

    def log(self):
        fact, question = self.sentence()
        r = self.random
        text = f"2026-03-{r.randrange(1, 29):02} {r.randrange(24):02}:{r.randrange(60):02}:{r.randrange(60):02} "
        return text + f"{r.choice(['INFO', 'WARN', 'DEBUG'])} {r.choice(WORDS)}: {fact}\n", [question]

    def piece(self, kind):
        return getattr(self, kind)()

    def document(self, kind, tokens, count_tokens):
        """A text of at most so many tokens and its questions; the mixture changes its kind every 40 pieces."""
        text, questions, size, i = [], [], 0, 0
        while True:
            of = KINDS[i // 40 % 5] if kind == "mixture" else kind
            piece, asked = self.piece(of)
            size += count_tokens(piece)
            if size > tokens:
                return "".join(text), questions
            text.append(piece)
            questions += asked
            i += 1
