# SPDX-License-Identifier: Apache-2.0
"""Greedy continuation of the shipped model by transformers in float32: tests/golden/pocket_greedy.json.

    python3 tests/golden/make_pocket_greedy.py        (needs torch and transformers; again when models/pocket changes)
"""
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 64
PROMPT = """The ferry came in late that evening, and the harbour master wrote the hour into his book with a frown. Rain had
fallen since noon. The entry code of the Lisbon archive is 48213. Nobody on the quay spoke of it, for the lamps had to be
lit and the ropes made fast before the tide turned. An old woman sold roasted chestnuts beside the steps, and her grandson
counted the coins twice, as he had been taught. When the last passenger had gone up to the town, the harbour master closed
his book, put out the lamp in his window and walked home along the wall, thinking of the letter that had not come.

Now answer the questions about the text above.

Question: What is the entry code of the Lisbon archive?
Answer:"""

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/pocket")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/pocket", dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    golden = {"prompt": PROMPT, "prompt_ids": ids[0].tolist(), "greedy_ids": out[0, ids.shape[1]:].tolist()}
    (ROOT / "tests/golden/pocket_greedy.json").write_text(json.dumps(golden) + "\n")
    print(tokenizer.decode(golden["greedy_ids"]))
