# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers under every kind of selector; skipped without torch and transformers."""

import gc
import threading
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import lodestone  # noqa: E402
from lodestone import hf  # noqa: E402

TINY = dict(
    vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)


FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_5", "gpt_oss"]


def tiny(family, head_dim=32):
    torch.manual_seed(0)
    sizes = TINY | {"head_dim": head_dim}
    if family == "llama":
        config = transformers.LlamaConfig(**sizes)
    elif family == "qwen3":
        config = transformers.Qwen3Config(**sizes)
    elif family == "gemma3":  # five layers with a sliding window to one without
        config = transformers.Gemma3TextConfig(**sizes | {"num_hidden_layers": 6}, sliding_window=32, query_pre_attn_scalar=48)
    elif family == "gpt_oss":  # every second layer with a sliding window; sinks in all
        config = transformers.GptOssConfig(
            **sizes | {"num_hidden_layers": 4}, sliding_window=32, num_local_experts=2, num_experts_per_tok=2, initializer_range=0.1
        )
    else:  # three recurrent layers to one with attention, whose heads turn in part
        if not hasattr(transformers, "Qwen3_5TextConfig"):
            pytest.skip("this transformers has no Qwen3.5")
        config = transformers.Qwen3_5TextConfig(
            **sizes | {"num_hidden_layers": 4}, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for module in model.modules():
        if hasattr(module, "sinks"):  # as heavy as some ten keys, and another for each head
            torch.nn.init.normal_(module.sinks, mean=2.5)
    return model


def logits_after(model, document, question):
    with torch.no_grad():
        out = model(input_ids=question.to(model.device), use_cache=True, **{document.attached.cache_argument: document.cache}).logits
    document.roll_back()
    return out


EVERYTHING = ["topk:k=100%", "kmeans:probes=1000", "quest:budget=100%,dense_layers=0", "hyperplanes:budget=100%", "random:fraction=100%"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", EVERYTHING)
def test_selecting_everything_equals_the_models_own_attention(family, spec):
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


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_full_generates_what_the_model_generates(family):
    model = tiny(family)
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


def test_a_model_gets_its_attention_back():
    model = tiny("llama")
    before, ids = model.config._attn_implementation, torch.randint(2, 200, (1, 60))
    want = model(input_ids=ids).logits
    attached = hf.attach(model, "topk:k=20,window=16")
    document = hf.attach(model, "full").read(ids)  # a second one knows no other way back than the first
    attached.detach()
    assert model.config._attn_implementation == before and torch.equal(model(input_ids=ids).logits, want)
    with pytest.raises(lodestone.InputError, match="call attach"):
        document.ask(torch.randint(2, 200, (1, 5)))


def test_a_damaged_document_is_refused(tmp_path):
    attached = hf.attach(tiny("llama"), "full")
    attached.read(torch.randint(2, 200, (1, 200))).save(tmp_path / "d.safetensors")
    whole = bytearray((tmp_path / "d.safetensors").read_bytes())
    for at in (len(whole) - 1, len(whole) // 2):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (tmp_path / "d.safetensors").write_bytes(damaged)
        with pytest.raises(lodestone.InputError, match="is damaged"):
            attached.load(tmp_path / "d.safetensors")


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


def test_wrong_ids_are_named():
    attached = hf.attach(tiny("llama"), "topk:k=20,window=16")
    ids, question = torch.randint(2, 200, (1, 50)), torch.randint(2, 200, (1, 5))
    document = attached.read(ids)
    want = document.ask(question, max_new_tokens=4)
    for wrong in ([[1, 2]], ids.numpy(), ids[0], ids.float(), ids + 1000, -ids, ids[:, :0], ids.to("meta"), None):
        for use in (attached.read, document.ask, lambda x: attached.logits(x, 8)):
            with pytest.raises(lodestone.InputError, match="expected"):
                use(wrong)
    for chunk in (0, -1):
        with pytest.raises(lodestone.InputError, match="chunk"):
            attached.read(ids, chunk=chunk)
    assert torch.equal(document.ask(question, max_new_tokens=4), want)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "beam"),
        ({"do_sample": True, "num_return_sequences": 2}, "sequence"),
        ({"use_cache": False}, "use_cache"),
        ({"attention_mask": torch.ones(1, 55)}, "attention_mask"),
        ({"input_ids": torch.ones(1, 5)}, "input_ids"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3)}, "assisted"),
        ({"generation_config": transformers.GenerationConfig(use_cache=False)}, "use_cache"),
    ],
)
def test_ways_of_generating_that_would_not_go_on_behind_the_document(given, said):
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50)))
    question = torch.randint(2, 200, (1, 5))
    want = document.ask(question, max_new_tokens=4)
    with pytest.raises(lodestone.InputError, match=said):
        document.ask(question, max_new_tokens=4, **given)
    assert torch.equal(document.ask(question, max_new_tokens=4), want)
    assert torch.equal(document.ask(question, max_new_tokens=4, return_dict_in_generate=True), want)


