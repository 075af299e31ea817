# SPDX-License-Identifier: Apache-2.0
"""Attention over given keys, merging and selectors against NumPy in float64."""

import pathlib
import threading
import time

import numpy as np
import pytest

import lodestone
import lodestone.cuda


def reference(q, k, v, rows=None, scale=None):
    """q [Hq, d], k and v [Hkv, S, d] -> output and log-sum-exp in float64."""
    hq, d = q.shape
    group = hq // k.shape[0]
    out, lse = np.zeros((hq, d)), np.full(hq, -np.inf)
    for h in range(hq):
        keys = k[h // group].astype(np.float64)
        values = v[h // group].astype(np.float64)
        if rows is not None:
            chosen = rows[h // group] if len(rows) == k.shape[0] else rows[h]
            keys, values = keys[chosen], values[chosen]
        if len(keys) == 0:
            continue
        s = keys @ q[h].astype(np.float64) * (scale if scale is not None else d**-0.5)
        m = s.max()
        w = np.exp(s - m)
        out[h], lse[h] = w @ values / w.sum(), m + np.log(w.sum())
    return out, lse


def made_up(heads=2, group=4, tokens=300, d=64, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((heads * group, d), dtype=np.float32)
    k = rng.standard_normal((heads, tokens, d), dtype=np.float32).astype(dtype)
    return q, k, rng.standard_normal((heads, tokens, d), dtype=np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("d", [64, 80, 128])
def test_attend_matches_float64(dtype, group, d):
    q, k, v = made_up(group=group, d=d, dtype=dtype)
    out, lse = lodestone.attend(q, k, v)
    want, want_lse = reference(q, k, v)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


def test_attend_over_rows_and_merge_equals_all():
    q, k, v = made_up()
    rng = np.random.default_rng(1)
    pick = [np.sort(rng.choice(300, n, replace=False)).astype(np.int32) for n in (17, 0)]
    rest = [np.setdiff1d(np.arange(300), p).astype(np.int32) for p in pick]
    a, b = lodestone.attend(q, k, v, rows=pick), lodestone.attend(q, k, v, rows=rest)
    want, want_lse = reference(q, k, v, rows=pick)
    np.testing.assert_allclose(a[0], want, atol=2e-5)
    assert np.all(a[0][4:] == 0) and np.all(np.isneginf(a[1][4:]))  # the empty set
    out, lse = lodestone.merge(a, b)
    want, want_lse = reference(q, k, v)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


def test_rows_for_each_query_head():
    q, k, v = made_up()
    rows = [np.arange(h, 300, 7, dtype=np.int32) for h in range(8)]
    out, _ = lodestone.attend(q, k, v, rows=rows)
    np.testing.assert_allclose(out, reference(q, k, v, rows=rows)[0], atol=2e-5)


def test_causal_equals_token_by_token():
    q, k, v = made_up(tokens=40)
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((5, 8, 64), dtype=np.float32)
    out, lse = lodestone.attend_causal(queries, k, v)
    for t in range(5):
        want, want_lse = reference(queries[t], k[:, : 36 + t], v[:, : 36 + t])
        np.testing.assert_allclose(out[t], want, atol=2e-5)
        np.testing.assert_allclose(lse[t], want_lse, atol=2e-5)


def test_a_slice_of_a_larger_buffer_is_not_copied():
    q, k, v = made_up(tokens=500)
    np.testing.assert_array_equal(
        lodestone.attend(q, k[:, :300], v[:, :300])[0], lodestone.attend(q, k[:, :300].copy(), v[:, :300].copy())[0]
    )


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda q, k, v: (q[:, :32], k, v), ValueError),
        (lambda q, k, v: (q[:7], k, v), ValueError),
        (lambda q, k, v: (q.astype(np.float64), k, v), TypeError),
        (lambda q, k, v: (q, k.astype(np.int32), v.astype(np.int32)), TypeError),
        (lambda q, k, v: (q, k[:, :, ::2], v[:, :, ::2]), ValueError),
        (lambda q, k, v: (q, k[0], v[0]), ValueError),
        (lambda q, k, v: (q, k, v[:, :10]), ValueError),
        (lambda q, k, v: (q, k.transpose(1, 0, 2), v.transpose(1, 0, 2)), ValueError),
    ],
)
def test_wrong_arrays_are_named(change, error):
    with pytest.raises(error, match="expected"):
        lodestone.attend(*change(*made_up()))


@pytest.mark.parametrize("rows", [[3, 2], [-1, 2], [1, 300], [5, 5]])
def test_wrong_rows_are_named(rows):
    q, k, v = made_up()
    with pytest.raises(lodestone.InputError, match="rising rows"):
        lodestone.attend(q, k, v, rows=[np.array(rows, np.int32)] * 2)


def test_top_k_breaks_ties_to_the_later_and_ranks_nan_last():
    scores = np.array([1, 5, np.nan, 5, 5, -np.inf], np.float32)
    assert lodestone.top_k(scores, 2).tolist() == [3, 4]
    assert lodestone.top_k(scores, 0).tolist() == []
    assert lodestone.top_k(scores, 99).tolist() == [0, 1, 2, 3, 4, 5]


EVERYTHING = [
    "topk:k=100%", "kmeans:probes=1000", "random:fraction=100%", "quest:budget=100%", "hyperplanes:budget=100%", "ivf:k=100%,nprobe=1000",
]


@pytest.mark.parametrize("spec", EVERYTHING)
def test_selecting_everything_equals_full_attention(spec):
    d, tokens = 64, 700
    q, k, v = made_up(tokens=tokens, d=d)
    frequencies = (10000.0 ** (-np.arange(0, d, 2) / d)).astype(np.float32)
    selector = lodestone.Selector(f"{spec},sink=4,window=16", 8, 2, d, inverse_frequencies=frequencies)
    selector.build(k[:, :699], v[:, :699])
    out = selector.attend(q[None], 699, k, v)
    np.testing.assert_array_equal(out[0], lodestone.attend(q, k, v)[0])


@pytest.mark.parametrize("spec", ["topk:k=20", "kmeans:probes=3", "quest:budget=32", "hyperplanes:budget=20", "magicpig", "squeezed"])
def test_chosen_keys_are_far_and_each_head_is_served_once(spec):
    d, tokens, sink, window = 64, 900, 2, 30
    q, k, v = made_up(tokens=tokens, d=d)
    selector = lodestone.Selector(f"{spec}{',' if ':' in spec else ':'}sink={sink},window={window}", 8, 2, d)
    selector.build(k[:, :890], v[:, :890])
    lodestone.finish([selector], [k[:, :890]], [v[:, :890]])
    served = []
    for kv_head, heads, begin, end, rows, weights in selector.select(q[None], 899, k, v):
        assert (begin, end) == (0, 1) and all(h // 4 == kv_head for h in heads)
        assert np.all(np.diff(rows) > 0) and (len(rows) == 0 or (rows[0] >= sink and rows[-1] < 900 - window))
        assert weights is None or len(weights) == len(rows)
        served += heads
    assert sorted(served) == list(range(8))


def test_bare_capsules_are_asked_once():
    q, k, v = made_up(heads=1, group=2)
    selector = lodestone.Selector("topk:k=20,sink=4,window=16", 2, 1, 64)
    want = selector.attend(q[None], 299, k, v, return_lse=True)
    got = selector.attend(*(q[None].__dlpack__(), 299, k.__dlpack__(), v.__dlpack__()), return_lse=True)
    np.testing.assert_array_equal(got[0], want[0])
    assert len(selector.select(q[None].__dlpack__(), 299, k.__dlpack__(), v.__dlpack__())) == 2


def test_trained_methods_are_for_a_model():
    weights = pathlib.Path(__file__).resolve().parents[2] / "models" / "pocket"
    fingerprint = lodestone.Model(weights).fingerprint
    assert lodestone.Selector(f"hash:weights={weights}/hash.safetensors", 8, 2, 64, fingerprint=fingerprint).spec.startswith("hash")
    with pytest.raises(lodestone.InputError, match="fingerprint"):
        lodestone.Selector(f"hash:weights={weights}/hash.safetensors", 8, 2, 64)


def test_specs_are_checked():
    with pytest.raises(lodestone.InputError, match="full, streaming"):
        lodestone.Selector("nonsense", 8, 2, 64)
    with pytest.raises(lodestone.InputError, match="sparse"):
        lodestone.Selector("full", 8, 2, 64)
    with pytest.raises(lodestone.InputError, match="query heads"):
        lodestone.Selector("topk", 7, 2, 64)


class Elsewhere:
    """An array that says it lies on a GPU."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        raise BufferError("not on this device")


@pytest.mark.parametrize("wrong", [None, 3, "text", [1.0, 2.0], object(), Elsewhere(np.ones(3, np.float32))])
def test_what_is_no_array_is_named(wrong):
    q, k, v = made_up()
    with pytest.raises((TypeError, ValueError), match="expected|incompatible"):
        lodestone.attend(wrong, k, v)
    with pytest.raises((TypeError, ValueError), match="expected|incompatible"):
        lodestone.attend(q, wrong, v)


ON_A_GPU = Elsewhere(np.ones(3, np.float32))


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: lodestone.attend(ON_A_GPU, k, v),
        lambda q, k, v: lodestone.attend_causal(ON_A_GPU, k, v),
        lambda q, k, v: lodestone.merge((ON_A_GPU, q), (q, q)),
        lambda q, k, v: lodestone.top_k(ON_A_GPU, 3),
        lambda q, k, v: lodestone.plan(ON_A_GPU, np.zeros(0, np.int32), 8, 2),
        lambda q, k, v: lodestone.plan(np.zeros(2, np.int32), np.zeros(0, np.int32), 8, 2).run(ON_A_GPU, k, v),
    ],
)
def test_arrays_on_a_gpu_are_refused_where_there_is_none(call):
    if lodestone.cuda.device_count() > 0:
        pytest.skip("there is one")
    with pytest.raises((TypeError, ValueError, lodestone.RunError), match="LODESTONE_CUDA=ON|__dlpack__|GPU"):
        call(*made_up())


def test_streams_and_results_are_for_arrays_on_a_gpu():
    q, k, v = made_up()
    for options in ({"stream": 0}, {"out": (q, q)}):
        with pytest.raises(ValueError, match="(stream|out): expected None"):
            lodestone.attend(q, k, v, **options)
    with pytest.raises((lodestone.InputError, lodestone.RunError)):
        lodestone.cuda.to_device(q, device=99)


def test_what_does_not_fit_the_keys_is_named():
    q, k, v = made_up()
    with pytest.raises(ValueError, match=r"rows: expected an int32 array for each KV head .* give a list of arrays"):
        lodestone.attend(q, k, v, rows=np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match=r"q: expected \[a multiple of 2 heads, 64\] as k has them, found \[8, 63\]"):
        lodestone.attend(np.ascontiguousarray(q[:, 1:]), k, v)
    with pytest.raises(ValueError, match=r"q: expected \[tokens, a multiple of 2 heads, 64.* found \[4, 7, 64\]"):
        lodestone.attend_causal(np.ones((4, 7, 64), np.float32), k, v)
    with pytest.raises(TypeError, match="in this machine's byte order"):
        lodestone.attend(q.astype(">f4"), k, v)


@pytest.mark.parametrize("shape", [(0, 300, 64), (2, 0, 64), (2, 300, 0)])
def test_empty_arrays_give_a_sentence_or_the_empty_set(shape):
    k = np.zeros(shape, np.float32)
    q = np.ones((8, shape[2]), np.float32)
    try:
        out, lse = lodestone.attend(q, k, k)
    except ValueError as error:
        assert "expected" in str(error)
    else:
        assert np.all(out == 0) and np.all(np.isneginf(lse))


def test_strides_of_every_kind():
    q, k, v = made_up()
    want = lodestone.attend(q, k, v)[0]
    np.testing.assert_array_equal(lodestone.attend(q, k[::-1][::-1], v)[0], want)  # heads in another order in memory
    flipped = lodestone.attend(np.concatenate([q[4:], q[:4]]), k[::-1], v[::-1])[0]
    np.testing.assert_array_equal(np.concatenate([flipped[4:], flipped[:4]]), want)
    one = np.broadcast_to(k[:1], k.shape)
    np.testing.assert_array_equal(lodestone.attend(q, one, v)[0], lodestone.attend(q, one.copy(), v)[0])
    with pytest.raises(ValueError, match="strides|contiguous"):
        lodestone.attend(q, k[:, ::-1], v)
    with pytest.raises(ValueError, match="contiguous"):
        lodestone.attend(q[:, ::-1], k, v)


def test_arrays_may_be_freed_after_a_call():
    q, k, v = made_up(tokens=700)
    selector = lodestone.Selector("kmeans:probes=1000,sink=1,window=16", 8, 2, 64)
    selector.build(k[:, :699].copy(), v[:, :699].copy())  # gone at once
    out = selector.attend(q[None].copy(), 699, k.copy(), v.copy())
    np.testing.assert_allclose(out[0], lodestone.attend(q, k, v)[0], atol=1e-5)


def test_one_selector_and_many_threads():
    q, k, v = made_up(tokens=900)
    selector = lodestone.Selector("kmeans:probes=4,sink=1,window=16", 8, 2, 64)
    selector.build(k[:, :890], v[:, :890])
    want = selector.attend(q[None], 899, k, v)
    wrong = []

    def work():
        for _ in range(20):
            if not np.array_equal(selector.attend(q[None], 899, k, v), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def observed_and_built(spec, layers, k, v):
    """Selectors of these layers that have seen a prompt with keys k and v [Hkv, S, 64] of two KV heads."""
    selectors = [lodestone.Selector(spec, 8, 2, 64, layer=layer) for layer in layers]
    prompt = np.random.default_rng(3).standard_normal((k.shape[1], 8, 64), dtype=np.float32)
    for selector in selectors:
        selector.observe(prompt, k.transpose(1, 0, 2).copy(), v.transpose(1, 0, 2).copy(), 0)
        selector.build(k, v)
    return selectors


def test_finish_goes_by_the_layers_of_its_selectors():
    """Their numbers need not begin at 0 or follow each other: a model may have layers of other kinds between."""
    q, k, v = made_up(tokens=600)
    spec, chosen = "squeezed:sink=1,window=16", []
    for layers in ([0], [7], [3, 7]):
        selectors = observed_and_built(spec, layers, k, v)
        lodestone.finish(selectors, [k] * len(layers), [v] * len(layers))
        chosen.append([rows.tolist() for *_, rows, _ in selectors[0].select(q[None], 599, k, v)])
    assert 0 < sum(map(len, chosen[0])) < 2 * 583
    assert all(len(rows) for one in chosen for rows in one)


def test_finish_refuses_what_is_not_a_selector_each():
    q, k, v = made_up()
    selector = lodestone.Selector("squeezed", 8, 2, 64)
    selector.build(k, v)
    with pytest.raises(lodestone.InputError, match="different selectors"):
        lodestone.finish([selector, selector], [k, k], [v, v])
    with pytest.raises((lodestone.InputError, TypeError)):
        lodestone.finish([None], [k], [v])
    with pytest.raises(lodestone.InputError, match="at least one"):
        lodestone.finish([], [], [])
    with pytest.raises(lodestone.InputError, match="keys and values of each"):
        lodestone.finish([selector], [k, k], [v])
    other = lodestone.Selector("kmeans", 8, 2, 64, layer=1)
    other.build(k, v)
    for pair in ([selector, other], [other, selector]):
        with pytest.raises(lodestone.InputError, match="one spec"):
            lodestone.finish(pair, [k, k], [v, v])
    with pytest.raises(lodestone.InputError, match="built with"):
        lodestone.finish([selector], [k[:, :100]], [v[:, :100]])


@pytest.mark.parametrize(
    "shape", [(8, 3, 64), (8, 2, 32), (7, 2, 64), (9, 2, 64), (0, 2, 64)], ids=["heads", "d", "fewer tokens", "more tokens", "none"]
)
def test_observe_wants_keys_of_its_queries(shape):
    selector = lodestone.Selector("squeezed", 8, 2, 64)
    q, right, wrong = np.ones((8, 8, 64), np.float32), np.ones((8, 2, 64), np.float32), np.ones(shape, np.float32)
    for k, v in ((wrong, right), (right, wrong)):
        with pytest.raises(ValueError, match="expected"):
            selector.observe(q, k, v, 0)
    for begin in (-1, 2**31 - 4, 2**62):
        with pytest.raises(ValueError, match="begin"):
            selector.observe(q, right, right, begin)


@pytest.mark.parametrize("heads", [(0, 2, 64), (8, 0, 64), (-8, 2, 64), (8, -2, 64), (8, 2, 0), (8, 2, -1), (8, 2, 33), (8, 2, 4096), (64, 2, 64)])
def test_a_selector_of_no_heads_is_refused(heads):
    with pytest.raises(lodestone.InputError, match="expected"):
        lodestone.Selector("topk:k=3", *heads)
    with pytest.raises(lodestone.InputError, match="layer"):
        lodestone.Selector("topk:k=3", 8, 2, 64, layer=-1)


class Slow:
    """A method in Python that lets other threads run while it chooses."""

    def __init__(self, **_):
        pass

    def build(self, keys):
        pass

    def select(self, head, queries, begin, end):
        CHOOSES.set()
        time.sleep(0.2)
        return np.arange(begin, end, dtype=np.int64)


CHOOSES = threading.Event()


def test_a_selector_that_is_busy_in_python_holds_nobody_up():
    lodestone.register_method("slow-method", Slow)
    q, k, v = made_up()
    selector = lodestone.Selector("slow-method:sink=1,window=16", 8, 2, 64)
    selector.build(k, v)
    thread = threading.Thread(target=selector.select, args=(q[None], 299, k, v))
    thread.start()
    assert CHOOSES.wait(10)
    assert selector.index_bytes == 0  # waits for its turn, without the lock that the other thread needs
    thread.join(10)
    assert not thread.is_alive()
