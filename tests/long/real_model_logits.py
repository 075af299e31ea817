#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: real_model_logits.py MODEL.gguf [--tests build/release/tests/test_model] [--tokens 256]

Logits of a block-quantised model beside those that transformers computes in float32 over the same weights, dequantised by PyPI's
gguf: relative RMS of all logits and mean KL of the next token's distribution, with float32 activations and keys and values, and with
what lodestone does by default and with smaller keys and values. Needs torch, transformers and gguf."""

import argparse
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
import transformers

TEXT = """The lighthouse of Harwick was built in 1847 by a mason named Josiah Pell, who is said to have carried the first stone up the
hill himself. For ninety years its lamp burned whale oil, then paraffin, and in 1938 the town council voted, seven to four, to bring
electricity to the point. def area(width, height): return width * height  # in square metres. What did the council decide? """
RUNS = [("f32 activations, f32 keys and values", "f32", "f32"), ("default activations, f32", "int16", "f32"),
        ("default activations, f16", "int16", "f16"), ("default activations, q8", "int16", "q8"), ("default activations, q4", "int16", "q4")]
BOUND = 1e-3  # of the first


def reference(path: pathlib.Path, count: int) -> tuple:
    folder = str(path.parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, torch_dtype=torch.float32)
    ids = (tokenizer(TEXT * (1 + count // 64))["input_ids"])[:count]
    with torch.no_grad():
        return np.array(ids, dtype=np.int32), model(torch.tensor([ids])).logits[0].float().numpy()


def run(args: argparse.Namespace, ids: np.ndarray, activations: str, kv: str, vocab: int) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        tokens, logits = pathlib.Path(folder) / "tokens", pathlib.Path(folder) / "logits"
        tokens.write_bytes(ids.tobytes())
        names = {"MODEL": args.model, "TOKENS": tokens, "LOGITS": logits, "KV": kv}
        subprocess.run([args.tests, "--gtest_filter=RealModel.LogitsOfTokens"], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "LODESTONE_ACTIVATIONS": activations,
                            **{f"LODESTONE_REAL_{key}": str(value) for key, value in names.items()}})
        return np.frombuffer(logits.read_bytes(), dtype=np.float32).reshape(-1, vocab)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tests", type=pathlib.Path, default=pathlib.Path("build/release/tests/test_model"))
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    ids, want = reference(args.model, args.tokens)
    p = log_softmax(want)
    print(f"{len(ids)} tokens, {want.shape[1]} logits each")
    for name, activations, kv in RUNS:
        own = run(args, ids, activations, kv, want.shape[1])
        error = np.sqrt(np.mean((own - want) ** 2.0) / np.mean(want ** 2.0))
        kl = (np.exp(p) * (p - log_softmax(own))).sum(axis=1)
        print(f"{name:40} relative RMS {error:.2e}   mean KL {kl.mean():.2e}   same best token {np.mean(own.argmax(1) == want.argmax(1)):.3f}",
              flush=True)
        if (activations, kv) == ("f32", "f32") and error > BOUND:
            raise SystemExit(f"expected a relative RMS of at most {BOUND} with float32 throughout")


if __name__ == "__main__":
    main()
