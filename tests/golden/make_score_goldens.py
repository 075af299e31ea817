#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a file a benchmark: made-up answers, 200 a metric, and what the benchmarks' authors' own code scores them.

usage: make_score_goldens.py LONGBENCH INFINITEBENCH RULER -o benchmark_scores

The folders are checkouts of github.com/THUDM/LongBench, OpenBMB/InfiniteBench and NVIDIA/RULER. Needs PyPI's rouge, fuzzywuzzy,
python-Levenshtein and rouge-score. What LongBench cuts into words of Chinese is cut into characters here, as by this project. One line a case: match (this project's name of the metric), output, answers, classes, score (0 to 1).
"""
import argparse
import importlib.util
import json
import random
import re
import sys
import types

from rouge_score import rouge_scorer

WORDS = ("the a an of and lighthouse keeper Tarn Umber river bell iron copper Clara Whitaker 1848 12 3.5 0 007 answer option Option is: "
         "answer: Answer is Paragraph B. C: D A café 東京 naïve it's well-known end").split()
CHINESE = "福气龙派出的武士想要杀死胡一统在东京Ａ段落１３年《书》，。！？、「」 \u3000.abc12"
MARKS = ["", "", "", ".", ",", "!", "?", ":", "'", '"', "`", "\n", "\n\n", " - ", "*"]
LEADS = ["", "", "The answer is: ", "answer is ", "Answer: ", "answer: ", "The correct option is: ", "option is ", "is: ", "\n"]


class RougeLsum:
    """What the package `evaluate` makes of rouge_score, which it would load from the network."""

    scorer = rouge_scorer.RougeScorer(["rougeLsum"])

    def compute(self, predictions, references, use_aggregator):
        assert not use_aggregator
        return {"rougeLsum": [self.scorer.score(reference, text)["rougeLsum"].fmeasure for text, reference in zip(predictions, references)]}


def load(path, name):
    """The module at `path`, with the packages that only its other functions need replaced by empty ones."""
    for absent in ("jieba", "evaluate", "tqdm", "args"):
        sys.modules.setdefault(absent, types.ModuleType(absent))
    sys.modules["evaluate"].load = lambda *_: RougeLsum()
    sys.modules["jieba"].cut = lambda text, cut_all: re.findall(r"[a-zA-Z0-9]+|.", text, re.DOTALL)
    sys.modules["tqdm"].tqdm = iter
    sys.modules["args"].parse_args = lambda: None
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Made:
    """Draws of one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def text(self, most):
        parts = []
        for _ in range(self.random.randint(0, most)):
            parts.append(self.random.choice(WORDS) + self.random.choice(MARKS))
        return self.random.choice([" ", " ", "  "]).join(parts)

    def near(self, text, most):
        """A text that shares words with `text`, so that few scores are 0."""
        words = text.split() + self.text(most).split()
        self.random.shuffle(words)
        return self.random.choice(LEADS) + " ".join(words[: self.random.randint(1, len(words))] if words else [])

    def chinese(self, most):
        return "".join(self.random.choices(CHINESE, k=self.random.randint(0, most)))

    def code(self):
        lines = [self.random.choice(["", "# note", "x = f(1)", "return a + b", "// no", "for i in range(n):", "`code`", "print('ü')"])
                 for _ in range(self.random.randint(1, 4))]
        return "\n".join(lines)


def longbench(made, metrics):
    best = lambda score, output, answers: max(score(output, answer) for answer in answers)  # noqa: E731
    answers = [made.text(6) or "bell" for _ in range(made.random.randint(1, 3))]
    output = made.near(answers[0], 6)
    yield "f1", output, answers, [], best(metrics.qa_f1_score, output, answers)
    yield "rouge-l", output, answers[:1], [], metrics.rouge_score(output, answers[0])
    number = str(made.random.randint(0, 12))
    output = made.near(f"{number} {number}", 5)
    yield "count", output, [number], [], metrics.count_score(output, number)
    yield "passage", output, [f"Paragraph {number}"], [], metrics.retrieval_score(output, f"Paragraph {number}")
    label = made.random.choice(["City", "Number", "Date"])  # no part of another: the authors' loop skips labels there
    output = made.near(label + " " + made.random.choice(["Number", "Date", "City", ""]), 4)
    classes = ["City", "Number", "Date", "Place"]
    yield "classes", output, [label], classes, metrics.classification_score(output, label, all_classes=classes)
    output, answer = made.code(), made.code().split("\n")[0] or "x = f(1)"
    yield "code", output, [answer], [], metrics.code_sim_score(output, answer)
    answer = made.chinese(20) + "福"
    output = made.chinese(20) + answer[made.random.randint(0, len(answer)) :]
    yield "rouge-l-characters", output, [answer], [], metrics.rouge_zh_score(output, answer)


def infinitebench(made, scores):
    number = str(made.random.randint(0, 20))
    output = made.near(number, 4)
    yield "number", output, [number], [], scores.get_score_one_passkey(output, number, "")
    word = made.random.choice(WORDS)
    yield "word", (output := made.near(word, 4)), [word], [], scores.get_score_one_kv_retrieval(output, word, "")
    value = made.random.choice([12, 3.5, 0, 7])
    output = made.near(str(value), 4)
    yield "decimal", output, [str(value)], [], scores.get_score_one_math_find(output, value, "")
    letter = made.random.choice("ABCD")
    answers = [made.text(2).strip() or "iron", letter]
    output = made.near(made.random.choice(answers), 3)
    yield "choice", output, answers, [], scores.get_score_one_longbook_choice_eng(output, answers, "")
    answers = ["parse_line", letter]
    output = made.random.choice(LEADS) + made.random.choice(["parse_line", letter + ".", letter + ":", letter, "other"]) + " " + made.text(2)
    yield "debug", output, answers, [], scores.get_score_one_code_debug(output, answers, "")
    values = [made.random.randint(-5, 99) for _ in range(made.random.randint(1, 6))]
    told = values[: made.random.randint(0, len(values))] + [made.random.randint(0, 9)]
    output = made.random.choice(["[{}]", "{}", "Values: 0{}", " {}."]).format(", ".join(map(str, told)))
    yield "values", output, [str(value) for value in values], [], scores.get_score_one_math_calc(output, values, "")
    value = made.random.randint(-20, 20)
    output = made.near("", 2) + " " + made.random.choice(["{}", "is {}.", "`{}`", "{}\n", "{} or", "x{}", "+{}", "value: 0{}"]).format(value)
    yield "last-number", output, [str(value)], [], scores.get_score_one_code_run(output, value, "")
    names = [made.random.choice(["ACE", "BILL", "ACE ROTHSTEIN", "JIM"]) for _ in range(2)]
    output = made.random.choice(LEADS) + made.random.choice([*names, "Ace", "jim,", "Bill Broussard", "nobody's"]) + made.random.choice(MARKS)
    yield "speaker", output, names, [], scores.get_score_one_longdialogue_qa_eng(output, names, "")
    answer = "\n".join(made.text(6) for _ in range(3)) + "bell"
    output = made.near(answer, 6) + made.random.choice(["\n", " "]) + made.near(answer, 6)
    yield "rouge-lsum", output, [answer], [], scores.get_score_one_longbook_sum_eng(output, answer, "")
    answers = [made.chinese(12) + "龙" for _ in range(2)]
    output = made.chinese(12) + answers[0][: made.random.randint(0, 12)]
    yield "characters", output, answers, [], scores.get_score_one_longbook_qa_chn(output, answers, "")


def ruler(made, constants):
    answers = [made.random.choice(WORDS) for _ in range(made.random.randint(1, 4))]
    output = made.near(" ".join(answers), 5)
    yield "substring", output, answers, [], constants.string_match_all([output], [answers]) / 100
    yield "any", output, answers, [], constants.string_match_part([output], [answers]) / 100


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longbench")
    parser.add_argument("infinitebench")
    parser.add_argument("ruler")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--cases", type=int, default=200)
    flags = parser.parse_args()
    authors = [(longbench, load(flags.longbench + "/LongBench/metrics.py", "longbench_metrics")),
               (infinitebench, load(flags.infinitebench + "/src/compute_scores.py", "infinitebench_scores")),
               (ruler, load(flags.ruler + "/scripts/eval/synthetic/constants.py", "ruler_constants"))]
    for of_benchmark, module in authors:
        lines = []
        for seed in range(flags.cases):
            for match, output, answers, classes, score in of_benchmark(Made(seed), module):
                lines.append({"match": match, "output": output, "answers": answers, "classes": classes, "score": round(float(score), 12)})
        with open(f"{flags.output}/{of_benchmark.__name__}.jsonl", "w", encoding="utf-8") as file:
            for line in sorted(lines, key=lambda line: line["match"]):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
