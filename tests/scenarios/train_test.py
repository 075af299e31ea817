# SPDX-License-Identifier: Apache-2.0
"""train: an artefact comes out, serves `index` and `ask`, says what it is, and damaged or foreign ones are refused."""

import json
import unittest

import gguf_file
import tiny_model
from program import FAILED, ProgramTest, run

SAAP = {"lessons": "off", "tokens": 300, "window": 31, "distance": 8, "clusters": 8, "hidden": 8, "steps": 5, "batch": 16, "samples": 40,
        "probes": 2, "dense-layers": 0}


class Train(ProgramTest):
    def train(self, name: str, *arguments, **settings):
        path = self.folder / name
        flags = [word for key, value in {**SAAP, **settings}.items() for word in (f"--{key}", value)]
        return path, run("train", "saap", "-m", self.model, "-f", self.text, "-o", path, "--quiet", "--force", *flags, *arguments)

    def test_saap(self):
        path, result = self.train("saap.safetensors", "--json")
        report = self.assert_done(result).json()
        self.assertEqual(report["file"], str(path))
        self.assertEqual(report["file_bytes"], path.stat().st_size)
        self.assertEqual(report["training"]["clusters"], 8)
        for head in report["heads"]:
            self.assertGreaterEqual(head["best_mass"] + 1e-6, head["mass"])
            self.assertGreater(head["held_out"], 0)
        self.assertFalse(path.with_name(path.name + ".checkpoint").exists())
        again, result = self.train("again.safetensors", "-t", "1")
        self.assert_done(result)
        self.assertEqual(again.read_bytes(), path.read_bytes(), "threads do not matter")

        spec = f"saap:probes=2,window=31,dense_layers=0,weights={path}"
        context = self.index("saap.lode", "-a", spec)
        answer = self.assert_done(run("ask", context, "Who?", "-n", "2", "--json")).json()["answers"][0]
        self.assertEqual(answer["attention"], spec.replace("saap:probes=2,window=31,dense_layers=0,", "saap:dense_layers=0,probes=2,")
                         .replace(f"weights={path}", f"weights={path},window=31"))
        self.assertLess(answer["selectivity"], 1)

        shown = self.assert_done(run("inspect", path, "--json")).json()
        self.assertEqual((shown["kind"], shown["metadata"]["method"]), ("selector", "saap"))
        weights = self.assert_done(run("inspect", self.model / "model.safetensors", "--json")).json()
        self.assertEqual(weights["kind"], "tensors")
        self.assert_done(run("verify", path))
        named = self.folder / "named.otherwise"
        named.write_bytes(path.read_bytes())
        self.assertEqual(self.assert_done(run("inspect", named, "--json")).json()["metadata"]["method"], "saap")
        self.assertIn(": intact (", self.assert_done(run("verify", named)).out)
        damaged = self.folder / "damaged.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        damaged.write_bytes(data)
        self.assert_refused(run("verify", damaged), "damaged.safetensors", code=FAILED)
        self.assert_refused(run("ask", context, "Who?", "-a", spec.replace(str(path), str(damaged))), "damaged.safetensors")
        other = tiny_model.write(self.folder / "other", seed=7)
        self.assert_refused(run("index", "-m", other, "-f", self.text, "-o", self.folder / "o.lode", "-a", spec), "fingerprint")

    def test_beside_a_gguf_file(self):
        """An artefact is found there; by another model that lies there, too, it is not."""
        place = self.folder / "files"
        place.mkdir()
        gguf_file.write(place / "own.gguf")
        self.assert_done(run("quantize", "-m", place / "own.gguf", "--type", "Q8_0", "-o", place / "other.gguf"))
        flags = [word for key, value in SAAP.items() for word in (f"--{key}", value)]
        self.assert_done(run("train", "saap", "-m", place / "own.gguf", "-f", self.text, "-o", place / "saap.safetensors", "--quiet", *flags))
        index = ("index", "-f", self.text, "-o", self.folder / "own.lode", "-a", "saap:probes=2,window=31,dense_layers=0", "--force")
        self.assert_done(run(*index, "-m", place / "own.gguf"))
        self.assert_done(run("ask", self.folder / "own.lode", "Who?", "-n", "2"))
        self.assert_refused(run(*index, "-m", place / "other.gguf"), "saap.safetensors beside the model", "found none of this model")
        fingerprint = self.assert_done(run("inspect", place / "saap.safetensors", "--json")).json()["metadata"]["model_fingerprint"]
        plan = place / "own.plan"
        plan.write_text(json.dumps({"lodestone_plan": 1, "model_fingerprint": fingerprint, "sink": 1, "window": 31,
                                    "layers": [["saap:probes=2", "full"]] * 2}), encoding="utf-8")
        self.assert_done(run(*index[:-2], f"plan:{plan}", "--force", "-m", "own.gguf", cwd=place))
        self.assert_done(run("ask", self.folder / "own.lode", "Who?", "-n", "2", "-m", "own.gguf", cwd=place))

    def test_held_out_texts(self):
        """Seen before the training, not after it."""
        short, path = self.folder / "short.txt", self.folder / "none.safetensors"
        short.write_text("Too short.", encoding="utf-8")
        self.assert_refused(run("train", "hash", "-m", self.model, "-f", self.text, "-o", path, "--held-out", short, "--lessons", "off", "--tokens", "512",
                                "--window", "16", "--sink", "4", "--top", "4", "--steps", "1", "--quiet"), f"{short}: expected rising lengths")
        self.assertFalse(path.exists())
        short_run = ("--lessons", "off", "--tokens", "512", "--window", "16", "--sink", "4", "--top", "4", "--steps", "1", "--quiet")
        other = self.folder / "other.txt"
        other.write_text(self.text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
        comma = self.folder / "with,comma.safetensors"  # a spec cannot name it
        self.assert_refused(run("train", "hash", "-m", self.model, "-f", self.text, "-o", comma, "--held-out", other, *short_run), "with,comma")
        self.assertFalse(comma.exists())
        self.assert_done(run("train", "hash", "-m", self.model, "-f", self.text, "-o", comma, *short_run))
        copy = self.folder / "copy.txt"
        copy.write_bytes(self.text.read_bytes())
        self.assert_refused(run("train", "hash", "-m", self.model, "-f", self.text, "-o", path, "--held-out", copy, "--lessons", "off", "--tokens", "512",
                                "--window", "16", "--sink", "4", "--top", "4", "--steps", "1", "--quiet"), "--held-out: expected other texts")

    def test_lessons(self):
        """Documents with questions are made from plain texts; texts that hold none are refused before anything takes long."""
        short = self.folder / "plain.txt"
        short.write_text("It rained. ", encoding="utf-8")
        for method in ("saap", "hash"):
            path = self.folder / f"{method}-lessons.safetensors"
            self.assert_refused(run("train", method, "-m", self.model, "-f", short, "-o", path, "--quiet", "--tokens", "2k"), "give more text")
            self.assert_refused(run("train", method, "-m", self.model, "-f", short, "-o", path, "--quiet", "--tokens", "1k"), "--lessons off")
            self.assertFalse(path.exists())
        said = run("train", "hash", "-m", self.model, "-f", short, "-o", self.folder / "no.safetensors", "--tokens", "2k")
        self.assertIn("by heart", said.err)

    def test_linear_start_that_does_not_fit(self):
        """What the artefact says of its start is what was done."""
        for widths, linear in (("32,32", False), ("64", True), ("none", True)):
            result = self.assert_done(run("train", "hash", "-m", self.model, "-f", self.text, "-o", self.folder / "start.safetensors",
                                          "--lessons", "off", "--tokens", "512", "--window", "16", "--sink", "4", "--top", "4", "--steps", "1", "--json",
                                          "--widths", widths, "--force"))
            self.assertEqual(result.json()["training"]["linear_start"], linear)
            self.assertEqual("starts at random" in result.err, not linear)

    def test_artefact_that_is_gone(self):
        """A stored spec says which file it misses, and where, wherever the program is run from."""
        model = tiny_model.write(self.folder / "bare")
        named, beside = self.folder / "centroids.safetensors", model / "saap.safetensors"
        self.assert_done(run("train", "kmeans", "-m", model, "-f", self.text, "-o", named, "--clusters", "4", "--quiet"))
        self.assert_done(self.train("kept.safetensors")[1])
        (self.folder / "kept.safetensors").rename(beside)
        for file, spec in ((named, "kmeans:probes=2,weights=centroids.safetensors"), (beside, "saap:probes=2")):
            with self.subTest(spec=spec):
                context = self.folder / f"gone-{file.stem}.lode"
                self.assert_done(run("index", "-m", model, "-f", self.text, "-o", context, "-a", spec, cwd=self.folder))
                away = file.rename(file.with_suffix(".away"))
                self.assert_refused(run("ask", context, "Who?", cwd=self.folder), f"'{file.resolve()}'", spec, "index the text again")
                away.rename(file)
                self.assert_done(run("ask", context, "Who?", "-n", "1", cwd=self.folder))

    def test_asked_in_another_folder(self):
        """Files that a spec names by relative paths are found wherever the program is run from, and when they go where
        the indexed text goes; full attention needs none of them."""
        place, other, away = (self.folder / name for name in ("place", "another", "away"))
        for folder in (place / "sub", other, away):
            folder.mkdir(parents=True)
        self.assert_done(run("train", "kmeans", "-m", self.model, "-f", self.text, "-o", place / "c.safetensors", "--clusters", "4", "--quiet"))
        fingerprint = self.assert_done(run("inspect", self.model, "--json")).json()["fingerprint"]
        (place / "p.plan").write_text(json.dumps({"lodestone_plan": 1, "model_fingerprint": fingerprint, "sink": 1, "window": 9,
                                                  "layers": [["full", "kmeans:probes=2,weights=c.safetensors"]] * 2}))
        for name, spec in (("named", "kmeans:probes=2,window=9,weights=c.safetensors"), ("plan", "plan:p.plan")):
            with self.subTest(spec=spec):
                context = place / "sub" / f"{name}.lode"
                self.assert_done(run("index", "-m", self.model, "-f", self.text, "-o", context, "-a", spec, cwd=place))
                asked = ("ask", context, "Who?", "-n", "2", "--json")
                here = self.assert_done(run(*asked, cwd=place)).json()["answers"][0]
                there = self.assert_done(run(*asked, cwd=other)).json()["answers"][0]
                self.assertEqual((there["answer"], there["density"]), (here["answer"], here["density"]))
                self.assertLess(there["density"], 1)
                absolute = spec.replace("c.safetensors", str(place / "c.safetensors")).replace("p.plan", str(place / "p.plan"))
                self.assertEqual(self.assert_done(run(*asked, "-a", absolute, cwd=other)).json()["answers"][0]["density"], here["density"])
                stored = self.assert_done(run("inspect", context, "--json")).json()["methods"][0]
                self.assertEqual(self.assert_done(run(*asked, "-a", stored, cwd=other)).json()["answers"][0]["density"], here["density"])
                mistyped = spec.replace("c.safetensors", "typo/c.safetensors").replace("p.plan", "typo/p.plan")
                self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", context, "--force", "-a", mistyped, cwd=place), "typo/")
                added = self.folder / "more.txt"
                added.write_text("More of it.\n" * 40, encoding="utf-8")
                self.assert_done(run("index", "--append", context, "-f", added, "-o", other / f"{name}.lode", "--force", cwd=other))
                self.assert_done(run("ask", other / f"{name}.lode", "Who?", "-n", "1", cwd=away))
                for file in (context, place / "c.safetensors", place / "p.plan"):
                    file.rename(away / file.name)
                self.assert_done(run("ask", away / context.name, "Who?", "-n", "1", cwd=other))
                for file in ("c.safetensors", "p.plan"):
                    (away / file).rename(other / file)
                self.assert_refused(run("ask", away / context.name, "Who?", cwd=place), spec.split("=")[-1].split(":")[-1])
                self.assert_done(run("ask", away / context.name, "Who?", "-n", "1", "-a", "full", cwd=place))
                for file in ("c.safetensors", "p.plan"):
                    (other / file).rename(place / file)

    def test_saap_with_trained_keys(self):
        small = {"key-steps": 4, "key-sample": 60, "key-queries": 30, "key-hidden": 6}
        path, result = self.train("keys.safetensors", "--keys", "trained", "--json", **small)
        report = self.assert_done(result).json()
        self.assertTrue(report["training"]["train_keys"])
        again, result = self.train("keys-again.safetensors", "--keys", "trained", "-t", "1", **small)
        self.assert_done(result)
        self.assertEqual(again.read_bytes(), path.read_bytes(), "threads do not matter")
        spec = f"saap:probes=2,window=31,dense_layers=0,weights={path}"
        context = self.index("keys.lode", "-a", spec)
        answer = self.assert_done(run("ask", context, "Who?", "-n", "2", "--json")).json()["answers"][0]
        self.assertLess(answer["selectivity"], 1)
        damaged = self.folder / "keys-damaged.safetensors"
        data = bytearray(path.read_bytes())
        place = data.index(b".key.hidden.weight")  # in the header: another name is another tensor
        data[place + 5] ^= 1
        damaged.write_bytes(data)
        self.assert_refused(run("verify", damaged), "damaged.safetensors", code=FAILED)
        self.assert_refused(run("ask", context, "Who?", "-a", spec.replace(str(path), str(damaged))), "keys-damaged.safetensors")
        tuned, result = self.train("tuned.safetensors", "--from", path, "--adapt", **{"tokens": 4000, "late-tokens": 200}, prompts=1)
        self.assertIn("share of that attention", self.assert_done(result).out)
        self.assertNotEqual(tuned.read_bytes(), path.read_bytes())
        self.assertIn(b'"from\\":\\"keys.safetensors\\"', tuned.read_bytes())  # without the folder, which is this machine's

    def train_hash(self, name: str, *arguments, **settings):
        path = self.folder / name
        small = {"lessons": "off", "tokens": 300, "sink": 2, "window": 16, "top": 4, "steps": 3, "queries": 6, "others": 40, **settings}
        flags = [word for key, value in small.items() for word in (f"--{key}", value)]
        return path, run("train", "hash", "-m", self.model, "-f", self.text, "-o", path, "--quiet", "--force", *flags, *arguments)

    def test_hash(self):
        path, result = self.train_hash("hash.safetensors", "--json", "--late", "0.5", "--late-tokens", "50", "--shift", "500")
        report = self.assert_done(result).json()
        self.assertEqual(report["training"]["head_steps"], 3 * report["training"]["prompts"])
        self.assertEqual(report["training"]["shift"], 500)
        again, result = self.train_hash("again.safetensors", "--late", "0.5", "--late-tokens", "50", "--shift", "500", "-t", "1")
        self.assert_done(result)
        self.assertEqual(again.read_bytes(), path.read_bytes(), "threads do not matter")
        by_chunk, result = self.train_hash("chunk.safetensors", "--draw", "chunk", "--chunk", "64")
        self.assert_done(result)
        self.assertNotEqual(by_chunk.read_bytes(), path.read_bytes())
        spec = f"hash:budget=1/4,sink=2,window=16,weights={path}"
        context = self.index("hash.lode", "-a", spec)
        answer = self.assert_done(run("ask", context, "Who?", "-n", "2", "-a", spec, "--json")).json()["answers"][0]
        self.assertLess(answer["selectivity"], 0.5)
        for settings, mention in (({"late": 2}, "--late"), ({"draw": "word"}, "--draw"), ({"window": 5000}, "sink and window"),
                                  ({"shift": -1}, "--shift")):
            with self.subTest(**settings):
                path, result = self.train_hash("no.safetensors", **settings)
                self.assert_refused(result, mention)
                self.assertFalse(path.exists())

    def test_refusals(self):
        for settings, mention in (({"clusters": 1}, "--clusters"), ({"clusters": 60000}, "60000"), ({"window": 5000}, "far keys"), ({"distance": 300, "filter": "both"}, "far keys"),
                                  ({"prompts": 1}, "prompts"), ({"rate": "nan"}, "--rate"), ({"type": "q4"}, "--type"),
                                  ({"keys": "words"}, "--keys"), ({"keys": "trained", "balance": 1}, "--keys trained"),
                                  ({"sample-memory": "much"}, "--sample-memory")):
            with self.subTest(**settings):
                path, result = self.train("no.safetensors", **settings)
                self.assert_refused(result, mention)
                self.assertFalse(path.exists())
                self.assertFalse(path.with_name(path.name + ".checkpoint").exists(), "it would stand in the way of other settings")
        self.assert_refused(run("train", "-m", self.model))
        self.assert_refused(self.index_without_artefact(), "saap.safetensors")

    def index_without_artefact(self):
        return run("index", "-m", self.model, "-f", self.text, "-o", self.folder / "n.lode", "-a", "saap")


if __name__ == "__main__":
    unittest.main()
