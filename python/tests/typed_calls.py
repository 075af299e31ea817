# SPDX-License-Identifier: Apache-2.0
"""What type checkers know of calls; read by mypy --strict, never run."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import lodestone
import lodestone.cuda

Floats = NDArray[np.float32]


def kernels(q: Floats, k: Floats, v: Floats, rows: NDArray[np.int32]) -> None:
    plan = lodestone.plan(rows, rows, query_heads=8, kv_heads=2, page_size=16, last_page_len=rows)
    assert_type(plan, lodestone.Plan)
    assert_type(plan.run(q, k, v), Floats)
    assert_type(plan.run(q, k, v, return_lse=False), Floats)
    state = plan.run(q, k, v, scale=0.1, return_lse=True)
    assert_type(state, tuple[Floats, Floats])
    assert_type(lodestone.merge(state, state, lodestone.attend(q[0], k, v), state), tuple[Floats, Floats])


def on_gpu(q: lodestone.CudaArray, k: lodestone.ArrayLike, v: lodestone.ArrayLike, plan: lodestone.Plan) -> None:
    state = lodestone.attend(q, k, v, stream=7)
    assert_type(state, tuple[lodestone.CudaArray, lodestone.CudaArray])
    assert_type(lodestone.merge(state, state, stream=None), tuple[lodestone.CudaArray, lodestone.CudaArray])
    assert_type(plan.run(q, k, v, return_lse=True), tuple[lodestone.CudaArray, lodestone.CudaArray])
    assert_type(plan.run(q, k, v), lodestone.CudaArray)
    assert_type(lodestone.top_k(q, 3), lodestone.CudaArray)
    assert_type(lodestone.cuda.to_device(state[0].to_host()), lodestone.CudaArray)


def of_others(q: lodestone.ArrayLike, k: lodestone.ArrayLike, v: lodestone.ArrayLike, plan: lodestone.Plan) -> None:
    output = lodestone.attend(q, k, v)[0]  # a NumPy array or a CudaArray
    print(output.shape, plan.run(q, k, v, out=q), lodestone.attend_causal(q, k, v, out=(q, v)))


def selectors(q: Floats, k: Floats, v: Floats) -> None:
    selector = lodestone.Selector("kmeans", 8, 2, 64)
    assert_type(selector.attend(q, 0, k, v), Floats)
    assert_type(selector.attend(q, 0, k, v, return_lse=True), tuple[Floats, Floats])
    for _, heads, _, _, rows, weights in selector.select(q, 0, k, v):
        assert_type(heads, list[int])
        assert_type(rows, NDArray[np.int32])
        assert_type(weights, Floats | None)


def selectors_on_gpu(q: lodestone.CudaArray, k: lodestone.ArrayLike, v: lodestone.ArrayLike) -> None:
    selector = lodestone.Selector("kmeans", 8, 2, 64)
    selector.build(k, v, stream=7)
    assert_type(selector.attend(q, 0, k, v, stream=7), lodestone.CudaArray)
    assert_type(selector.attend(q, 0, k, v, return_lse=True), tuple[lodestone.CudaArray, lodestone.CudaArray])
    for *_, rows, weights in selector.select(q, 0, k, v, stream=7):
        print(rows, weights)
    lodestone.finish([selector], [k], [v], stream=7)


def documents(model: lodestone.Model) -> None:
    document = lodestone.Document.read(model, "text", specs=["kmeans"])
    answer = document.ask("Who?", stream=True)
    for piece in answer:
        assert_type(piece, str)
    assert_type(answer.work.density, float)
    assert_type(answer.sources, list[lodestone.Citation])
    assert_type(lodestone.Sequence(document).forward([1]), Floats)
    talk = lodestone.Document.read(model, "text", chat=True, system="Be brief.", document_role="system", think="off")
    assert_type(talk.chat, bool)
    assert_type(talk.ask("Who?", chat=None, think="on", max_thought_tokens=64, after=answer).thoughts, str)
    talk.save("text.lode", overwrite=True)