def test_scores_are_those_that_a_model_asks_for_wherever_it_scales():
    config = transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=200, max_position_embeddings=600, word_embed_proj_dim=64, init_std=0.3
    )
    model, ids, question = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.randint(2, 200, (1, 300)), torch.randint(2, 200, (1, 5))
    with torch.no_grad():
        want = model(input_ids=torch.cat([ids, question], 1)).logits[:, -5:]
    attached = hf.attach(model, "topk:k=100%,sink=1,window=16")  # OPT scales queries itself, and asks attention for a scale of 1
    torch.testing.assert_close(attached.logits(torch.cat([ids, question], 1), 5)[:, -5:], want, atol=1e-4, rtol=1e-4)


def test_positions_go_on_behind_what_is_in_the_cache():
    if not hasattr(transformers, "BambaConfig"):
        pytest.skip("this transformers has no Bamba")
    config = transformers.BambaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=200, attn_layer_indices=[1],
        mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=16, initializer_range=0.3,
    )
    model, ids, question = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.randint(2, 200, (1, 300)), torch.randint(2, 200, (1, 5))
    with torch.no_grad():  # Bamba counts from 0 in each pass unless it is told
        want = model.generate(input_ids=torch.cat([ids, question], 1), max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        document = hf.attach(model, "topk:k=100%,sink=1,window=16").read(ids, chunk=100)
    scores = []

    def keep(_, logits):
        scores.append(logits.clone())
        return logits

    assert torch.equal(document.ask(question, max_new_tokens=6, logits_processor=[keep]), want.sequences[0, 305:])
    torch.testing.assert_close(torch.stack(scores), torch.stack(want.logits), atol=1e-3, rtol=1e-3)


def test_a_document_that_is_read_under_autocast():
    model, ids, question = tiny("llama"), torch.randint(2, 200, (1, 300)), torch.randint(2, 200, (1, 5))
    attached = hf.attach(model, "topk:k=100%,sink=1,window=16")
    want = logits_after(model, attached.read(ids), question)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits_after(model, attached.read(ids), question)
    torch.testing.assert_close(found, want, atol=5e-2, rtol=5e-2, check_dtype=False)


def test_a_length_that_is_asked_for_is_the_length():
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50)))
    assert len(document.ask(torch.randint(2, 200, (1, 5)), max_length=58)) == 3
    with pytest.raises(lodestone.InputError, match="num_return_sequences=1"):
        document.ask(torch.randint(2, 200, (1, 5)), do_sample=True, num_return_sequences=2)


