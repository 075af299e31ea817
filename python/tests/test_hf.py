# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers under every kind of selector; skipped without torch and transformers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import lodestone  # noqa: E402
from lodestone import hf  # noqa: E402

TINY = dict(
    vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)


FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_5"]


def tiny(family):
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**TINY)
    elif family == "qwen3":
        config = transformers.Qwen3Config(**TINY)
    elif family == "gemma3":  # five layers with a sliding window to one without
        config = transformers.Gemma3TextConfig(**TINY | {"num_hidden_layers": 6}, sliding_window=32, query_pre_attn_scalar=48)
    else:  # three recurrent layers to one with attention, whose heads turn in part
        if not hasattr(transformers, "Qwen3_5TextConfig"):
            pytest.skip("this transformers has no Qwen3.5")
        config = transformers.Qwen3_5TextConfig(
            **TINY | {"num_hidden_layers": 4}, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits_after(model, document, question):
    with torch.no_grad():
        out = model(input_ids=question, use_cache=True, **{document.attached.cache_argument: document.cache}).logits
    document.roll_back()
    return out


EVERYTHING = ["topk:k=100%", "kmeans:probes=1000", "quest:budget=100%,dense_layers=0", "hyperplanes:budget=100%", "random:fraction=100%"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", EVERYTHING)
def test_selecting_everything_equals_sdpa(family, spec):
    model = tiny(family)
    ids, question = torch.randint(2, 200, (1, 300)), torch.randint(2, 200, (1, 7))
    with torch.no_grad():
        want = model(input_ids=torch.cat([ids, question], 1)).logits[:, -7:]
    document = hf.attach(model, f"{spec},sink=1,window=16").read(ids, chunk=128)
    torch.testing.assert_close(logits_after(model, document, question), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits_after(model, document, question), want, atol=1e-4, rtol=1e-4)  # after going back


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_with_everything_selected_are_the_models_own(family):
    model = tiny(family)
    ids, question = torch.randint(2, 200, (1, 120)), torch.randint(2, 200, (1, 5))
    want = model.generate(input_ids=torch.cat([ids, question], 1), max_new_tokens=12, do_sample=False)[0, 125:]
    document = hf.attach(model, "topk:k=100%,sink=1,window=16").read(ids, chunk=50)
    assert torch.equal(document.ask(question, max_new_tokens=12), want)
    document.ask(torch.randint(2, 200, (1, 40)), max_new_tokens=3)  # longer than the sliding window
    assert torch.equal(document.ask(question, max_new_tokens=12), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_do_not_see_each_other(family):
    model = tiny(family)
    ids = torch.randint(2, 200, (1, 400))
    document = hf.attach(model, "kmeans:probes=4,sink=1,window=16").read(ids)
    first, second = torch.randint(2, 200, (1, 5)), torch.randint(2, 200, (1, 9))
    a = document.ask(first, max_new_tokens=6)
    document.ask(second, max_new_tokens=6)
    assert torch.equal(a, document.ask(first, max_new_tokens=6)) and document.cache.get_seq_length() == 400


def test_full_generates_what_the_model_generates():
    model = tiny("llama")
    ids, question = torch.randint(2, 200, (1, 100)), torch.randint(2, 200, (1, 5))
    want = model.generate(input_ids=torch.cat([ids, question], 1), max_new_tokens=8, do_sample=False)[0, 105:]
    assert torch.equal(hf.attach(model, "full").read(ids).ask(question, max_new_tokens=8), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded(family, tmp_path):
    model = tiny(family)
    attached = hf.attach(model, "topk:k=20,window=16")
    document = attached.read(torch.randint(2, 200, (1, 200)))
    question = torch.randint(2, 200, (1, 5))
    document.save(tmp_path / "d.safetensors")
    assert torch.equal(attached.load(tmp_path / "d.safetensors").ask(question, max_new_tokens=6), document.ask(question, max_new_tokens=6))


def test_what_cannot_be_is_said_in_a_sentence(tmp_path):
    model = tiny("llama")
    attached = hf.attach(model, "topk:k=20,window=16")
    with pytest.raises(lodestone.InputError, match="one sequence"):
        attached.read(torch.randint(2, 200, (2, 50)))
    document = attached.read(torch.randint(2, 200, (1, 50)))
    with pytest.raises(lodestone.InputError, match="beam"):
        document.ask(torch.randint(2, 200, (1, 5)), num_beams=3)
    with pytest.raises(lodestone.InputError, match="one sequence|beam"):
        model.generate(
            input_ids=torch.randint(2, 200, (1, 60)), num_beams=2, max_new_tokens=4, **{attached.cache_argument: document.cache}
        )
    with pytest.raises(lodestone.InputError, match="document.*safetensors|keys of"):
        document.save(tmp_path / "other.safetensors")
        hf.attach(tiny("gemma3"), "topk:k=20").load(tmp_path / "other.safetensors")
    with pytest.raises(lodestone.InputError, match="valid"):
        hf.attach(model, "nonsense")


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_padding_stay_dense_and_right(family):
    model = tiny(family)
    hf.attach(model, "topk:k=20,window=16")
    short = torch.randint(2, 200, (1, 20))
    padded = torch.cat([torch.cat([torch.zeros(1, 10, dtype=torch.long), short], 1), torch.randint(2, 200, (1, 30))])
    mask = (padded != 0).long()
    with torch.no_grad():
        alone = model(input_ids=short).logits[0, -1]
        both = model(input_ids=padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[0, -1]
    torch.testing.assert_close(alone, both, atol=1e-4, rtol=1e-4)


class Words:
    """A tokenizer of whole words, as much of one as the pipeline asks for."""

    bos_token, chat_template = None, None

    def __call__(self, text, add_special_tokens=False, split_special_tokens=False):
        ids = [2 + sum(word.encode()) % 198 for word in text.split()]
        return type("Encoding", (), {"input_ids": ids})

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(i)) for i in ids)


def test_pipeline_in_kvpress_call_shape():
    model = tiny("gemma3")
    ask = lodestone.pipeline(model, tokenizer=Words(), attention="kmeans:probes=4,sink=1,window=16")
    text = " ".join(f"word{i % 37} number{i}" for i in range(100))
    both = ask(text, questions=["who was it?", "and where?"], max_new_tokens=4)["answers"]
    assert both[0] == ask(text, question="who was it?", max_new_tokens=4)["answer"] != ""
    with pytest.raises(lodestone.InputError, match="question"):
        ask(text)
    with pytest.raises(lodestone.InputError, match="tokenizer"):
        lodestone.pipeline(model)
