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


@pytest.fixture(scope="module")
def connector_module():
    """lodestone.vllm over a base class that keeps the step's metadata, as vLLM's does."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    base = types.ModuleType(name)

    class Base:
        def __init__(self, vllm_config, role, kv_cache_config=None):
            self.work = None

        def _get_connector_metadata(self):
            return self.work

    base.KVConnectorBase_V1, base.KVConnectorMetadata, base.KVConnectorRole = Base, object, object
    parts = name.split(".")
    made = {".".join(parts[: i + 1]): types.ModuleType(".".join(parts[: i + 1])) for i in range(len(parts) - 1)} | {name: base}
    before = {n: sys.modules.get(n) for n in made}
    sys.modules.update(made)
    import lodestone.vllm as module

    yield module
    for n, old in before.items():
        sys.modules.pop(n) if old is None else sys.modules.__setitem__(n, old)


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