def test_threads_that_ask_one_document_take_turns():
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 100)))
    question = torch.randint(2, 200, (1, 5))
    want, got = document.ask(question, max_new_tokens=6).tolist(), []
    threads = [threading.Thread(target=lambda: got.append(document.ask(question, max_new_tokens=6).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 4


def test_a_mask_that_hides_parts_of_a_document_is_refused():
    model = tiny("llama")
    attached = hf.attach(model, "topk:k=20,window=16,dense_layers=0")
    document = attached.read(torch.randint(2, 200, (1, 50)))
    padding = torch.ones(1, 55, dtype=torch.long)
    padding[:, :20] = 0
    holes = torch.ones(1, 1, 5, 55, dtype=torch.bool).tril(50)
    holes[:, :, :4, 20] = False  # not in the last query's row
    for mask in (padding, holes):
        with pytest.raises(lodestone.InputError, match="mask"), torch.no_grad():
            model(input_ids=torch.randint(2, 200, (1, 5)), attention_mask=mask, **{attached.cache_argument: document.cache})
        document.roll_back()


def test_a_mask_that_was_written_to_is_looked_at_again():
    model, ids, question = tiny("llama"), torch.randint(2, 200, (1, 50)), torch.randint(2, 200, (1, 5))
    document = hf.attach(model, "topk:k=20,window=16,dense_layers=0").read(ids)
    mask = torch.ones(5, 55).tril(50).bool()[None, None]
    given = {"input_ids": question, "attention_mask": mask, document.attached.cache_argument: document.cache}
    for inference in (False, True):
        with torch.no_grad(), torch.inference_mode(inference):
            given["attention_mask"] = mask.clone()
            model(**given)
            document.roll_back()
            given["attention_mask"][..., :20] = False
            with pytest.raises(lodestone.InputError, match="mask"):
                model(**given)
            document.roll_back()


def test_a_dropped_document_gives_its_memory_back_at_once():
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50)))
    document.ask(torch.randint(2, 200, (1, 5)), max_new_tokens=2)
    layers = [weakref.ref(layer) for layer in document.cache.layers]
    gc.disable()
    try:
        del document
        assert all(layer() is None for layer in layers)
    finally:
        gc.enable()


def test_memory_that_ends_while_a_document_grows_leaves_it_whole(monkeypatch):
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50)))
    question, longer = torch.randint(2, 200, (1, 5)), torch.randint(2, 200, (1, 300))
    want, empty, rooms = document.ask(question, max_new_tokens=4), torch.empty, []

    def for_one_alone(*args, **kwargs):
        if isinstance(args[0], tuple) and len(args[0]) == 4:
            rooms.append(args[0])
            if len(rooms) == 2:
                raise torch.OutOfMemoryError("full")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", for_one_alone)
    with pytest.raises(torch.OutOfMemoryError):
        document.ask(longer, max_new_tokens=4)
    monkeypatch.undo()
    assert torch.equal(document.ask(question, max_new_tokens=4), want)
    assert len(document.ask(longer, max_new_tokens=4)) == 4


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_inference_mode_in_some_calls_and_not_in_others(family, tmp_path):
    attached = hf.attach(tiny(family), "topk:k=20,window=16")
    ids, question = torch.randint(2, 200, (1, 50)), torch.randint(2, 200, (1, 5))
    with torch.inference_mode():
        document = attached.read(ids)
        document.save(tmp_path / "d.safetensors")
        loaded = attached.load(tmp_path / "d.safetensors")
    want = document.ask(question, max_new_tokens=4)
    with torch.inference_mode():
        assert torch.equal(document.ask(question, max_new_tokens=4), want)
    assert torch.equal(document.ask(question, max_new_tokens=4), want) and torch.equal(loaded.ask(question, max_new_tokens=4), want)


def test_a_model_that_changed_behind_a_document_is_named():
    model = tiny("llama")
    attached = hf.attach(model, "topk:k=20,window=16")
    document, question = attached.read(torch.randint(2, 200, (1, 50))), torch.randint(2, 200, (1, 5))
    model.set_attn_implementation("sdpa")
    for use in (lambda: document.ask(question), lambda: attached.logits(question, 2)):
        with pytest.raises(lodestone.InputError, match="'sdpa'; call attach"):
            use()
    hf.attach(model, "topk:k=20,window=16")
    assert len(document.ask(question, max_new_tokens=2)) == 2
    model.to("meta")
    with pytest.raises(lodestone.InputError, match="on cpu, where it read the document, found it on meta"):
        document.ask(question)
    with pytest.raises(lodestone.InputError, match="float64"):
        hf.attach(tiny("llama").double(), "topk:k=20").read(torch.randint(2, 200, (1, 50)))


