# SPDX-License-Identifier: Apache-2.0
"""Models of transformers on a GPU; skipped where there is none, and without torch and transformers."""

import gc

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

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


def test_appended_rows_are_copied_alone_and_memory_is_taken_once():
    document = hf.attach(on_gpu("llama"), "topk:k=20,window=16").read(ids_of(3000), chunk=256)
    places = [layer.keys.data_ptr() for layer in document.cache.layers]
    document.ask(ids_of(9), max_new_tokens=20)
    assert places == [layer.keys.data_ptr() for layer in document.cache.layers]
    assert all(layer._k.shape[2] == 3256 for layer in document.cache.layers)


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
