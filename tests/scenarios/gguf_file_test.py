# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the same model gives the same answers as a folder, whole or in parts; files that do not fit together are refused."""

import math
import struct
import unittest

import gguf_file
from program import ProgramTest, run


class GgufFile(ProgramTest):
    def answers(self, model, name: str) -> list:
        context = self.folder / f"{name}.lode"
        self.assert_done(run("index", "-m", model, "-f", self.text, "-o", context, "-a", "kmeans", "--kv-type", "f32", "--quiet"))
        found = self.assert_done(run("ask", context, "-a", "full", "--json", "--predict", "16", "Who lit the lamp?")).json()
        return [answer["answer"] for answer in found["answers"]]

    def test_a_file_answers_as_the_folder_does(self):
        whole = gguf_file.write(self.folder / "tiny.gguf")
        parts = gguf_file.write_parts(self.folder)
        wanted = self.answers(self.model, "folder")
        self.assertEqual(self.answers(whole, "whole"), wanted)
        self.assertEqual(self.answers(parts[1], "parts"), wanted)

    def test_inspect_and_verify(self):
        path = gguf_file.write(self.folder / "seen.gguf")
        found = self.assert_done(run("inspect", path, "--json")).json()
        self.assertEqual((found["family"], found["tensor_types"], found["chat_template"]), ("Llama", {"F32": 20}, None))
        self.assertIn("no checksum of its weights", self.assert_done(run("verify", path)).out)

    def test_types_that_are_not_read_may_be_sound(self):
        path = gguf_file.write(self.folder / "types.gguf")
        data = bytearray(path.read_bytes())
        name = b"token_embd.weight"
        at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        dimensions, = struct.unpack_from("<I", data, at)
        for number, called in ((16, "IQ2_XXS (type 16)"), (99, "type 99")):
            struct.pack_into("<I", data, at + 4 + 8 * dimensions, number)
            path.write_bytes(data)
            self.assert_refused(run("verify", path), called)
            self.assertIsNone(run("verify", path, "--json").json()["intact"])

    def test_a_file_is_never_written_over(self):
        path = gguf_file.write(self.folder / "kept.gguf")
        before = path.read_bytes()
        self.assert_refused(run("index", "-m", path, "-f", self.text, "-o", path, "--quiet"))
        self.assertEqual(path.read_bytes(), before)

    def test_parts_that_do_not_belong_together(self):
        folder = self.folder / "parts"
        folder.mkdir()
        parts = gguf_file.write_parts(folder)
        other = self.folder / "other"
        other.mkdir()
        foreign = gguf_file.write_parts(other, seed=2)
        parts[1].write_bytes(foreign[1].read_bytes())
        self.assert_refused(run("inspect", parts[0]), "another model")
        parts[1].unlink()
        self.assert_refused(run("inspect", parts[2]), parts[1].name)

    def test_values_out_of_range_are_named(self):
        wrong = {
            "general.architecture": ("gpt2", "mamba", 3, None), "llama.block_count": (0, 513, 2**31, "2", None),
            "llama.embedding_length": (0, 31, 2**31, None), "llama.feed_forward_length": (0, 63, None),
            "llama.attention.head_count": (0, 5, 2**20, None), "llama.attention.head_count_kv": (0, 3, 8),
            "llama.attention.key_length": (0, 15, 2**20), "llama.attention.value_length": (8,),
            "llama.rope.dimension_count": (17, 2**20), "llama.context_length": (0, None),
            "llama.rope.freq_base": (0.0, -1.0, math.nan, math.inf), "llama.rope.scaling.type": ("mystery",),
            "llama.attention.layer_norm_rms_epsilon": (0.0, math.nan, None), "llama.expert_count": (8,),
            "tokenizer.ggml.eos_token_id": (5000,), "tokenizer.ggml.bos_token_id": (5000,),
            "tokenizer.ggml.pre": ("mystery", None), "tokenizer.ggml.model": ("t5", None),
            "tokenizer.ggml.merges": (["t h", "x"], None), "tokenizer.ggml.tokens": (["a"], None),
        }
        path, count = self.folder / "wrong.gguf", 0
        for key, values in wrong.items():
            for item in values:
                gguf_file.write(path, keys={key: item})
                with self.subTest(key=key, value=item):
                    self.assert_refused(run("inspect", path), path.name)
                    count += 1
        self.assertGreaterEqual(count, 40)

    def test_tensors_that_do_not_fit_are_named(self):
        path = self.folder / "tensors.gguf"
        numbers = struct.pack("<64f", *[1.0] * 64)
        for name in ("token_embd.weight", "blk.1.attn_q.weight", "output_norm.weight"):
            with self.subTest(missing=name):
                gguf_file.write(path, without=name)
                self.assert_refused(run("inspect", path), name)
        for name, shape in (("blk.0.attn_norm.weight", (64,)), ("blk.0.attn_norm.weight", (2, 32)), ("blk.0.ffn_gate.bias2", (64,)),
                            ("blk.7.attn_q.weight", (2, 32)), ("output.weight", (2, 32))):
            with self.subTest(name=name, shape=shape):
                gguf_file.write(path, more={name: (shape, numbers)})
                self.assert_refused(run("inspect", path), name)


if __name__ == "__main__":
    unittest.main()
