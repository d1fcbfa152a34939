"""Attention over chosen chunks against its step-by-step definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrecall.ops import selected_attention
from longrecall.ops.retrieval import op as retrieval
from longrecall.ops.retrieval import reference as reference_retrieval

B, P = 2, 5


def inputs(
    length: int,
    chunk: int,
    columns: int,
    chosen: int,
    *,
    heads: tuple[int, int] = (4, 2),
    weighted: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> list[Any]:
    """q, k, v, chunks, weights and chunk; every query has other chunks, some have fewer, the first has none."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    whole = columns // chunk
    order = torch.rand(B, length, max(whole, 1), generator=g).argsort(-1)[..., :chosen]
    chunks = order.masked_fill(torch.rand(order.shape, generator=g) < 0.2, -1)
    chunks[:, :1] = -1
    weights = 2 * randn(*chunks.shape) if weighted else None
    q, k, v = randn(B, length, heads[0], P), randn(B, columns, heads[1], P), randn(B, columns, heads[1], P)
    return [q, k, v, chunks if whole else chunks * 0 - 1, weights, chunk]


def outcome(function: Any, arguments: list[Any]) -> list[Tensor]:
    """The output and the gradient of every floating-point input, for an output gradient that tells positions apart."""
    tensors = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    out = function(*tensors)
    leaves = [x for x in tensors if torch.is_tensor(x) and x.requires_grad]
    ramp = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    # Where no query has a chunk the output depends on nothing.
    total = (out.double() * ramp).sum() + 0 * sum(x.double().sum() for x in leaves)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True))]


