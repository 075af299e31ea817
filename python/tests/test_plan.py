# SPDX-License-Identifier: Apache-2.0
"""Planned attention, log-sum-exps and merging against NumPy in float64."""

import numpy as np
import pytest

import lodestone

SHAPES = pytest.mark.parametrize(("group", "d"), [(1, 64), (4, 64), (1, 128), (4, 128)])


def oracle(q, k, v, lists, scale=None, weights=None):
    """q [B, Hq, d], k and v [Hkv, S, d], rows of each token and query head -> output and log-sum-exp in float64."""
    tokens, heads, d = q.shape
    out, lse = np.zeros(q.shape), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        for h in range(heads):
            rows = lists[t][h]
            if len(rows) == 0:
                continue
            kv_head = h * len(k) // heads
            s = k[kv_head, rows].astype(np.float64) @ q[t, h].astype(np.float64) * (d**-0.5 if scale is None else scale)
            if weights is not None:
                s = s + weights[t][h]
            w = np.exp(s - s.max())
            out[t, h], lse[t, h] = w @ v[kv_head, rows].astype(np.float64) / w.sum(), s.max() + np.log(w.sum())
    return out, lse


def made_up(group, d, tokens, rows=600, kv_heads=2, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, kv_heads * group, d), dtype=np.float32)
    k, v = (rng.standard_normal((kv_heads, rows, d), dtype=np.float32).astype(dtype) for _ in "kv")
    return q, k, v


def csr(lists):
    """Lists of rows -> indptr and indices."""
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return indptr, np.concatenate([np.asarray(rows, np.int32) for rows in lists] or [np.zeros(0, np.int32)])


def expect(state, want, atol=2e-5):
    np.testing.assert_allclose(state[0], want[0], atol=atol)
    np.testing.assert_allclose(state[1], want[1], atol=atol)


RAGGED = [[], [17], range(600), range(5, 580, 3), [*range(40, 90), 3, 599, 200]]


@SHAPES
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ragged_lists_match_float64(group, d, dtype):
    """No key, one key, all keys, scattered keys, runs and rows out of order."""
    q, k, v = made_up(group, d, len(RAGGED), dtype=dtype)
    plan = lodestone.plan(*csr(RAGGED), 2 * group, 2)
    assert (plan.tokens, plan.rows, plan.query_heads, plan.kv_heads) == (5, 600, 2 * group, 2)
    out, lse = plan.run(q, k, v, return_lse=True)
    expect((out, lse), oracle(q, k, v, [[list(rows)] * 2 * group for rows in RAGGED]))
    assert np.all(out[0] == 0) and np.all(np.isneginf(lse[0]))
    np.testing.assert_allclose(out[1], np.repeat(v[:, 17], group, axis=0), atol=1e-6)  # one key's value
    np.testing.assert_array_equal(plan.run(q, k, v), out)


