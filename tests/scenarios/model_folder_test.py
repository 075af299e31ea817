# SPDX-License-Identifier: Apache-2.0
"""A model folder that is incomplete, damaged or of another kind is refused in one sentence that names file and fault."""

import json
import os
import pathlib
import shutil
import struct
import unittest

import tiny_model
from program import BAD_INPUT, FAILED, ProgramTest, run


class ModelFolder(ProgramTest):
    def setUp(self):
        self.copy = self.folder / self.id().rsplit(".", 1)[1]
        shutil.copytree(self.model, self.copy)

    def path(self, name: str) -> pathlib.Path:
        return self.copy / name

    def assert_model_refused(self, *mentions: str, code=FAILED):
        self.assert_refused(run("verify", self.copy), *mentions, code=code)

    def change_config(self, **changes):
        config = json.loads(self.path("config.json").read_text(encoding="utf-8"))
        config.update(changes)
        self.path("config.json").write_text(json.dumps(config), encoding="utf-8")

    def test_intact(self):
        checked = self.assert_done(run("verify", self.copy)).out
        self.assertIn("no damage found (", checked)
        self.assertIn("no checksum of its weights", checked)
        self.assertNotIn(": intact", checked)
        told = self.assert_done(run("verify", self.copy, "--json")).json()
        self.assertEqual((told["intact"], told["checksums"]), (None, False))
        self.assertIn("no damage found", self.assert_done(run("verify", self.path("model.safetensors"))).out)

    def test_missing_files(self):
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            with self.subTest(name=name):
                hidden = self.path(name).rename(self.path("hidden"))
                self.assert_model_refused(name.split(".")[0], code=BAD_INPUT if name == "config.json" else FAILED)
                hidden.rename(self.path(name))

    def test_names_that_are_no_files(self):
        """Refused at once: nothing is waited for, and nothing endless is read."""
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            good = self.path(name).rename(self.path("hidden"))
            for kind, make in {"folder": lambda p: p.mkdir(), "pipe": os.mkfifo, "loop": lambda p: p.symlink_to(p.name),
                               "device": lambda p: p.symlink_to("/dev/zero")}.items():
                with self.subTest(name=name, kind=kind):
                    make(self.path(name))
                    self.assert_model_refused(name)
                    self.path(name).rmdir() if kind == "folder" else self.path(name).unlink()
            good.rename(self.path(name))

    def test_artefacts_that_are_none(self):
        context = self.index("artefacts.lode")
        for name, data in {"empty": b"", "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234\n",
                           "text": b"weights\n" * 40, "cut": self.path("model.safetensors").read_bytes()[:500],
                           "weights": self.path("model.safetensors").read_bytes()}.items():
            path = self.path(name + ".safetensors")
            path.write_bytes(data)
            for method in ("hash", "saap", "kmeans"):
                with self.subTest(name=name, method=method):
                    self.assert_refused(run("ask", context, "Who?", "-a", f"{method}:weights={path}"), path.name)
        for method in ("hash", "saap"):
            self.assert_refused(run("ask", context, "Who?", "-a", method), "weights")
            self.assert_refused(run("ask", context, "Who?", "-a", f"{method}:weights=/dev/zero"), "/dev/zero")

    def test_not_a_model_folder(self):
        around = self.folder / "around"
        shutil.copytree(self.model, around / "inside")
        for verb in ("index", "estimate"):
            arguments = ("-f", self.text, *(("-o", self.folder / "x.lode") if verb == "index" else ()))
            self.assert_refused(run(verb, "-m", around, *arguments), "expected a model folder with config.json or a GGUF file", "found a folder without config.json",
                                f"'{around / 'inside'}' may be meant")
            self.assert_refused(run(verb, "-m", self.folder / "nothing", *arguments), "nothing there")
        self.assert_refused(run("index", "-m", self.text, "-f", self.text, "-o", self.folder / "x.lode"), "text.txt")
        self.assert_refused(run("index", "-m", self.folder / "no", "-f", self.text, "-o", self.folder / "x.lode"), "no")

    def test_git_lfs_pointer(self):
        self.path("model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234\n", encoding="utf-8")
        self.assert_model_refused("model.safetensors", "LFS")

    def test_pickle_only(self):
        self.path("model.safetensors").rename(self.path("pytorch_model.bin"))
        self.assert_model_refused("safetensors")

    def test_cut_weights(self):
        data = self.path("model.safetensors").read_bytes()
        for length in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
            with self.subTest(length=length):
                self.path("model.safetensors").write_bytes(data[:length])
                self.assert_model_refused("model.safetensors")

    def test_missing_shard(self):
        tensors = tiny_model.weights(tiny_model.config(2, 1 << 18), 1)
        weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
        for shard in sorted(set(weight_map.values())):
            self.path(shard).write_bytes(
                tiny_model.safetensors({n: t for n, t in tensors.items() if weight_map[n] == shard}))
        self.path("model.safetensors").unlink()
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        self.path("model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        self.assert_done(run("verify", self.copy))
        self.path("model-00002-of-00002.safetensors").unlink()
        self.assert_model_refused("model-00002-of-00002.safetensors")

    def test_shard_outside_the_folder(self):
        self.path("model.safetensors").rename(self.folder / "outside.safetensors")
        names = tiny_model.shapes(tiny_model.config(2, 1 << 18))
        for outside in ("../outside.safetensors", str(self.folder / "outside.safetensors")):
            with self.subTest(outside=outside):
                self.path("model.safetensors.index.json").write_text(
                    json.dumps({"weight_map": {name: outside for name in names}}), encoding="utf-8")
                self.assert_model_refused("index.json")

    def test_weights_that_are_not_numbers(self):
        data = bytearray(self.path("model.safetensors").read_bytes())
        for value in (float("nan"), float("inf"), float("-inf")):
            with self.subTest(value=value):
                data[-4:] = struct.pack("<f", value)
                self.path("model.safetensors").write_bytes(data)
                self.assert_model_refused("NaN or an infinity", "down")

    def test_other_architectures(self):
        for name in ("GPT2LMHeadModel", "FalconForCausalLM", "BertModel"):
            self.change_config(architectures=[name])
            self.assert_model_refused("config.json", name, code=BAD_INPUT)
            told = run("verify", self.copy, "--json")
            self.assertEqual((told.code, told.json()["intact"]), (BAD_INPUT, None), "it may be sound")

    @unittest.skipIf(os.geteuid() == 0, "root may read any file")
    def test_what_may_not_be_opened_may_be_intact(self):
        for name in ("model.safetensors", "config.json"):
            self.path(name).chmod(0)
            for path in (self.copy, self.path(name)):
                told = run("verify", path, "--json")
                self.assertEqual((told.code, told.json()["intact"]), (BAD_INPUT, None))
            self.path(name).chmod(0o600)

    def test_a_name_is_no_file(self):
        for kind in ("lode", "gguf", "safetensors"):
            missing, pipe = (self.path(f"{name}.{kind}") for name in ("missing", "pipe"))
            os.mkfifo(pipe)
            for path in (missing, pipe):
                self.assert_refused(run("verify", path), path.name)
            self.assertIsNone(run("verify", pipe, "--json").json()["intact"])

    def test_config_that_does_not_fit(self):
        for field, values in {"num_attention_heads": (0, -1, 3, "4", 2**31), "num_key_value_heads": (0, 3, 1.5),
                              "head_dim": (0, 7, 2**40), "vocab_size": (0, 262, 2**62), "rms_norm_eps": (-1, "x"),
                              "rope_theta": (0, -1), "num_hidden_layers": (0, 3, 10**9), "hidden_size": (0, 33),
                              "max_position_embeddings": (0, -5), "rope_scaling": ({"rope_type": "spiral"},)}.items():
            for value in values:
                with self.subTest(field=field, value=value):
                    shutil.copy(self.model / "config.json", self.path("config.json"))
                    self.change_config(**{field: value})
                    self.assert_model_refused()

    def test_not_json(self):
        for name in ("config.json", "tokenizer.json"):
            good = self.path(name).read_bytes()
            for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100000, good[: len(good) // 2], good + b"x"):
                with self.subTest(name=name, data=data[:10]):
                    self.path(name).write_bytes(data)
                    self.assert_model_refused(name)
            self.path(name).write_bytes(good)

    def test_unknown_tokenizer_parts(self):
        good = tiny_model.tokenizer()
        for part, value in {"model": {"type": "Unigram", "vocab": []}, "normalizer": {"type": "Sparkle"},
                            "pre_tokenizer": {"type": "Sparkle"}, "post_processor": {"type": "Sparkle"}}.items():
            with self.subTest(part=part):
                self.path("tokenizer.json").write_text(json.dumps({**good, part: value}), encoding="utf-8")
                self.assert_model_refused("tokenizer.json", value["type"], code=BAD_INPUT)


if __name__ == "__main__":
    unittest.main()