def test_a_layer_is_cropped_in_either_way_of_transformers():
    cache = hf.attach(tiny("llama"), "full").read(torch.randint(2, 200, (1, 50))).cache
    for layer in cache.layers:
        layer.crop(0)
        assert layer.get_seq_length() == 50
        layer.crop(-3)
        assert layer.get_seq_length() == 47
        layer.crop(40)  # what stays
        assert layer.get_seq_length() == 40


def test_layers_that_hold_nothing_and_cuts_beyond_the_first_token():
    empty = hf.LodestoneLayer()
    empty.crop(-1)
    assert empty.get_seq_length() == 0
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50)))
    for layer in document.cache.layers:
        layer.crop(-500)
        assert layer.get_seq_length() == 0
        layer.reset()
        layer.crop(-1)
        assert layer.get_seq_length() == 0 and layer.keys.untyped_storage().nbytes() == 0


def test_what_would_change_the_batch_leaves_a_document_whole():
    document, question = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50))), torch.randint(2, 200, (1, 5))
    want = document.ask(question, max_new_tokens=4)
    for change in (lambda: document.cache.batch_repeat_interleave(2), lambda: document.cache.batch_select_indices(torch.tensor([0, 0]))):
        with pytest.raises(lodestone.InputError, match="one sequence"):
            change()
        assert torch.equal(document.ask(question, max_new_tokens=4), want)


def test_a_generation_config_says_how_to_generate():
    document = hf.attach(tiny("llama"), "topk:k=20,window=16").read(torch.randint(2, 200, (1, 50)))
    given = transformers.GenerationConfig(do_sample=True, max_new_tokens=3, pad_token_id=0)
    assert len(document.ask(torch.randint(2, 200, (1, 5)), generation_config=given)) == 3


def test_what_is_read_does_not_change_whose_model_it_is_but_the_scaling_of_rope_does(tmp_path):
    def attached(**rope):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**TINY | {"max_position_embeddings": 64}, rope_parameters={"rope_theta": 1e4, "factor": 4.0, **rope})
        return hf.attach(transformers.AutoModelForCausalLM.from_config(config).eval(), "topk:k=20,window=16")

    ids, path = torch.randint(2, 200, (1, 100)), tmp_path / "d.safetensors"
    attached(rope_type="dynamic").read(ids).save(path)  # longer than the model: its frequencies follow
    assert attached(rope_type="dynamic").load(path).tokens == 100
    attached(rope_type="yarn", attention_factor=1.0, original_max_position_embeddings=64).read(ids).save(path, overwrite=True)
    with pytest.raises(lodestone.InputError, match="another"):
        attached(rope_type="yarn", attention_factor=1.4, original_max_position_embeddings=64).load(path)


def test_files_of_other_models_and_broken_ones_are_refused(tmp_path):
    attached = hf.attach(tiny("llama"), "topk:k=20,window=16")
    document = attached.read(torch.randint(2, 200, (1, 50)))
    path = tmp_path / "d.safetensors"
    document.save(path)
    torch.manual_seed(1)  # as many heads, other weights
    other = hf.attach(transformers.AutoModelForCausalLM.from_config(attached.model.config).eval(), "topk:k=20,window=16")
    with pytest.raises(lodestone.InputError, match="another"):
        other.load(path)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:3000])
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    for name in ("cut", "junk", "nothing"):
        with pytest.raises(lodestone.InputError, match=name):
            attached.load(tmp_path / name)
    with pytest.raises(lodestone.RunError, match="cannot be written"):
        document.save(tmp_path / "no folder" / "d")
    with pytest.raises(lodestone.InputError, match="d.safetensors: this file exists already; overwrite=True"):
        document.save(path)


