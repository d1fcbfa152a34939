"""Kernels of one decoding step, each against a few lines of torch; Triton's interpreter runs them here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

launch = pytest.importorskip("longrecall.ops.kernels.launch")

from longrecall.layers.tokens import EMBEDDING_EPS  # noqa: E402
from longrecall.ops.decoding.triton import products as small_products  # noqa: E402
from longrecall.ops.decoding.triton import recurrence as decoding_recurrence  # noqa: E402
from longrecall.ops.decoding.triton import retrieval as retrieval_decoding  # noqa: E402
from longrecall.ops.decoding.triton.recurrence import Gate, recurrence  # noqa: E402
from longrecall.ops.retrieval.reference import selected_attention  # noqa: E402

DEVICE = "cpu" if launch.interpreting() else "cuda"
pytestmark = (
    []
    if launch.interpreting()
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expected_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, gate: Gate, share: int, beta: Tensor | None,
    *, normalise: bool = True, skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The step in float64: q, k ``[B, G, K]``, v ``[B, Hv, V]`` -> o ``[B, H, V]`` and the new state."""
    heads, repeats = state.shape[1], state.shape[1] // q.shape[1]
    q, k, v, S = (x.double() for x in (q, k, v, state))
    # Head h: key head h // repeats; of its heads the subheads share their values.
    value = [(h // (share * repeats)) * repeats + h % repeats for h in range(heads)]
    q, k, v = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1), v[:, [x % v.shape[1] for x in value]]
    written = v
    if gate.kind == "channel":
        assert gate.raw is not None
        rate = gate.raw.double().unflatten(1, (-1, q.shape[2])).repeat_interleave(repeats, 1)
        S = S * torch.exp(F.logsigmoid(rate) / gate.divisor)[..., None]
    elif gate.kind == "fixed":
        assert gate.raw is not None
        S = S * gate.raw.double().exp()[:, None, None]
    elif gate.kind is not None:
        assert gate.raw is not None and gate.bias is not None and gate.A_log is not None
        step = F.softplus(gate.raw.double() + gate.bias.double())
        if gate.kind == "step":
            step = step.clamp(gate.low, gate.high)
            written = v * step[..., None]
        S = S * torch.exp(-gate.A_log.double().exp() * step)[..., None, None]
    if beta is not None:
        if normalise:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        written = torch.sigmoid(beta.double())[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, S))
    S = S + k[..., None] * written[..., None, :]
    y = 0.3 * torch.einsum("bhk,bhkv->bhv", q, S)
    return y if skip is None else y + skip.double()[:, None] * v, S


