# SPDX-License-Identifier: Apache-2.0
"""The connector between a played vLLM (its scheduler's calls, a paged cache) and documents; needs torch, not vLLM."""

import pathlib
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import lodestone  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = 16


def played(modules):
    """Puts modules, NAME: attributes, into Python's table with the packages that they are in; yields; takes them out again."""
    made = {}
    for name, attributes in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(made[name]).update(attributes)
    before = {n: sys.modules.get(n) for n in made}
    sys.modules.update(made)
    yield
    for n, old in before.items():
        sys.modules.pop(n) if old is None else sys.modules.__setitem__(n, old)


@pytest.fixture(scope="module")
def connector_module():
    """lodestone.vllm over a base class that keeps the step's metadata, as vLLM's does."""

    class Base:
        def __init__(self, vllm_config, role, kv_cache_config=None):
            self.work = None

        def _get_connector_metadata(self):
            return self.work

    classes = {"KVConnectorBase_V1": Base, "KVConnectorMetadata": object, "KVConnectorRole": object}
    for _ in played({"vllm.distributed.kv_transfer.kv_connector.v1.base": classes}):
        import lodestone.vllm as module

        yield module


class Layer:
    """An attention layer whose paged cache has one of vLLM's layouts."""

    def __init__(self, shape, layout):
        self.impl, self.layout = self, layout
        self.kv_cache = torch.zeros(40, shape["kv_heads"], BLOCK, 2 * shape["head_dim"])

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        if self.layout == "scaled":
            keys = keys / 3
        block, at = slots // BLOCK, slots % BLOCK
        if self.layout == "packed":  # keys of a block transposed and reversed, as some kernels want them
            view = cache.view(cache.shape[0], cache.shape[1], 2, -1)
            d = keys.shape[-1]
            view[:, :, 0].unflatten(2, (d, BLOCK))[block, :, :, at] = keys.flip(-1)
            view[:, :, 1].unflatten(2, (BLOCK, d))[block, :, at] = values
        elif self.layout == "halves":
            view = cache.view(cache.shape[0], cache.shape[1], 2 * BLOCK, -1)
            view[block, :, at], view[block, :, BLOCK + at] = keys, values
        else:
            d = keys.shape[-1]
            cache[block, :, at, :d], cache[block, :, at, d:] = keys, values


def config(**extra):
    transfer = types.SimpleNamespace(get_from_extra_config=lambda name, default: extra.get(name, default))
    return types.SimpleNamespace(kv_transfer_config=transfer, cache_config=types.SimpleNamespace(block_size=BLOCK))


@pytest.fixture(scope="module")
def model():
    return lodestone.Model(ROOT / "models" / "pocket")