def test_full_attention_layers_with_heads_of_their_own_size():
    """Gemma 4: the layers without a window have wider heads, and the config has no one number for all."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **TINY | {"num_hidden_layers": 4}, num_kv_shared_layers=0, sliding_window=32, vocab_size_per_layer_input=200,
        hidden_size_per_layer_input=16, layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids, question = torch.randint(2, 200, (1, 120)), torch.randint(2, 200, (1, 7))
    with torch.no_grad():
        want = model(input_ids=torch.cat([ids, question], 1)).logits[:, -7:]
    document = hf.attach(model, "kmeans:probes=1000,sink=1,window=16,dense_layers=0").read(ids)
    torch.testing.assert_close(logits_after(model, document, question), want, atol=1e-4, rtol=1e-4)


def test_models_of_other_attention_are_refused_before_the_prefill():
    soft_capped = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**TINY)).eval()
    with pytest.raises(lodestone.InputError, match="gemma2|softcap"):  # 5.17 says that SDPA can do it
        hf.attach(soft_capped, "topk:k=20,dense_layers=0").read(torch.randint(2, 200, (1, 50)))
    config = transformers.DeepseekV3Config(
        **{k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}, num_key_value_heads=4, moe_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    )
    attached = hf.attach(transformers.AutoModelForCausalLM.from_config(config).eval(), "topk:k=20,dense_layers=0")
    with pytest.raises(lodestone.InputError, match="MLA"):
        attached.read(torch.randint(2, 200, (1, 50)))
    with pytest.raises(lodestone.InputError, match="model of transformers"):
        hf.attach(None, "topk:k=20")
    with pytest.raises(lodestone.InputError, match="generates text, found BertModel"):
        hf.attach(transformers.BertModel(transformers.BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)), "topk:k=20")


def test_models_whose_code_attends_by_itself_are_refused(tmp_path):
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, vocab_size=200, new_decoder_architecture=True)
    model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.randint(2, 200, (1, 50))
    with pytest.raises(lodestone.InputError, match="can be replaced, found falcon"):
        hf.attach(model, "topk:k=20,dense_layers=0")
    # One that transformers believes to be replaced, and is not.
    model, path = tiny("llama"), tmp_path / "d.safetensors"
    attached = hf.attach(model, "topk:k=20,window=16")
    attached.read(ids).save(path)
    transformers.AttentionInterface.register("lodestone", transformers.integrations.sdpa_attention.sdpa_attention_forward)
    try:
        for call in (lambda: attached.read(ids), lambda: attached.logits(ids, 5), lambda: attached.load(path)):
            with pytest.raises(lodestone.InputError, match="can be replaced, found llama"):
                call()
    finally:
        transformers.AttentionInterface.register("lodestone", hf._attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_padding_stay_dense_and_right(family):
    model = tiny(family)
    short = torch.randint(2, 200, (1, 60))  # longer than the sliding window
    padded = torch.cat([torch.randint(2, 200, (1, 70)), torch.cat([torch.zeros(1, 10, dtype=torch.long), short], 1)])
    mask = (padded != 0).long()
    inputs = dict(input_ids=padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    with torch.no_grad():
        before = model(**inputs).logits
        attached = hf.attach(model, "topk:k=20,window=16")
        alone = model(input_ids=short).logits[0, -1]
        both = model(**inputs).logits
        cached = model(**inputs, **{attached.cache_argument: attached.new_cache()}).logits  # in a cache that can be indexed
    torch.testing.assert_close(both, before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both[1, -1], alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cached, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_masks_and_gradients_before_a_document_is_indexed_are_the_models_own(family):
    model, ids = tiny(family), torch.randint(2, 200, (1, 50))
    hidden = torch.ones(1, 50, dtype=torch.long)
    hidden[:, :7] = 0
    holes = torch.full((1, 1, 50, 50), torch.finfo(torch.float32).min).triu(1)
    holes[:, :, 20:40, 3:9] = torch.finfo(torch.float32).min  # not in the last query's row

    def with_gradients(mask, **cache):
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask, **cache).logits[:, 10:]
        logits.square().sum().backward()
        return [logits.detach()] + [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def without_gradients(mask, **cache):
        with torch.no_grad():
            return [model(input_ids=ids, attention_mask=mask, **cache).logits[:, 10:]]

    cases = [(how, mask) for how in (with_gradients, without_gradients) for mask in (None, hidden, holes)]
    want = [how(mask) for how, mask in cases]
    attached = hf.attach(model, "topk:k=20,window=16")
    for (how, mask), one in zip(cases, want):
        for cache in ({}, {attached.cache_argument: attached.new_cache()}):
            got = how(mask, **cache)
            assert len(got) == len(one)
            torch.testing.assert_close(got, one, atol=1e-4, rtol=1e-4)


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