@pytest.mark.parametrize("counts", [[5], [3, 1, 20], [8, 9, 1, 17, 2, 16, 4, 7, 5, 6]], ids=len)
def test_projections_of_the_normed_stream(counts: list[int]) -> None:
    """One launch for up to nine weights, each of any number of rows."""
    x, norm = randn(1, 2, 24), 1 + randn(2, 24)
    weights = [randn(3 + index, count, 24) for index, count in enumerate(counts)]
    found = small_products.norm_and_project(x, norm, 1e-6, weights)
    normed = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * norm).double()
    for y, weight in zip(found, weights, strict=True):
        # float32 sums of 24 products in another order.
        torch.testing.assert_close(y.double(), normed @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "delta", "key_heads", "value_heads", "share"),
    [
        ("channel", False, 3, 3, 1),
        ("fixed", False, 3, 3, 1),
        (None, False, 3, 1, 1),
        ("step", False, 1, 6, 1),
        ("delta", True, 3, 3, 1),
        ("delta", True, 4, 4, 2),
        (None, True, 3, 6, 1),
        ("channel", True, 3, 3, 1),
    ],
)
def test_a_step_in_place(kind: str | None, delta: bool, key_heads: int, value_heads: int, share: int) -> None:
    """Odd sizes: blocks of keys and values that end inside a tile."""
    rows, K, V = 2, 20, 21
    heads = max(key_heads, value_heads)
    q, k, v = randn(1, rows, key_heads, K), randn(2, rows, key_heads, K), randn(3, rows, value_heads // share, V)
    raw = randn(4, heads) if kind == "fixed" else randn(4, rows, key_heads * K if kind == "channel" else heads)
    raw = -raw.abs() if kind == "fixed" else raw
    parameters = (randn(5, heads), randn(6, heads)) if kind in ("delta", "step") else (None, None)
    gate = Gate(kind, None if kind is None else raw, *parameters, divisor=8.0, low=0.2, high=1.5)
    beta = randn(7, rows, heads) if delta else None
    state = randn(8, rows, heads, K, V)
    y, S = expected_step(q, k, v, state, gate, share, beta)
    before = state.clone()
    found = recurrence(
        q.flatten(1), k.flatten(1), v.flatten(1), state, gate,
        scale=0.3, key_heads=key_heads, value_heads=value_heads // share, share=share, beta=beta, normalise=delta,
        tile=(32, 16, 4) if delta else (16, 16, 2),
    )  # fmt: skip
    # Sums of 20 float32 terms and a GPU's exponentials against float64.
    torch.testing.assert_close(found.double(), y, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state.double(), S, rtol=2e-5, atol=2e-5)
    assert not torch.equal(state, before)


@pytest.mark.parametrize("delta", [True, False])
def test_a_state_in_bfloat16(delta: bool) -> None:
    rows, heads, K, V = 1, 2, 16, 16
    q, k, v = (randn(seed, rows, heads, K) for seed in (1, 2, 3))
    gate, beta = Gate("channel", randn(4, rows, heads * K), divisor=8.0), randn(5, rows, heads) if delta else None
    state = randn(6, rows, heads, K, V).bfloat16()
    y, S = expected_step(q, k, v, state, gate, 1, beta)
    found = recurrence(
        q.flatten(1), k.flatten(1), v.flatten(1), state, gate,
        scale=0.3, key_heads=heads, value_heads=heads, beta=beta, normalise=delta,
    )  # fmt: skip
    # What is read out is float32 of the state as it was; what is kept loses all but 8 bits, cut off by the interpreter.
    torch.testing.assert_close(found.double(), y, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state.double(), S, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "delta", "rows", "K", "V"),
    [
        ("channel", False, 1, 1, 1),
        ("channel", False, 1, 300, 65),
        ("step", False, 3, 33, 17),
        ("delta", True, 1, 1, 1),
        ("delta", True, 3, 20, 5),
        ("delta", True, 1, 66, 3),
        ("channel", True, 1, 34, 17),
    ],
)
def test_a_step_of_its_own_tiles_in_any_dtype(
    kind: str, delta: bool, rows: int, K: int, V: int, dtype: torch.dtype
) -> None:
    heads = 2
    q, k, v = randn(1, rows, heads, K), randn(2, rows, heads, K), randn(3, rows, heads, V)
    raw = 4 * randn(4, rows, heads * K if kind == "channel" else heads)
    parameters = (None, None) if kind == "channel" else (randn(5, heads), randn(6, heads))
    gate = Gate(kind, raw, *parameters, divisor=8.0, high=1.5)
    beta = randn(7, rows, heads) if delta else None
    state = randn(8, rows, heads, K, V).to(dtype)
    y, S = expected_step(q, k, v, state, gate, 1, beta)
    found = recurrence(
        q.flatten(1), k.flatten(1), v.flatten(1), state, gate,
        scale=0.3, key_heads=heads, value_heads=heads, beta=beta, normalise=delta,
    )  # fmt: skip
    # Float32 sums of up to 300 terms; what is kept loses what the dtype has not, cut off by the interpreter.
    torch.testing.assert_close(found.double(), y, rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(state.double(), S, rtol=max(torch.finfo(dtype).eps, 2e-5), atol=2e-5)


def test_gates_of_any_size() -> None:
    """Decays and steps that are almost 0 or 1: a small step is right to float32's precision, not only absolutely."""
    raw = torch.tensor([-80.0, -30.0, -12.0, -3.0, -0.1, 0.0, 0.3, 5.0, 19.0, 40.0, 85.0, 100.0], device=DEVICE)
    heads = len(raw)
    none = torch.zeros(heads, device=DEVICE)
    one = torch.ones(1, heads, device=DEVICE)
    state = torch.zeros(1, heads, 1, 1, device=DEVICE)
    gate = Gate("step", raw[None], none, none)
    recurrence(one[:, :1], one[:, :1], one, state, gate, scale=1.0, key_heads=1, value_heads=heads)
    # What is written is the step alone. Exponentials of a GPU: 2^-22 and what rounds in arguments up to 80 * log2 e.
    torch.testing.assert_close(state.flatten().double(), F.softplus(raw.double()), rtol=2e-5, atol=0)
    state = torch.ones(1, heads, 1, 1, device=DEVICE)
    gate = Gate("channel", raw[None], divisor=2.0)
    recurrence(one, 0 * one, one, state, gate, scale=1.0, key_heads=heads, value_heads=heads)
    torch.testing.assert_close(state.flatten().double(), torch.sigmoid(raw.double()).sqrt(), rtol=2e-5, atol=0)


def test_tiles_by_width_and_number_of_states() -> None:
    tile = decoding_recurrence._tile
    assert tile(256, 512, delta=False, few=True) == (256, 16, 4)
    assert tile(256, 512, delta=False, few=False) == tile(512, 64, delta=False, few=False) == (256, 64, 4)
    # Few numbers to hold: fewer warps have less to add up across them.
    assert tile(128, 64, delta=False, few=False) == (128, 64, 2)
    assert tile(20, 21, delta=False, few=False) == (32, 32, 2)
    # The delta rule holds all keys of a head, and 32 KiB of float32 at most.
    assert tile(128, 128, delta=True, few=True) == (128, 16, 4)
    assert tile(128, 128, delta=True, few=False) == (128, 64, 2)
    assert tile(1024, 128, delta=True, few=False) == (1024, 16, 4)


CHUNK, WIDTH, ROOM = 3, 10, 400


def retrieved(position: list[int]) -> dict[str, Any]:
    rows = len(position)
    read = torch.arange(ROOM) <= torch.tensor(position)[:, None]
    ids = torch.randint(0, 50, (rows, ROOM), generator=torch.Generator().manual_seed(1))
    return {
        "table": randn(11, 50, WIDTH),
        "tokens": torch.where(read, ids, -1).int().to(DEVICE),
        "position": torch.tensor(position, device=DEVICE),
        "weight": randn(12, 6, WIDTH),
        "vectors": F.normalize(randn(13, rows, ROOM // CHUNK, 6), dim=-1),
        "queries": randn(14, rows, 6),
    }


@pytest.mark.parametrize(("candidates", "count"), [(8, 4), (5, 5), (13, 9), (1, 1)])
@pytest.mark.parametrize("weighted", [True, False])
def test_chunks_are_chosen_and_read(
    candidates: int, count: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows before the first chunk's end, with fewer chunks than are read, and with several spans of chunks."""
    monkeypatch.setattr(retrieval_decoding, "SPANS", ((1 << 62, 32, 16),))
    given = retrieved([1, 7, 200, 399])
    given["vectors"][3, 70] = given["vectors"][3, 5]
    given["queries"][3] = given["vectors"][3, 5] * 2
    vectors = given["vectors"].clone()
    temperature = randn(15, 1) if weighted else None
    choice = retrieval_decoding.choose(**given, chunk=CHUNK, candidates=candidates, eps=EMBEDDING_EPS)
    heads, groups, width = 4, 2, 5
    q, memory = randn(16, 4, heads * width), randn(17, 50, 2, groups, width)
    read = retrieval_decoding.read(
        q, given["queries"], temperature, given["position"], choice, given["tokens"], memory, CHUNK, count,
        vectors.shape[1],
    )  # fmt: skip
    scores = torch.einsum("be,bne->bn", F.normalize(given["queries"], dim=-1).double(), vectors.double())
    for row, at in enumerate(given["position"].tolist()):
        # Of the two equal chunks of the last row the earlier one comes first.
        order = scores[row, : at // CHUNK].argsort(descending=True, stable=True)[:candidates]
        if not len(order):
            assert not bool(read[row].any())
            continue
        chunks = order[:count]
        tokens = given["tokens"][row].long()[chunks[:, None] * CHUNK + torch.arange(CHUNK, device=DEVICE)]
        keys, values = memory[tokens].double().unbind(2)
        logits = scores[row, order] * (0.0 if temperature is None else temperature.double().exp())
        found = selected_attention(
            q[row].view(1, 1, heads, width).double(), keys.flatten(0, 1)[None], values.flatten(0, 1)[None],
            torch.arange(len(chunks), device=DEVICE)[None, None],
            None if temperature is None else logits[None, None, : len(chunks)], CHUNK,
            width**-0.5,
        ).flatten()  # fmt: skip
        share = 1.0 if temperature is None else logits.softmax(0)[: len(chunks)].sum()
        # float32 against float64: a softmax of at most 27 terms.
        torch.testing.assert_close(read[row].double(), found * share, rtol=1e-5, atol=1e-5)
    # The last row's token, the 400th, ends no chunk of 3; that at 200 ends the 67th.
    changed = (given["vectors"] != vectors).any(-1).nonzero().tolist()
    assert changed == [[2, 66]]
    embedded = F.rms_norm(given["table"][given["tokens"][2, 198:201].long()], (WIDTH,), eps=EMBEDDING_EPS)
    vector = F.normalize(F.linear(embedded.mean(0), given["weight"]), dim=-1)
    torch.testing.assert_close(given["vectors"][2, 66], vector, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("with_bias", "with_part"), [(True, True), (True, False), (False, False)])
def test_products_blended_into_the_stream(shared: bool, with_bias: bool, with_part: bool) -> None:
    rows, size = 3, 37
    y, found = (randn(21, rows, 19), randn(22, size, 19)), (randn(23, rows, 12), randn(24, size, 12))
    share = torch.rand(rows, device=DEVICE) if shared else None
    bias, part = randn(25, size) if with_bias else None, randn(26, rows, size) if with_part else None
    position = torch.tensor([0, 4, 5], device=DEVICE)
    stream = randn(27, rows, size)
    how = (share, position, 5, 0.3, bias, part)
    blended = retrieval_decoding.blend(F.linear(*y), F.linear(*found), *how)
    alpha = (0.3 if bias is None else bias) + (0.0 if part is None else part)
    read = F.linear(*found) * (1.0 if share is None else share[:, None])
    expected = torch.where((position >= 5)[:, None], alpha * F.linear(*y) + (1 - alpha) * read, F.linear(*y))
    # float32 sums of two dozen terms in another order.
    torch.testing.assert_close(blended, expected, rtol=1e-4, atol=1e-5)
    total = stream + expected
    if shared:
        return
    retrieval_decoding.add_blended_products(stream, y, found, *how[1:])
    torch.testing.assert_close(stream, total, rtol=1e-4, atol=1e-5)
