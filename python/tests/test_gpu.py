# SPDX-License-Identifier: Apache-2.0
"""The same functions over arrays on a GPU, against NumPy in float64; skipped where there is none."""

import multiprocessing
import pathlib
import threading

import numpy as np
import pytest
from test_attention import made_up, reference

import lodestone
from lodestone import cuda

if cuda.device_count() == 0:
    pytest.skip("no GPU, or a package without CUDA", allow_module_level=True)


def put(*arrays):
    return [cuda.to_device(np.ascontiguousarray(a)) for a in arrays]


def got(state):
    return [part.to_host() for part in state]


def close(found, want, dtype=np.float32):
    """Queries and weights are rounded to the type of the keys."""
    for part, expected in zip(found, want):
        np.testing.assert_allclose(part, expected, atol=3e-5 if dtype == np.float32 else 4e-3, rtol=1e-3)


def rounded(q, dtype):
    return q.astype(dtype).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("heads, group, d", [(2, 1, 64), (2, 3, 80), (3, 8, 128), (1, 12, 96), (1, 20, 64), (2, 2, 256), (2, 4, 40)])
@pytest.mark.parametrize("tokens", [1, 300, 9000])
def test_attend_matches_float64(dtype, heads, group, d, tokens):
    q, k, v = made_up(heads, group, tokens, d, dtype)
    close(got(lodestone.attend(*put(q, k, v))), reference(rounded(q, dtype), k, v), dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_of_kv_heads_and_of_query_heads(dtype):
    q, k, v = made_up(tokens=3000, dtype=dtype)
    rng = np.random.default_rng(1)
    for counts in [(700, 0), (3, 2999), (1, 5, 64, 65, 300, 0, 2000, 3000)]:
        rows = [np.sort(rng.choice(3000, n, replace=False)).astype(np.int32) for n in counts]
        state = lodestone.attend(*put(q, k, v), rows=put(*rows), check=True)
        close(got(state), reference(rounded(q, dtype), k, v, rows), dtype)
    together = np.stack([np.sort(rng.choice(3000, 99, replace=False)).astype(np.int32) for _ in range(2)])
    state = lodestone.attend(*put(q, k, v), rows=put(together)[0])
    close(got(state), reference(rounded(q, dtype), k, v, list(together)), dtype)


@pytest.mark.parametrize("bad", [-1, 300, 2**31 - 1])
def test_rows_that_do_not_exist_give_nan_or_a_sentence(bad):
    q, k, v = put(*made_up(tokens=300, dtype=np.float16))
    rows = put(np.array([3, bad], np.int32), np.array([5, 7], np.int32))
    output, lse = got(lodestone.attend(q, k, v, rows=rows))
    assert np.isnan(output[:4]).all() and np.isnan(lse[:4]).all() and np.isfinite(output[4:]).all()
    with pytest.raises(lodestone.InputError, match="rising rows"):
        lodestone.attend(q, k, v, rows=rows, check=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("queries", [1, 5, 40, 300])
def test_causal_equals_token_by_token(dtype, queries):
    _, k, v = made_up(tokens=700, d=128, dtype=dtype)
    q = np.random.default_rng(2).standard_normal((queries, 8, 128), dtype=np.float32)
    output, lse = got(lodestone.attend_causal(*put(q, k, v)))
    for t in range(0, queries, 13):
        end = 700 - queries + 1 + t
        close((output[t], lse[t]), reference(rounded(q[t], dtype), k[:, :end], v[:, :end]), dtype)


def test_causal_of_odd_sizes():
    for d in (6, 64, 300):
        _, k, v = made_up(heads=1, tokens=90, d=d, dtype=np.float16)
        q = np.random.default_rng(2).standard_normal((33, 3, d), dtype=np.float32)
        output, lse = got(lodestone.attend_causal(*put(q, k, v), scale=0.1))
        close((output[32], lse[32]), reference(rounded(q[32], np.float16), k, v, scale=0.1), np.float16)


def test_merging_any_number_of_states_equals_all():
    q, k, v = made_up(tokens=300)
    arrays = put(q, k, v)
    for parts in (2, 3, 16, 17, 40):
        rows = [np.arange(i, 300, parts, dtype=np.int32) for i in range(parts)]
        states = [lodestone.attend(*arrays, rows=put(r, r)) for r in rows]
        empty = lodestone.attend(*arrays, rows=put(*[np.zeros(0, np.int32)] * 2))
        close(got(lodestone.merge(empty, *states)), reference(q, k, v))
        assert lodestone.merge(*states, out=states[0]) is states[0]
        close(got(states[0]), reference(q, k, v))
    assert np.isneginf(got(lodestone.merge(empty, empty))[1]).all()


@pytest.mark.parametrize("lists_per_token", [1, 2, 8])
def test_plans_match_the_cpu(lists_per_token):
    rng = np.random.default_rng(4)
    tokens, pages, size = 37, 40, 16
    counts = rng.integers(0, pages, tokens * lists_per_token)
    counts[3] = 0
    indices = [rng.choice(pages, n, replace=False) for n in counts]
    last = rng.integers(1, size + 1, len(counts)).astype(np.int32)
    indptr, entries = np.cumsum([0, *counts]).astype(np.int32), np.concatenate(indices).astype(np.int32)
    weights = rng.standard_normal(len(entries), dtype=np.float32)
    for dtype, log_weights in ((np.float32, None), (np.float16, weights)):
        _, k, v = made_up(tokens=pages * size, dtype=dtype)
        q = rounded(rng.standard_normal((tokens, 8, 64), dtype=np.float32), dtype)
        on_gpu = [None if x is None else cuda.to_device(x) for x in (indptr, entries, last, log_weights)]
        plan = lodestone.plan(on_gpu[0], on_gpu[1], 8, 2, size, on_gpu[2], on_gpu[3], lists_per_token)
        want = plan.run(q, k, v, return_lse=True)
        arrays = put(q, k, v)
        for _ in range(3):
            close(got(plan.run(*arrays, return_lse=True)), want, dtype)
        np.testing.assert_array_equal(plan.run(*arrays).to_host(), plan.run(*arrays, return_lse=True)[0].to_host())
    with pytest.raises(lodestone.InputError, match="rows or more"):
        plan.run(arrays[0], *put(k[:, :600], v[:, :600]))


def test_plans_of_runs():
    q, k, v = made_up(tokens=5000, dtype=np.float16)
    plan = lodestone.plan(np.array([0, 2, 3], np.int32), np.array([[0, 4], [100, 4500], [7, 7]], np.int32), 8, 2)
    output, lse = got(plan.run(*put(np.stack([q, q]), k, v), return_lse=True))
    rows = [np.r_[0:4, 100:4500]] * 2
    close((output[0], lse[0]), reference(rounded(q, np.float16), k, v, rows), np.float16)
    assert (output[1] == 0).all() and np.isneginf(lse[1]).all()


@pytest.mark.parametrize("n", [1, 5, 1000, 70000, 1500000])
def test_top_k_is_that_of_the_cpu(n):
    rng = np.random.default_rng(n)
    for scores in (
        rng.standard_normal(n, dtype=np.float32),
        rng.integers(0, 5, n).astype(np.float32),
        rng.choice(np.array([np.nan, -np.inf, 1, np.finfo(np.float32).min], np.float32), n),
    ):
        for k in (0, 1, n // 3, n - 1, n, n + 9):
            np.testing.assert_array_equal(lodestone.top_k(cuda.to_device(scores), k).to_host(), lodestone.top_k(scores, k))


def test_results_go_to_arrays_of_the_caller():
    q, k, v = made_up()
    arrays, out = put(q, k, v), tuple(put(np.full((8, 64), np.nan, np.float32), np.zeros(8, np.float32)))
    assert lodestone.attend(*arrays, out=out) is out
    close(got(out), reference(q, k, v))
    rows = cuda.to_device(np.zeros(3, np.int32))
    assert lodestone.top_k(cuda.to_device(np.arange(9, dtype=np.float32)), 3, out=rows) is rows
    assert rows.to_host().tolist() == [6, 7, 8]
    for wrong in (out[0], (out[1], out[0]), (out[0], cuda.to_device(np.zeros(8))), (np.zeros((8, 64), np.float32), out[1])):
        with pytest.raises((TypeError, ValueError), match="out: expected"):
            lodestone.attend(*arrays, out=wrong)


@pytest.mark.parametrize(
    "change, error, sentence",
    [
        (lambda q, k, v: (q.to_host(), k, v), ValueError, "CPU's memory"),
        (lambda q, k, v: (q, k.to_host(), v), ValueError, "k: expected an array on GPU 0"),
        (lambda q, k, v: (q, k, [1]), TypeError, "v: expected an array"),
        (lambda q, k, v: (cuda.to_device(q.to_host().astype(np.float16)), k, v), TypeError, "q: expected float32"),
        (lambda q, k, v: (q, cuda.to_device(np.zeros((2, 300, 64), np.int32)), v), TypeError, "k: expected float32"),
        (lambda q, k, v: (cuda.to_device(q.to_host()[:7]), k, v), ValueError, "q: expected"),
        (lambda q, k, v: (cuda.to_device(q.to_host()[:, :32].copy()), k, v), ValueError, "q: expected"),
        (lambda q, k, v: (q, k, cuda.to_device(v.to_host()[:, :10].copy())), ValueError, "equal shapes"),
    ],
)
def test_wrong_arrays_are_named(change, error, sentence):
    with pytest.raises(error, match=sentence):
        lodestone.attend(*change(*put(*made_up())))


@pytest.mark.parametrize("stream", ["text", 1.5, object(), -3, 2**70])
def test_wrong_streams_are_named(stream):
    with pytest.raises((TypeError, ValueError), match="stream: expected"):
        lodestone.attend(*put(*made_up()), stream=stream)


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(lodestone.RunError, match="found GPU 99"):
        cuda.to_device(np.zeros(3), device=99)


@pytest.mark.parametrize("shape", [(0, 300, 64), (2, 0, 64), (2, 300, 0), (2, 0, 600)])
def test_empty_arrays_give_a_sentence_or_the_empty_set(shape):
    k = cuda.to_device(np.zeros(shape, np.float32))
    q = cuda.to_device(np.ones((8, shape[2]), np.float32))
    try:
        output, lse = got(lodestone.attend(q, k, k))
    except ValueError as error:
        assert "expected" in str(error)
    else:
        assert np.all(output == 0) and np.all(np.isneginf(lse))


def test_many_threads():
    q, k, v = made_up(tokens=2000, dtype=np.float16)
    arrays, want, failures = put(q, k, v), reference(rounded(q, np.float16), k, v), []
    plan = lodestone.plan(np.array([0, 2000], np.int32), np.arange(2000, dtype=np.int32), 8, 2)
    batch = cuda.to_device(q[None])

    def work(stream):
        try:
            for _ in range(30):
                close(got(lodestone.attend(*arrays, stream=stream)), want, np.float16)
                close([plan.run(batch, *arrays[1:], stream=stream).to_host(stream)[0]], want[:1], np.float16)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (None, 0, 1, 2, 2, None)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def in_a_fork(arrays, queue):
    try:
        lodestone.attend(*arrays)
    except lodestone.RunError as error:
        queue.put(str(error))


def test_a_fork_is_refused_in_a_sentence():
    arrays, context = put(*made_up()), multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_fork, args=(arrays, queue))
    child.start()
    assert "fork" in queue.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0


def test_arrays_may_be_dropped_at_once():
    q, k, v = made_up(tokens=20000, dtype=np.float16)
    want = reference(rounded(q, np.float16), k, v)
    for _ in range(20):
        close(got(lodestone.attend(*put(q, k, v))), want, np.float16)
    assert "float32 [8, 64], GPU 0" in repr(lodestone.attend(*put(q, k, v))[0])


# ---- Selectors. ----

POCKET = pathlib.Path(__file__).resolve().parents[2] / "models" / "pocket"
POCKET_HASH = f"hash:budget=64,weights={POCKET}/hash.safetensors"


def selector_of(spec, heads, group, d, layers=(0,), k=None, v=None, seed=3):
    """Selectors that have heard queries, are built and finished, where k and v lie; [tokens, Hq, d] queries for more."""
    rng = np.random.default_rng(seed)
    fingerprint = lodestone.Model(POCKET).fingerprint if "pocket" in spec else ""
    selectors = [lodestone.Selector(spec, heads * group, heads, d, layer=layer, fingerprint=fingerprint) for layer in layers]
    tokens = k.shape[1]
    queries = rng.standard_normal((tokens, heads * group, d), dtype=np.float32)
    prompt = [queries, *[np.zeros((tokens, heads, d), np.float32)] * 2]
    if not isinstance(k, np.ndarray):
        prompt = put(*prompt)
    for selector in selectors:
        if selector.wants_prompt:
            selector.observe(*prompt, 0)
        selector.build(k, v)
    lodestone.finish(selectors, [k] * len(layers), [v] * len(layers))
    return selectors


def attended(sets, token, position, selector, heads, group, built=None):
    """The rows of each query head: sink, window (the last of the rows that were built, or of those so far) and what was chosen."""
    window = (position + 1 if built is None else built) - selector.window
    near = np.r_[0 : min(selector.sink, position + 1), max(0, window) : position + 1]
    rows = [None] * (heads * group)
    for _, query_heads, begin, end, chosen, weights in sets:
        assert weights is None
        for head in query_heads if begin <= token < end else []:
            every = np.unique(np.r_[near, chosen.to_host()])
            rows[head] = every[every <= position]
    return rows


SPECS = [
    ("streaming", 2, 4, 64), ("topk:k=100", 2, 4, 64), ("topk:k=5%,per=kv-head", 2, 2, 128), ("kmeans:probes=6", 2, 4, 64),
    ("kmeans:probes=6,rope=on", 1, 8, 128), ("hyperplanes:budget=5%", 2, 4, 64), (POCKET_HASH, 2, 4, 64), ("squeezed:sparsity=0.9", 2, 4, 64),
    ("random", 2, 4, 64), ("quest:budget=64", 2, 4, 64), ("quest:budget=64,bits=4", 2, 4, 64), ("double-sparsity:budget=64", 2, 4, 64),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [900, 6000])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("spec, heads, group, d", SPECS)
def test_selectors_attend_to_what_they_select(spec, heads, group, d, dtype, tokens):
    _, k, v = made_up(heads, group, tokens + 40, d, dtype)
    slides = not spec.startswith("squeezed")  # whose window is the end of what was built
    near = f"{',' if ':' in spec else ':'}sink=4,window=64" if slides else ""
    (selector,) = selector_of(spec + near, heads, group, d, (0,), *put(k[:, :tokens], v[:, :tokens]))
    rng = np.random.default_rng(5)
    arrays = put(k, v)
    for begin, count in ((tokens, 1), (tokens + 1, 1), (tokens + 2, 38)):
        q = rounded(rng.standard_normal((count, heads * group, d), dtype=np.float32), dtype)
        (there,) = put(q)
        output, lse = got(selector.attend(there, begin, *arrays, return_lse=True))
        sets = selector.select(there, begin, *arrays)
        for token in (0, count - 1):
            rows = attended(sets, token, begin + token, selector, heads, group, None if slides else tokens)
            assert all(len(r) < (begin + token + 1) * 0.6 for r in rows)
            close((output[token], lse[token]), reference(q[token], k, v, rows), dtype)
    assert selector.index_bytes > 0


@pytest.mark.parametrize("tokens", [1, 20])
def test_selectors_take_queries_of_sixteen_bits(tokens):
    _, k, v = made_up(tokens=1100, dtype=np.float16)
    (selector,) = selector_of("quest:budget=64,window=64", 2, 4, 64, (0,), *put(k[:, :1000], v[:, :1000]))
    q = np.random.default_rng(6).standard_normal((tokens, 8, 64), dtype=np.float32).astype(np.float16)
    half, single, *arrays = put(q, q.astype(np.float32), k, v)
    want, want_lse = got(selector.attend(single, 1000, *arrays, return_lse=True))
    found, lse = got(selector.attend(half, 1000, *arrays, return_lse=True))
    assert found.dtype == np.float16 and lse.dtype == np.float32
    np.testing.assert_array_equal(found, want.astype(np.float16))
    np.testing.assert_array_equal(lse, want_lse)
    for dtype in (np.float32, np.float16):
        out, pair, out_lse = put(*[np.full_like(want, np.nan, dtype)] * 2, np.full_like(want_lse, np.nan))
        assert selector.attend(half, 1000, *arrays, out=out) is out
        selector.attend(half, 1000, *arrays, return_lse=True, out=(pair, out_lse))
        for x in (out, pair):
            np.testing.assert_array_equal(x.to_host(), want.astype(dtype))
        np.testing.assert_array_equal(out_lse.to_host(), want_lse)
    chosen, other = ([(*place, set(rows.to_host())) for *place, rows, _ in selector.select(x, 1000, *arrays)] for x in (half, single))
    assert chosen == other and all(rows for *_, rows in chosen) and chosen
    narrow, whole = put(np.empty_like(found), np.empty(found.shape, np.int32))
    with pytest.raises(TypeError, match="out: expected float32 or float16, as q is, found int32"):
        selector.attend(half, 1000, *arrays, out=whole)
    with pytest.raises(TypeError, match="out: expected float32, found float16"):
        selector.attend(single, 1000, *arrays, out=narrow)
    with pytest.raises(TypeError, match="q: expected float32, float16 or bfloat16, found float64"):
        selector.attend(*put(q.astype(np.float64)), 1000, *arrays)


def test_selectors_choose_what_the_cpu_chooses():
    q, k, v = made_up(tokens=3000)
    for spec in ("topk:k=100,window=64", "topk:k=50,per=kv-head,window=64", "random:window=64", "quest:budget=64,window=64"):
        (here,), (there,) = (selector_of(spec, 2, 4, 64, (5,), *arrays) for arrays in ((k, v), put(k, v)))
        want = {tuple(heads): rows for _, heads, _, _, rows, _ in here.select(q[None], 2999, k, v)}
        for _, heads, _, _, rows, _ in there.select(*put(q[None]), 2999, *put(k, v)):
            assert set(rows.to_host()) == set(want[tuple(heads)]), spec


def test_selectors_of_several_layers_finish_together():
    _, k, v = made_up(tokens=6000, dtype=np.float16)
    selectors = selector_of("squeezed:sparsity=0.9", 2, 4, 64, (3, 7), *put(k, v))
    q = np.random.default_rng(8).standard_normal((1, 8, 64), dtype=np.float32)
    shares = [np.mean([len(rows.to_host()) for *_, rows, _ in s.select(*put(q), 5999, *put(k, v))]) / 6000 for s in selectors]
    assert all(0.02 < share < 0.4 for share in shares), shares


def test_rows_behind_a_cut_are_read_anew():
    _, k, v = made_up(tokens=1100)
    (selector,) = selector_of("kmeans:probes=4,window=64", 2, 4, 64, (0,), *put(k[:, :1000], v[:, :1000]))
    q = np.random.default_rng(6).standard_normal((1, 8, 64), dtype=np.float32)
    selector.attend(*put(q), 1090, *put(k, v))
    other = k.copy()
    other[:, 1020:] = np.random.default_rng(7).standard_normal((2, 80, 64), dtype=np.float32)
    selector.roll_back(1020)
    output, lse = got(selector.attend(*put(q), 1095, *put(other, v), return_lse=True))
    rows = attended(selector.select(*put(q), 1095, *put(other, v)), 0, 1095, selector, 2, 4)
    close((output[0], lse[0]), reference(q[0], other, v, rows))


def test_selectors_refuse_in_a_sentence():
    q, k, v = made_up()
    selector = lodestone.Selector("infllm", 8, 2, 64)
    with pytest.raises(lodestone.InputError, match="a GPU chooses.*copy"):
        selector.build(*put(k, v))
    selector = lodestone.Selector("squeezed", 8, 2, 64)
    selector.build(*put(k, v))
    with pytest.raises(lodestone.InputError, match="finish"):
        selector.attend(*put(q[None]), 299, *put(k, v))
    with pytest.raises(lodestone.InputError, match="build"):
        selector.attend(q[None], 299, k, v)
    selector.build(k, v)
    with pytest.raises(lodestone.InputError, match="build"):
        selector.attend(*put(q[None]), 299, *put(k, v))
    with pytest.raises(ValueError, match="300 tokens"):
        lodestone.Selector("topk", 8, 2, 64).attend(*put(q[None]), 299, *put(k[:, :200], v[:, :200]))


# ---- Others' arrays. ----


def torch_or_skip():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return torch


def torch_arrays(torch, tokens=4000, d=128):
    q, k, v = made_up(tokens=tokens, d=d)
    k, v = (torch.from_numpy(x).cuda().bfloat16() for x in (k, v))
    q = torch.from_numpy(q).cuda()
    want = reference(q.bfloat16().float().cpu().numpy(), k.float().cpu().numpy(), v.float().cpu().numpy())
    return q, k, v, want


def near(found, want):
    for part, expected in zip(found, want):
        np.testing.assert_allclose(part.float().cpu().numpy(), expected, atol=2e-2)


def test_torch_of_any_strides_on_a_stream_of_its_own():
    torch = torch_or_skip()
    q, k, v, want = torch_arrays(torch)
    spread = torch.zeros(4000, 2, 2, 128, dtype=torch.bfloat16, device="cuda")  # tokens, K or V, heads, d
    spread[:, 0], spread[:, 1] = k.transpose(0, 1), v.transpose(0, 1)
    odd = torch.zeros(2, 4001, 129, dtype=torch.bfloat16, device="cuda")[:, 1:, 1:]  # no row at a multiple of 16 bytes
    odd.copy_(k)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    kinds = {
        "side by side": (k, v), "tokens first": (k.transpose(0, 1).contiguous().transpose(0, 1), v.transpose(0, 1).contiguous().transpose(0, 1)),
        "together": (spread[:, 0].transpose(0, 1), spread[:, 1].transpose(0, 1)), "odd": (odd, v),
    }
    many = q[None].repeat(40, 1, 1)
    for name, (keys, values) in kinds.items():
        with torch.cuda.stream(stream):
            state = lodestone.attend(q, keys, values, stream=stream)
            near([torch.from_dlpack(part) for part in state], want)
            near([torch.from_dlpack(part)[-1] for part in lodestone.attend_causal(many, keys, values, stream=stream)], want)
        assert name
    with pytest.raises(ValueError, match="side by side"):
        lodestone.attend(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)


@pytest.mark.parametrize("spec", ["topk:k=100", "kmeans:probes=6", "streaming"])
def test_selectors_take_torch_on_a_stream_of_its_own(spec):
    torch = torch_or_skip()
    _, k, v, _ = torch_arrays(torch, tokens=6040, d=64)
    q = torch.randn(1, 8, 64, device="cuda").bfloat16().float()
    stream, out = torch.cuda.Stream(), torch.empty(1, 8, 64, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    selector = lodestone.Selector(f"{spec}{',' if ':' in spec else ':'}sink=4,window=64", 8, 2, 64)
    with torch.cuda.stream(stream):
        selector.build(k[:, :6000], v[:, :6000], stream=stream)
        assert selector.attend(q, 6030, k, v, stream=stream, out=out) is out
        sets = selector.select(q, 6030, k, v, stream=stream)
    stream.synchronize()
    rows = attended(sets, 0, 6030, selector, 2, 4)
    near([out[0]], reference(q[0].cpu().numpy(), k.float().cpu().numpy(), v.float().cpu().numpy(), rows)[:1])


def test_arrays_of_another_stream_are_waited_for():
    torch = torch_or_skip()
    q, k, v, want = torch_arrays(torch, tokens=200000)
    stream = torch.cuda.Stream()
    for _ in range(10):
        keys = k.float().mul(2).div(2).to(torch.bfloat16)  # in the current stream, which is another
        near([torch.from_dlpack(part) for part in lodestone.attend(q, keys, v, stream=stream)], want)
        stream.synchronize()


def test_torch_waits_for_what_fills_a_result():
    torch = torch_or_skip()
    q, k, v, want = torch_arrays(torch, tokens=200000)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        near([torch.from_dlpack(part) for part in lodestone.attend(q, k, v, stream=stream)], want)


def test_a_graph_captures_a_plan():
    torch = torch_or_skip()
    q, k, v, want = torch_arrays(torch)
    plan = lodestone.plan(np.array([0, 4000], np.int32), np.arange(4000, dtype=np.int32), 8, 2)
    batch, out = q[None].clone(), torch.zeros(1, 8, 128, device="cuda")
    stream = torch.cuda.Stream()
    with pytest.raises(lodestone.RunError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        plan.run(batch, k, v, stream=stream, out=out)
    torch.cuda.synchronize()
    plan.run(batch, k, v, stream=stream, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        plan.run(batch, k, v, stream=stream, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    near([out[0]], want[:1])


def test_torch_tensors_with_gradients_are_named():
    torch = torch_or_skip()
    q, k, v, _ = torch_arrays(torch)
    with pytest.raises(TypeError, match="q: expected"):
        lodestone.attend(q.requires_grad_(), k, v)


def test_cupy_and_its_streams():
    cupy = pytest.importorskip("cupy")
    q, k, v = made_up(tokens=3000, dtype=np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q_, k_, v_ = (cupy.asarray(x) for x in (q, k, v))
        output = cupy.from_dlpack(lodestone.attend(q_, k_, v_, stream=stream)[0])
        best = cupy.from_dlpack(lodestone.top_k(q_[0], 5, stream=stream))
        close([cupy.asnumpy(output)], reference(rounded(q, np.float16), k, v)[:1], np.float16)
        assert cupy.asnumpy(best).tolist() == lodestone.top_k(q[0], 5).tolist()
    with pytest.raises(ValueError, match="contiguous"):
        lodestone.attend(q_[:, ::-1], k_, v_)


def test_jax_and_its_freed_arrays():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    q, k, v = made_up(tokens=3000, dtype=np.float16)
    q_, k_, v_ = (jax.device_put(x) for x in (q, k, v))
    output, lse = lodestone.attend(q_, k_, v_)
    close([np.asarray(jax.dlpack.from_dlpack(output))], reference(rounded(q, np.float16), k, v)[:1], np.float16)
    close([lse.to_host()], reference(rounded(q, np.float16), k, v)[1:], np.float16)
    with pytest.raises(TypeError, match="out: expected"):
        lodestone.attend(q_, k_, v_, out=(jax.device_put(np.zeros((8, 64), np.float32)), lse))
    k_.delete()
    with pytest.raises(TypeError, match="k: expected"):
        lodestone.attend(q_, k_, v_)


def test_documents_lie_and_are_asked_on_the_gpu(tmp_path):
    text = " ".join(f"The number of house {i} is {7 * i % 1000}." for i in range(400))
    host, gpu = lodestone.Model(POCKET), lodestone.Model(POCKET, device="cuda")
    assert (host.device, gpu.device) == ("cpu", "cuda")
    specs = ["kmeans:probes=1024", "topk:k=64"]
    there = lodestone.Document.read(gpu, text, specs=specs, kv_type="bf16")
    assert there.ask("What is the number of house 17?", attention="full").ending in ("stop", "length")
    assert len(there.ask("What is the number of house 17?", attention="topk:k=64", sources=True).sources) > 0
    here = lodestone.Document.read(host, text, kv_type="bf16")
    one, other = (lodestone.Sequence(d, "full").forward(host.encode(" house")) for d in (there, here))
    np.testing.assert_allclose(one, other, atol=0.3)  # bf16 products in another order
    everything = lodestone.Sequence(there, specs[0]).forward(host.encode(" house"))
    np.testing.assert_allclose(everything, one, atol=0.05)
    there.save(tmp_path / "there.lode")
    again = lodestone.Document.load(tmp_path / "there.lode", gpu)
    first, second = (d.ask("What is the number of house 17?", attention="full").tokens for d in (there, again))
    assert first == second
    with pytest.raises(lodestone.InputError, match="found one on a GPU"):
        there.kv(0)
    with pytest.raises(lodestone.InputError, match="found one on a GPU"):
        lodestone.Document.from_keys(gpu, [1], [], [])