@pytest.fixture(scope="module")
def document_path(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "d.lode"
    lodestone.Document.read(model, "The bell of Aldermere sank into the river in the year of the flood. " * 12).save(path)
    return str(path)


def step(connector, output, layers):
    """One forward step of the worker; returns what the scheduler's side had said."""
    connector.work = connector.build_connector_meta(output)
    begin = types.SimpleNamespace(no_compile_layers=layers)
    if connector.work.loads:  # they feed this step; vLLM 0.32 begins others after the layers
        connector.start_load_kv(begin)
    for name, layer in layers.items():
        connector.save_kv_layer(name, layer.kv_cache, None)
    if not connector.work.loads:
        connector.start_load_kv(begin)
    connector.wait_for_save()
    return connector.work


def output(new=(), cached=None, scheduled=None):
    cached = cached or types.SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return types.SimpleNamespace(scheduled_new_reqs=list(new), scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled or {})


@pytest.mark.parametrize("layout", ["split", "halves", "packed"])
def test_a_document_is_served_and_saved_again(connector_module, model, document_path, layout, tmp_path):
    document = lodestone.Document.load(document_path, model)
    layers = {f"model.layers.{i}.self_attn.attn": Layer(model.shape, layout) for i in range(model.shape["layers"])}
    serving = connector_module.LodestoneConnector(config(model=str(ROOT / "models" / "pocket"), documents=[document_path]), None)
    request = types.SimpleNamespace(request_id="a", prompt_token_ids=document.token_ids + [5, 6, 7])
    count, later = serving.get_num_new_matched_tokens(request, 16)
    end = document.tokens // BLOCK * BLOCK
    assert (count, later) == (end - 16, False)
    blocks = [3 + 2 * (i % 5) + 10 * (i // 5) for i in range(-(-document.tokens // BLOCK))]
    serving.update_state_after_alloc(request, types.SimpleNamespace(get_block_ids=lambda: (blocks,)), count)
    step(serving, output(), layers)
    for i, layer in enumerate(layers.values()):
        keys, values = connector_module.read_rows(layer, layer.kv_cache, blocks, end)
        for h, (k, v) in enumerate(document.kv(i)):
            np.testing.assert_array_equal(keys[16:, h].numpy(), k[16:end].astype(np.float32))
            np.testing.assert_array_equal(values[16:, h].numpy(), v[16:end].astype(np.float32))
        assert not keys[:16].any()  # vLLM had these
    other = types.SimpleNamespace(request_id="b", prompt_token_ids=[1, 2, 3])
    assert serving.get_num_new_matched_tokens(other, 0) == (0, False)

    # What is in the cache now is saved as if vLLM had computed it, in two steps of its scheduler.
    for i, layer in enumerate(layers.values()):
        rows = connector_module.document_rows(document, i, 0, document.tokens)
        connector_module._write(layer, *rows, layer.kv_cache, connector_module.slots_of(blocks, BLOCK, 0, document.tokens))
    saving = connector_module.LodestoneConnector(
        config(model=str(ROOT / "models" / "pocket"), save=str(tmp_path), specs=["kmeans:probes=4,window=31"]), None
    )
    new = types.SimpleNamespace(req_id="c", prompt_token_ids=document.token_ids, block_ids=(blocks[:2],), num_computed_tokens=0)
    assert not step(saving, output([new], scheduled={"c": 32}), layers).saves
    cached = types.SimpleNamespace(req_ids=["c"], new_block_ids=[(blocks[2:],)], num_computed_tokens=[32], resumed_req_ids=set())
    assert len(step(saving, output(cached=cached, scheduled={"c": document.tokens - 32}), layers).saves) == 1
    (path,) = tmp_path.glob("*.lode")
    again = lodestone.Document.load(path, model)
    assert again.token_ids == document.token_ids and again.methods == ["kmeans:probes=4,window=31"]
    np.testing.assert_array_equal(again.kv(1)[0][0], document.kv(1)[0][0])


def test_what_cannot_be_is_said_in_a_sentence(connector_module, model):
    with pytest.raises(lodestone.InputError, match="'model'"):
        connector_module.LodestoneConnector(config(), None)
    with pytest.raises(lodestone.InputError, match="layer's name"):
        connector_module.layer_index("model.norm")
    layer = Layer(model.shape, "scaled")
    layer.kv_cache.normal_()
    with pytest.raises(lodestone.InputError, match="another kind"):
        connector_module.read_rows(layer, layer.kv_cache, [0, 1], 2 * BLOCK)


# ---- The attention backend. ----


class BaseImpl:
    """vLLM's own backend, which owns the cache."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.sliding_window = self.alibi_slopes = self.logits_soft_cap = None
        self.attn_type, self.kv_cache_dtype, self.calls = "decoder", "auto", 0

    def forward(self, layer, query, key, value, kv_cache, metadata, output):
        self.calls += 1
        output.zero_()
        return output


class BaseBuilder:
    def __init__(self, spec, layer_names, vllm_config, device):
        pass

    def build(self, common_prefix_len, common, fast_build=False):
        return types.SimpleNamespace()


@pytest.fixture
def attention_module(connector_module):
    config = types.SimpleNamespace(additional_config={"lodestone": {"attention": "topk:k=10000,sink=2,window=8", "min_tokens": 40}})
    base = types.SimpleNamespace(get_impl_cls=lambda: BaseImpl, get_builder_cls=lambda: BaseBuilder)
    modules = {
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.attention.backend": {"AttentionType": types.SimpleNamespace(DECODER="decoder")},
        "vllm.v1.attention.backends.cpu_attn": {"CPUAttentionBackend": type("Base", (), vars(base))},
    }
    for _ in played(modules):
        import lodestone.vllm_attention as module

        yield module, config
    del sys.modules["lodestone.vllm_attention"]


class Played:
    """A server's batches over one attention layer of vLLM."""

    def __init__(self, module, config, layout="halves"):
        self.rng = torch.Generator().manual_seed(3)
        self.layer = Layer({"kv_heads": 2, "head_dim": 32}, layout)
        self.layer.layer_name = "model.layers.0.self_attn.attn"
        self.impl = module.LodestoneAttentionImpl(8, 32, 0.17, 2)
        self.builder = module.LodestoneMetadataBuilder(types.SimpleNamespace(block_size=BLOCK), [], config, torch.device("cpu"))
        self.kept = {}

    def step(self, *requests):
        """(blocks, context's length, new tokens) each; gives what the layer put out, and checks decoded long ones with torch."""
        counts = [new for _, _, new in requests]
        starts = torch.tensor([0, *np.cumsum(counts)])
        q, k, v = (torch.randn(sum(counts), heads, 32, generator=self.rng) for heads in (8, 2, 2))
        table = torch.zeros(len(requests), 10, dtype=torch.int64)
        for i, (blocks, tokens, new) in enumerate(requests):
            table[i, : len(blocks)] = torch.tensor(blocks)
            rows, own = torch.arange(tokens - new, tokens), slice(int(starts[i]), int(starts[i + 1]))
            slots = torch.tensor(blocks)[rows // BLOCK] * BLOCK + rows % BLOCK
            self.layer.do_kv_cache_update(self.layer, k[own], v[own], self.layer.kv_cache, slots)
            for slot, key, value in zip(slots.tolist(), k[own], v[own]):
                self.kept[slot] = (key, value)
        common = types.SimpleNamespace(
            causal=True, query_start_loc_cpu=starts, seq_lens=torch.tensor([tokens for _, tokens, _ in requests]), block_table_tensor=table
        )
        output = self.impl.forward(self.layer, q, k, v, self.layer.kv_cache, self.builder.build(0, common), torch.empty(sum(counts), 8, 32))
        for i, (blocks, tokens, new) in enumerate(requests):
            if new == 1 and tokens >= 40:
                slots = [blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(tokens)]
                keys, values = (torch.stack([self.kept[slot][part] for slot in slots], 1) for part in (0, 1))
                scores = torch.einsum("hgd,hsd->hgs", q[starts[i]].view(2, 4, 32), keys) * 0.17
                want = torch.einsum("hgs,hsd->hgd", scores.softmax(-1), values).reshape(8, 32)
                torch.testing.assert_close(output[starts[i]], want, atol=1e-4, rtol=1e-3)
        return output


@pytest.mark.parametrize("layout", ["halves", "packed"])
def test_decoded_tokens_attend_by_retrieval(attention_module, layout):
    played_server = Played(*attention_module, layout)
    step, impl = played_server.step, played_server.impl
    a, b = [3, 9, 4, 7, 21], [3, 9, 4, 12, 20]  # which share a text
    step((a, 60, 60))
    assert impl.calls == 1 and not impl._contexts
    step((a, 61, 1))
    step((a, 62, 1), ([5, 6], 20, 20))  # beside a prompt
    assert impl.calls == 2
    step((b, 62, 14))  # of a prompt whose beginning was there
    step((a, 63, 1), (b, 63, 1))
    for tokens in range(64, 68):  # into another block
        step((b, tokens, 1), (a, tokens, 1), ([5, 6], tokens - 43, 1))
    calls = impl.calls
    step((a, 68, 1), (b, 68, 1))
    assert impl.calls == calls and len(impl._contexts) == 2
    step((a, 50, 50))  # another text in the same blocks
    step((a, 51, 1))
    step((a, 51, 1))  # a token again: the server has thrown it away


def test_what_the_backend_is_asked_for_is_checked(attention_module):
    module, config = attention_module
    for wrong in ({"min_tokens": 3}, {"attention": "kmeans", "tokens": 3}):
        with pytest.raises(lodestone.InputError, match="'attention'"):
            module.Options.of(types.SimpleNamespace(additional_config={"lodestone": wrong}))
    assert module.Options.of(types.SimpleNamespace(additional_config={})) is None
    config.additional_config["lodestone"]["attention"] = "squeezed"
    with pytest.raises(lodestone.InputError, match="prompt's queries"):
        Played(module, config).step(([1, 2, 3], 41, 41), ([4, 5, 6], 41, 1))
