# SPDX-License-Identifier: Apache-2.0
"""Models of transformers on a GPU; skipped where there is none, and without torch and transformers."""

import gc

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_hf import FAMILIES, Words, logits_after, tiny  # noqa: E402

import lodestone  # noqa: E402
from lodestone import cuda, hf  # noqa: E402

if cuda.device_count() == 0 or not torch.cuda.is_available():
    pytest.skip("no GPU, or a package or PyTorch without CUDA", allow_module_level=True)

EVERYTHING = ["topk:k=100%", "kmeans:probes=1000", "quest:budget=100%,dense_layers=0", "hyperplanes:budget=100%", "random:fraction=100%"]


def ids_of(tokens):
    return torch.randint(2, 200, (1, tokens))


def on_gpu(family):
    return tiny(family, head_dim=64).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", EVERYTHING)
def test_selecting_everything_equals_the_models_own_attention(family, spec):
    model, ids, question = on_gpu(family), ids_of(300), ids_of(7)
    with torch.no_grad():
        want = model(input_ids=torch.cat([ids, question], 1).cuda()).logits[:, -7:]
    document = hf.attach(model, f"{spec},sink=1,window=16").read(ids, chunk=128)
    for _ in range(2):  # the second time after going back
        torch.testing.assert_close(logits_after(model, document, question), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_questions_that_do_not_see_each_other(family):
    model, ids, question = on_gpu(family), ids_of(120), ids_of(5)
    want = model.generate(input_ids=torch.cat([ids, question], 1).cuda(), max_new_tokens=12, do_sample=False)[0, 125:]
    document = hf.attach(model, "topk:k=100%,sink=1,window=16").read(ids.cuda(), chunk=50)
    assert torch.equal(document.ask(question, max_new_tokens=12), want)
    document.ask(ids_of(40), max_new_tokens=3)  # longer than the sliding window
    assert torch.equal(document.ask(question.cuda(), max_new_tokens=12), want)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("spec", ["squeezed:sparsity=0.7", "topk:k=20,window=16", "streaming:sink=4,window=64"])
def test_sixteen_bits_answer_as_the_cpu_does_but_for_rounding(family, spec):
    model, ids, question = tiny(family, head_dim=64), ids_of(900), ids_of(6)
    here = logits_after(model, hf.attach(model, spec).read(ids), question)
    model = model.to("cuda", torch.bfloat16)
    there = logits_after(model, hf.attach(model, spec).read(ids), question)
    assert torch.nn.functional.cosine_similarity(here.flatten(), there.float().cpu().flatten(), dim=0) > 0.98


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_is_saved_on_either_device_and_loaded_on_the_other(family, tmp_path):
    model, ids, question, path = tiny(family, head_dim=64), ids_of(200), ids_of(5), tmp_path / "d.safetensors"
    for first, second in (("cpu", "cuda"), ("cuda", "cpu")):
        attached = hf.attach(model.to(first), "topk:k=20,window=16")
        document = attached.read(ids)
        document.save(path, overwrite=True)
        want = document.ask(question, max_new_tokens=6)
        assert torch.equal(attached.load(path).ask(question, max_new_tokens=6), want)
        again = hf.attach(model.to(second), "topk:k=20,window=16").load(path)
        assert again.cache.layers[-1].keys.device.type == second
        assert torch.equal(again.ask(question, max_new_tokens=6).cpu(), want.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_document_lie_once_and_answers_take_no_more_memory(dtype):
    model, ids, question = on_gpu("llama").to(dtype), ids_of(3000), ids_of(9)
    with torch.no_grad():
        model(input_ids=ids[:, :1].cuda())  # cuBLAS takes its workspace at its first product
    before = torch.cuda.memory_allocated()
    document = hf.attach(model, "topk:k=20,window=16").read(ids, chunk=256)
    layers = document.cache.layers
    assert torch.cuda.memory_allocated() - before < 100_000  # token ids; keys and values would take megabytes
    assert [(layer.held, layer.keys.shape[2], layer.get_seq_length()) for layer in layers] == [(3000, 0, 3000)] * len(layers)
    answer = document.ask(question, max_new_tokens=20)  # the first makes room for questions
    held = torch.cuda.memory_allocated(), [layer.selector.index_bytes for layer in layers]
    assert torch.equal(document.ask(question, max_new_tokens=20), answer)
    assert held == (torch.cuda.memory_allocated(), [layer.selector.index_bytes for layer in layers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_come_back_from_the_gpu_as_they_were(dtype):
    model, ids, question = on_gpu("qwen3").to(dtype), ids_of(700), ids_of(5)
    dense, sparse = (hf.attach(model, spec).read(ids, chunk=256) for spec in ("full", "topk:k=20,window=16"))
    for full, indexed in zip(dense.cache.layers, sparse.cache.layers):
        for want, found in zip((full.keys, full.values), indexed.all_rows()):
            assert torch.equal(want.cpu(), found)
    with torch.no_grad():  # and with a question's behind them
        model(input_ids=question.cuda(), use_cache=True, **{sparse.attached.cache_argument: sparse.cache})
    for full, indexed in zip(dense.cache.layers, sparse.cache.layers):
        keys, values = indexed.all_rows()
        assert keys.shape[2] == values.shape[2] == 705
        assert torch.equal(keys[:, :, :700], full.keys.cpu()) and torch.equal(values[:, :, :700], full.values.cpu())


def test_a_cache_that_is_cut_within_the_document_or_reset():
    model, ids, question = on_gpu("llama"), ids_of(400), ids_of(5)
    with torch.no_grad():
        want = model(input_ids=torch.cat([ids[:, :350], question], 1).cuda()).logits[:, -5:]
    document = hf.attach(model, "topk:k=100%,sink=1,window=16").read(ids)
    cache = {document.attached.cache_argument: document.cache}
    with torch.no_grad():
        document.cache.crop(-50)
        assert document.cache.get_seq_length() == 350
        torch.testing.assert_close(model(input_ids=question.cuda(), use_cache=True, **cache).logits, want, atol=2e-3, rtol=2e-3)
        for layer in document.cache.layers:
            layer.reset()
        assert document.cache.get_seq_length() == 0
        model(input_ids=ids[:, :350].cuda(), use_cache=True, **cache)
        torch.testing.assert_close(model(input_ids=question.cuda(), use_cache=True, **cache).logits, want, atol=2e-3, rtol=2e-3)


def test_a_layer_whose_rows_the_selector_holds_is_not_indexed_again():
    document, question = hf.attach(on_gpu("llama"), "topk:k=20,window=16").read(ids_of(200)), ids_of(5)
    want = document.ask(question, max_new_tokens=4)
    for layer in document.cache.layers:
        with pytest.raises(lodestone.InputError, match="indexed already"):
            layer.index()
    assert torch.equal(document.ask(question, max_new_tokens=4), want)


def test_attention_that_is_not_ours_does_not_meet_a_document():
    model = on_gpu("llama")
    attached = hf.attach(model, "topk:k=20,window=16")
    document, token = attached.read(ids_of(200)), ids_of(1).cuda()
    want = document.ask(ids_of(1) * 0 + 7, max_new_tokens=4)
    attached.detach()
    with pytest.raises(lodestone.InputError, match="call attach"), torch.no_grad():
        model(input_ids=token, use_cache=True, **{attached.cache_argument: document.cache})
    again = hf.attach(model, "topk:k=20,window=16")
    document.roll_back()
    assert torch.equal(document.ask(ids_of(1) * 0 + 7, max_new_tokens=4), want) and again.model is model


def test_a_question_in_another_type_than_the_document():
    model, ids, question = on_gpu("llama"), ids_of(200), ids_of(5)
    document = hf.attach(model, "topk:k=100%,sink=1,window=16").read(ids)
    want = logits_after(model, document, question)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.testing.assert_close(logits_after(model, document, question), want, atol=5e-2, rtol=5e-2, check_dtype=False)


def test_attention_to_other_values_than_those_of_the_cache_is_refused():
    config = transformers.DiffLlamaConfig(hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=200)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to("cuda")
    with pytest.raises(lodestone.InputError, match="values in the cache"):
        hf.attach(model, "topk:k=20,window=16").read(ids_of(100))


def test_a_selector_says_which_rows_are_missing():
    layer = lodestone.Selector("topk:k=20,sink=1,window=16", 4, 2, 64)
    k, q = torch.randn(2, 300, 64, device="cuda"), torch.randn(1, 4, 64, device="cuda")
    layer.build(k[:, :200], k[:, :200])
    with pytest.raises(lodestone.InputError, match="from token 200 on, which no call has brought, found them from 201 on"):
        layer.attend(q, 202, k[:, 201:203], k[:, 201:203], first=201)
    with pytest.raises(ValueError, match="expected 3 tokens or more, found 2"):
        layer.attend(q, 202, k[:, 200:202], k[:, 200:202], first=200)
    with pytest.raises(lodestone.InputError, match="first: expected"):
        layer.attend(q, 202, k, k, first=-1)
    some = torch.from_dlpack(layer.attend(q, 202, k[:, 200:203], k[:, 200:203], first=200))
    layer.roll_back(200)
    assert torch.equal(torch.from_dlpack(layer.attend(q, 202, k, k)), some)
    assert torch.equal(torch.from_numpy(layer.rows()[0]), k[:, :203].cpu())


def test_a_selector_takes_queries_in_bfloat16():
    layer = lodestone.Selector("topk:k=20,sink=1,window=16", 4, 2, 64)
    k, q = torch.randn(2, 300, 64, device="cuda"), torch.randn(1, 4, 64, device="cuda", dtype=torch.bfloat16)
    layer.build(k[:, :299], k[:, :299])
    want = torch.from_dlpack(layer.attend(q.float(), 299, k, k)).bfloat16()
    found = layer.attend(q, 299, k, k)
    assert found.dtype == "bfloat16" and torch.equal(torch.from_dlpack(found), want)
    assert torch.equal(torch.from_numpy(found.to_host()).view(torch.bfloat16), want.cpu())


def test_on_a_stream_of_its_own():
    model, question = on_gpu("qwen3"), ids_of(5)
    document = hf.attach(model, "kmeans:probes=4,sink=1,window=16").read(ids_of(400))
    want, stream = document.ask(question, max_new_tokens=6), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(document.ask(question, max_new_tokens=6), want)


def test_what_cannot_be_is_said_in_a_sentence():
    model = on_gpu("llama")
    attached = hf.attach(model, "topk:k=20,window=16")
    document = attached.read(ids_of(50))
    for wrong in (ids_of(5) + 1000, ids_of(5).to("meta")):
        with pytest.raises(lodestone.InputError, match="expected"):
            document.ask(wrong)
    mask = torch.ones(1, 55, dtype=torch.long, device="cuda")
    mask[:, :20] = 0
    with pytest.raises(lodestone.InputError, match="mask"), torch.no_grad():
        model(input_ids=ids_of(5).cuda(), attention_mask=mask, **{attached.cache_argument: document.cache})
    with pytest.raises(lodestone.InputError, match="a GPU chooses"):
        hf.attach(model, "infllm:dense_layers=0").read(ids_of(50))
    with pytest.raises(lodestone.InputError, match="NVIDIA"):
        hf.attach(tiny("llama").to("meta"), "topk:k=20")


def test_pytorchs_default_type_may_be_another():
    document, question = hf.attach(on_gpu("llama"), "topk:k=20,window=16").read(ids_of(200)), ids_of(5)
    want = document.ask(question, max_new_tokens=6)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(document.ask(question, max_new_tokens=6), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_memory_of_dropped_documents_is_there_at_once():
    attached = hf.attach(on_gpu("llama"), "topk:k=20,window=16")
    attached.read(ids_of(3000))
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        for _ in range(3):
            attached.read(ids_of(3000)).ask(ids_of(5), max_new_tokens=2)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_pipeline():
    ask = lodestone.pipeline(on_gpu("gemma3"), tokenizer=Words(), attention="kmeans:probes=4,sink=1,window=16")
    text = " ".join(f"word{i % 37} number{i}" for i in range(100))
    both = ask(text, questions=["who was it?", "and where?"], max_new_tokens=4)["answers"]
    assert both[0] == ask(text, question="who was it?", max_new_tokens=4)["answer"] != ""