def definition(q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int) -> Tensor:
    return reference_retrieval.selected_attention(q, k, v, chunks, weights, chunk, P**-0.5)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 9),
    chunk=st.integers(1, 4),
    columns=st.integers(0, 14),
    chosen=st.integers(1, 4),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    weighted=st.booleans(),
    block=st.sampled_from([1, 200, 1 << 20]),
)
def test_blocks_compute_the_definition_with_every_gradient(
    length: int, chunk: int, columns: int, chosen: int, heads: tuple[int, int], weighted: bool, block: int
) -> None:
    arguments = inputs(length, chunk, columns, chosen, heads=heads, weighted=weighted)
    expected = outcome(definition, arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(retrieval.GATHERED_NUMBERS, "cpu", block)
        found = outcome(selected_attention, arguments)
    for a, b in zip(found, expected, strict=True):
        # float64 sums of at most 16 terms of magnitude 1 to 10 in another order.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def crowded(choice: str, weighted: bool, kv_heads: int = 2, columns: int = 9) -> list[Any]:
    """Forty queries of four chunks of two tokens: enough that queries of one chunk stand together in blocks."""
    arguments = inputs(40, 2, columns, 2, heads=(4, kv_heads), weighted=weighted)
    if choice == "one chunk":
        arguments[3] = torch.stack([torch.full((B, 40), 2), torch.full((B, 40), -1)], -1)
    elif choice == "not the last":
        arguments[3] = arguments[3].masked_fill(arguments[3] == 3, -1)
    elif choice == "one row":
        arguments[3][1] = -1
    return arguments


@pytest.mark.parametrize("choice", ["any", "one chunk", "not the last", "one row"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("weighted", [True, False])
def test_queries_that_share_chunks_get_the_definition(choice: str, kv_heads: int, weighted: bool) -> None:
    arguments = crowded(choice, weighted, kv_heads)
    pairs = retrieval._group(arguments[3], 4)
    assert pairs.query.shape[1] == 4, "four queries a block, or this test shows nothing"
    assert int(pairs.filled.sum()) == int((arguments[3] >= 0).sum())
    for a, b in zip(outcome(selected_attention, arguments), outcome(definition, arguments), strict=True):
        # float64 sums over at most 80 choices of terms of magnitude 1 to 10, in another order.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("empty", ["rows", "queries"])
def test_nothing_asked_gives_nothing_and_zero_gradients(empty: str) -> None:
    q, k, v, chunks, weights, chunk = inputs(4, 2, 8, 2)
    if empty == "rows":
        q, k, v, chunks, weights = (y[:0] for y in (q, k, v, chunks, weights))
    else:
        q, chunks, weights = q[:, :0], chunks[:, :0], weights[:, :0]
    out, *gradients = outcome(selected_attention, [q, k, v, chunks, weights, chunk])
    assert out.shape == q.shape
    for gradient, like in zip(gradients, (q, k, v, weights), strict=True):
        assert gradient.shape == like.shape and not gradient.any()


@pytest.mark.parametrize("weighted", [True, False])
def test_what_no_query_chose_reaches_no_result_and_no_gradient(weighted: bool) -> None:
    q, k, v, chunks, weights, chunk = crowded("not the last", weighted)
    poisoned = [torch.cat([y[:, :6], torch.full_like(y[:, 6:], torch.nan)], 1) for y in (k, v)]
    expected = outcome(selected_attention, [q, k, v, chunks, weights, chunk])
    found = outcome(selected_attention, [q, *poisoned, chunks, weights, chunk])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_huge_logits_stay_finite_and_follow_the_largest() -> None:
    q, k, v, chunks, weights, chunk = inputs(6, 2, 12, 3)
    arguments = [1e4 * q, k, v, chunks, None if weights is None else 1e4 * weights, chunk]
    expected = outcome(definition, arguments)
    for a, b in zip(outcome(selected_attention, arguments), expected, strict=True):
        assert bool(torch.isfinite(a).all())
        # Logits of 1e5 have an absolute rounding of 1e-11, which is the relative one of their exponentials.
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_query_without_chunks_gets_zero_and_gives_no_gradient() -> None:
    q, k, v, chunks, _, chunk = inputs(4, 2, 8, 2)
    for weights in (None, torch.zeros(chunks.shape, dtype=torch.float64)):
        out, *gradients = outcome(selected_attention, [q, k, v, torch.full_like(chunks, -1), weights, chunk])
        assert all(bool((x == 0).all()) for x in (out, *gradients))


def test_tokens_of_other_chunks_and_of_the_last_part_are_never_read() -> None:
    q, k, v, _, weights, chunk = inputs(3, 4, 14, 1)
    chunks = torch.tensor([0, 2, 0]).expand(B, 3)[..., None]
    unread = torch.tensor([False] * 4 + [True] * 4 + [False] * 4 + [True] * 2)
    arguments = [q, k, v, chunks, weights, chunk]
    poisoned = [y.masked_fill(unread[:, None, None], torch.nan) for y in (k, v)]
    expected = selected_attention(*arguments)
    assert torch.equal(selected_attention(q, *poisoned, *arguments[3:]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_close_to_the_definition(dtype: torch.dtype) -> None:
    arguments = inputs(20, 4, 40, 4, dtype=dtype)
    exact = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    found, expected = outcome(selected_attention, arguments), outcome(definition, exact)
    for a, b, like in zip(found, expected, [arguments[2], *arguments[:3], arguments[4]], strict=True):
        assert a.dtype == like.dtype
        # The result and the shares are rounded, and sums of 16 products of rounded factors: 8 units in the last place.
        assert (a.double() - b).abs().max() < 8 * torch.finfo(dtype).eps * max(1.0, float(b.abs().max()))


def test_autocast_does_not_lower_the_softmax() -> None:
    arguments = inputs(20, 4, 40, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = selected_attention(*arguments)
    assert torch.equal(inside, selected_attention(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(B, 8, 2, 4)}, r"k and v must agree.*k \[2, 8, 2, 4\]"),
        ({"k": torch.zeros(B, 8, 3, P), "v": torch.zeros(B, 8, 3, P)}, "the 3 key heads must divide the 4 query heads"),
        ({"chunks": torch.zeros(B, 3, 2, dtype=torch.long)}, r"chunks \[2, 3, 2\]"),
        ({"chunks": torch.zeros(B, 4, 2)}, "chunks must be integers"),
        ({"weights": torch.zeros(B, 4, 1)}, "weights None or of their shape"),
        ({"chunk": 0}, "at least one token; got 0"),
        ({"q": torch.zeros(4, 4, P)}, r"must be \[B, T, H, P\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    names = ("q", "k", "v", "chunks", "weights", "chunk")
    arguments = dict(zip(names, inputs(4, 2, 8, 2), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        selected_attention(*arguments.values())