@SHAPES
@pytest.mark.parametrize("per", ["kv_heads", "query_heads"])
def test_heads_with_lists_of_their_own(group, d, per):
    q, k, v = made_up(group, d, 3)
    rng = np.random.default_rng(1)
    count = 2 if per == "kv_heads" else 2 * group
    lists = [[rng.choice(600, rng.integers(0, 300), replace=False) for _ in range(count)] for _ in range(3)]
    plan = lodestone.plan(*csr([rows for token in lists for rows in token]), 2 * group, 2, lists_per_token=count)
    want = oracle(q, k, v, [[token[h * count // (2 * group)] for h in range(2 * group)] for token in lists])
    expect(plan.run(q, k, v, return_lse=True), want)


@SHAPES
def test_pages_are_rows(group, d):
    """Two requests in one pool of pages of 16, as FlashInfer's paged cache has them, and one without a page."""
    q, k, v = made_up(group, d, 3)
    indptr, pages, last = np.int32([0, 4, 4, 7]), np.int32([9, 2, 30, 11, 4, 5, 0]), np.int32([3, 1, 16])
    plan = lodestone.plan(indptr, pages, 2 * group, 2, page_size=16, last_page_len=last)
    rows = [[page * 16 + i for page in pages[a:b] for i in range(16)][: (b - a - 1) * 16 + size] for a, b, size in [(0, 4, 3), (4, 4, 0), (4, 7, 16)]]
    assert plan.rows == 31 * 16
    expect(plan.run(q, k, v, return_lse=True), oracle(q, k, v, [[r] * 2 * group for r in rows]))


@SHAPES
def test_runs_are_rows(group, d):
    q, k, v = made_up(group, d, 2)
    runs = np.int32([[400, 600], [0, 4], [50, 50], [7, 8]])
    plan = lodestone.plan(np.int32([0, 3, 4]), runs, 2 * group, 2)
    want = oracle(q, k, v, [[[*range(4), *range(400, 600)]] * 2 * group, [[7]] * 2 * group])
    expect(plan.run(q, k, v, return_lse=True), want)


@SHAPES
def test_equal_scores_give_the_mean(group, d):
    q, k, v = made_up(group, d, 2)
    k[:] = k[:, :1]
    out, lse = lodestone.plan(*csr([range(600), [3, 1]]), 2 * group, 2).run(q, k, v, return_lse=True)
    scores = np.einsum("thd,hd->th", q, np.repeat(k[:, 0], group, axis=0)) * d**-0.5
    np.testing.assert_allclose(lse, scores + np.log([[600], [2]]), atol=2e-5)
    np.testing.assert_allclose(out, np.repeat([v.mean(axis=1), v[:, [1, 3]].mean(axis=1)], group, axis=1), atol=2e-5)


@SHAPES
@pytest.mark.parametrize("size", [1e3, -1e3, 1e30])
def test_huge_logits_stay_finite(group, d, size):
    """Scores are of this size, far beyond what exp() can take; float32 has 24 bits of them."""
    q, k, v = made_up(group, d, 1)
    scale = abs(size) / d
    if size < 0:
        k[:] = -np.abs(k)
        q[:] = np.abs(q)
    out, lse = lodestone.plan(*csr([range(600)]), 2 * group, 2).run(q, k, v, scale=scale, return_lse=True)
    want, want_lse = oracle(q, k, v, [[range(600)] * 2 * group], scale=scale)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    np.testing.assert_allclose(out, want, atol=2e-3 if abs(size) < 1e4 else 1e-5)


@SHAPES
def test_log_weights_are_added_to_scores(group, d):
    q, k, v = made_up(group, d, 2)
    rng = np.random.default_rng(2)
    rows = [rng.permutation(600)[:200], np.arange(100)]
    weights = rng.standard_normal(300, dtype=np.float32)
    weights[rng.choice(300, 100)] = 0
    plan = lodestone.plan(*csr(rows), 2 * group, 2, log_weights=weights)
    want = oracle(q, k, v, [[r] * 2 * group for r in rows], weights=[[weights[:200]] * 2 * group, [weights[200:]] * 2 * group])
    expect(plan.run(q, k, v, return_lse=True), want)


@SHAPES
def test_parts_merge_to_the_whole(group, d):
    q, k, v = made_up(group, d, len(RAGGED))
    heads, whole = 2 * group, [sorted(rows) for rows in RAGGED]
    states = [lodestone.plan(*csr([rows[part::3] for rows in whole]), heads, 2).run(q, k, v, return_lse=True) for part in range(3)]
    merged = lodestone.merge(*states)
    expect(merged, lodestone.plan(*csr(whole), heads, 2).run(q, k, v, return_lse=True))
    expect(merged, oracle(q, k, v, [[rows] * heads for rows in whole]))
    np.testing.assert_array_equal(merged[0], lodestone.merge(lodestone.merge(*states[:2]), states[2])[0])
    for state in states:  # arguments stay as they are
        assert np.all(np.isneginf(state[1][0]))


def test_merge_takes_one_shape_of_states():
    a = (np.zeros((3, 2, 4), np.float32), np.zeros((3, 2), np.float32))
    for b in [(a[0], a[1][0]), (a[0][:2], a[1][:2]), (a[0][:, :, :2], a[1]), (a[0][0], a[1][0])]:
        with pytest.raises(ValueError, match="state 1: expected"):
            lodestone.merge(a, b)
    with pytest.raises(TypeError, match="expected"):
        lodestone.merge(a, a, 3)
    with pytest.raises(ValueError, match="expected"):
        lodestone.merge((np.float32(1)[...], np.float32(1)[...]), a)


@SHAPES
@pytest.mark.parametrize("spec", ["kmeans:probes=3", "topk:k=20", "quest:budget=64", "streaming"])
def test_a_selector_gives_the_log_sum_exp_of_what_it_attends(group, d, spec):
    sink, window, tokens, rows = 2, 30, 3, 600
    q, k, v = made_up(group, d, tokens, rows)
    begin = rows - tokens
    selector = lodestone.Selector(f"{spec}{',' if ':' in spec else ':'}sink={sink},window={window}", 2 * group, 2, d)
    selector.build(k[:, :begin], v[:, :begin])
    out, lse = selector.attend(q, begin, k, v, return_lse=True)
    lists = [[list(range(sink)) + list(range(begin + t + 1 - window, begin + t + 1)) for _ in range(2 * group)] for t in range(tokens)]
    for _, heads, first, last, far, _ in selector.select(q, begin, k, v):
        for t in range(first, last):
            for h in heads:
                lists[t][h] += [row for row in far.tolist() if row <= begin + t - window]
    expect((out, lse), oracle(q, k, v, lists))
    np.testing.assert_array_equal(selector.attend(q, begin, k, v), out)
    np.testing.assert_array_equal(selector.attend(q, begin, k, v, return_lse=False), out)


@pytest.mark.parametrize("group", [1, 4])
def test_what_a_selector_chose_runs_as_a_plan(group):
    """Chosen keys planned apart from sink and window, then merged, are the selector's own attention."""
    q, k, v = made_up(group, 64, 1)
    selector = lodestone.Selector("kmeans:probes=3,sink=2,window=30", 2 * group, 2, 64)
    selector.build(k[:, :599], v[:, :599])
    chosen = {head: rows for head, _, _, _, rows, _ in selector.select(q, 599, k, v)}
    far = lodestone.plan(*csr([chosen[0], chosen[1]]), 2 * group, 2, lists_per_token=2)
    near = lodestone.plan(np.int32([0, 2]), np.int32([[0, 2], [570, 600]]), 2 * group, 2)
    merged = lodestone.merge(*(plan.run(q, k, v, return_lse=True) for plan in (far, near)))
    expect(merged, selector.attend(q, 599, k, v, return_lse=True))


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    q, k, v = made_up(4, 64, len(RAGGED))
    together = lodestone.plan(*csr(RAGGED), 8, 2).run(q, k, v)
    for t, rows in enumerate(RAGGED):
        np.testing.assert_array_equal(lodestone.plan(*csr([rows]), 8, 2).run(q[t : t + 1], k, v)[0], together[t])


def test_a_plan_serves_many_layers_and_the_empty_step():
    q, k, v = made_up(4, 64, 2)
    plan = lodestone.plan(*csr([[1, 5], [2]]), 8, 2)
    for seed in range(3):
        q, k, v = made_up(4, 64, 2, rows=6 + seed, seed=seed)
        expect(plan.run(q, k, v, return_lse=True), oracle(q, k, v, [[[1, 5]] * 8, [[2]] * 8]))
    none = lodestone.plan(*csr([]), 8, 2)
    assert none.tokens == 0 and none.run(q[:0], k, v).shape == (0, 8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": [0, 2]}, "indptr that rises"),
        ({"indptr": [1, 3]}, "indptr that rises"),
        ({"indptr": [0, 4, 3]}, "indptr that rises"),
        ({"indptr": []}, "indptr of a multiple"),
        ({"indices": [1, 2, 1]}, "row 1 twice"),
        ({"indices": [1, 2, -1]}, "0 or more"),
        ({"indices": [1, 2, 2**31 - 1], "page_size": 2}, "0 or more"),
        ({"indices": [[0, 5], [4, 6], [8, 9]]}, "row 4 twice"),
        ({"indices": [[0, 5], [7, 6], [8, 9]]}, "runs from"),
        ({"indices": [[-1, 5], [6, 7], [8, 9]]}, "runs from"),
        ({"indices": [[0, 5], [6, 7], [8, 9]], "page_size": 2}, "either runs alone"),
        ({"indices": [[0, 5, 6]] * 3}, "pages .n. or runs"),
        ({"page_size": 0}, "1 row or more"),
        ({"page_size": 4, "last_page_len": [5]}, "1 to 4 rows"),
        ({"page_size": 4, "last_page_len": [0]}, "1 to 4 rows"),
        ({"page_size": 4, "last_page_len": [1, 1]}, "each of 1 lists"),
        ({"log_weights": np.float32([0, 1])}, "each of 3 pages"),
        ({"log_weights": np.float32([0, 1, np.nan])}, "finite"),
        ({"lists_per_token": 3}, "lists a token"),
        ({"lists_per_token": 2}, "indptr of a multiple"),
        ({"query_heads": 7}, "multiple of the KV heads"),
        ({"kv_heads": 0}, "multiple of the KV heads"),
    ],
)
def test_wrong_lists_are_named(change, message):
    given = {"indptr": [0, 3], "indices": [1, 2, 4], "query_heads": 8, "kv_heads": 2} | change
    given |= {name: np.array(given[name], np.int32) for name in ("indptr", "indices", "last_page_len") if name in given}
    with pytest.raises(ValueError, match=message):
        lodestone.plan(**given)


def test_wrong_arrays_are_named():
    q, k, v = made_up(4, 64, 1)
    with pytest.raises(TypeError, match="indices: expected int32"):
        lodestone.plan(np.int32([0, 1]), np.array([1]), 8, 2)
    plan = lodestone.plan(np.int32([0, 1]), np.int32([599]), 8, 2)
    for wrong in [(q[:, :4], k, v), (q[0], k, v), (q, k[:, :599], v[:, :599]), (q, k[:1], v[:1]), (q[:, :, :32].copy(), k, v)]:
        with pytest.raises(ValueError, match="expected"):
            plan.run(*wrong)
    with pytest.raises(TypeError, match="float32"):
        plan.run(q.astype(np.float64), k, v)
