"""The Triton kernels of retrieval in Triton's CPU interpreter, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.layers.mixers.registry import mixer_config
from longrecall.layers.tokens import TokenContext
from longrecall.ops import best_chunks, selected_attention
from longrecall.ops.backends import why_no_kernel
from longrecall.ops.retrieval import op as retrieval
from longrecall.ops.retrieval import reference as reference_retrieval
from tests.conftest import MIXERS
from tests.ops.linear_attention.test_triton_linear import errors

pytest.importorskip("triton")
kernels = pytest.importorskip("longrecall.ops.retrieval.triton.retrieval")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

pytestmark = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu_retrieval.py"
)

SHAPES = {
    # tokens, chunk, columns, chosen, (query heads, key heads), width
    "short chunks": (9, 2, 13, 2, (2, 1), 5),
    "one head": (7, 3, 12, 1, (1, 1), 32),
    "grouped": (5, 16, 50, 2, (4, 2), 12),
    "chunks of two blocks": (3, 70, 150, 2, (3, 1), 16),
    "a head of its own": (3, 20, 45, 3, (2, 2), 7),
}


def attention_inputs(shape: str, *, weighted: bool, dtype: torch.dtype = torch.float32, rows: int = 2) -> list[Any]:
    """q, k, v, chunks, weights and chunk; every query has other chunks, some have fewer, the first has none."""
    length, chunk, columns, chosen, heads, width = SHAPES[shape]
    g = torch.Generator().manual_seed(3)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g).to(dtype)

    order = torch.rand(rows, length, columns // chunk, generator=g).argsort(-1)[..., :chosen]
    chunks = order.masked_fill(torch.rand(order.shape, generator=g) < 0.2, -1)
    chunks[:, :1] = -1
    q, k, v = (randn(rows, n, h, width) for n, h in ((length, heads[0]), (columns, heads[1]), (columns, heads[1])))
    return [2 * q, k, v, chunks, 2 * randn(*chunks.shape) if weighted else None, chunk]


def outcome(function: Any, arguments: list[Any]) -> dict[str, Tensor]:
    """The output and every gradient in float64; the output's gradient tells positions apart."""
    leaves = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    out = function(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    named = zip(("q", "k", "v", "chunks", "weights"), leaves, strict=False)
    found = {"out": out} | {f"d {name}": x.grad for name, x in named if torch.is_tensor(x) and x.requires_grad}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def on_kernels(*arguments: Any) -> Tensor:
    return selected_attention(*arguments, backend="triton")


def definition(q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int) -> Tensor:
    return reference_retrieval.selected_attention(q, k, v, chunks, weights, chunk, q.shape[-1] ** -0.5)


def wide(arguments: list[Any]) -> list[Any]:
    return [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_definition(shape: str, weighted: bool) -> None:
    arguments = attention_inputs(shape, weighted=weighted, rows=2 if shape != "chunks of two blocks" else 1)
    found, expected = outcome(on_kernels, arguments), outcome(definition, wide(arguments))
    # float32 sums of at most a few hundred terms.
    assert all(error < 5e-6 for error in errors(found, expected).values())


@pytest.mark.parametrize("shape", ["short chunks", "grouped"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_low_precision(shape: str, dtype: torch.dtype, tolerance: float) -> None:
    arguments = attention_inputs(shape, weighted=True, dtype=dtype)
    assert on_kernels(*arguments).dtype == dtype
    # Operands and results are rounded to 8 bits (4e-3 at worst) or 11 (5e-4), a few times one after the other.
    found = errors(outcome(on_kernels, arguments), outcome(definition, wide(arguments)))
    assert all(error < tolerance for error in found.values()), found


@pytest.mark.parametrize("shape", ["short chunks", "grouped"])
def test_huge_logits_stay_finite_and_follow_the_largest(shape: str) -> None:
    arguments = attention_inputs(shape, weighted=True)
    arguments[0], arguments[4] = 1e3 * arguments[0], 1e3 * arguments[4]
    found, expected = outcome(on_kernels, arguments), outcome(definition, wide(arguments))
    # Logits of 1e4 have low bits of 1e-3 in float32, which is the relative error of their exponentials.
    assert all(error < 5e-3 for error in errors(found, expected, floor=1.0).values())


@pytest.mark.parametrize("shape", ["short chunks", "grouped"])
def test_what_is_not_chosen_is_not_read_and_everything_is_written(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread keys, and every buffer before a kernel fills it, are NaN."""
    arguments = attention_inputs(shape, weighted=True)
    chunk, whole = arguments[5], arguments[1].shape[1] // arguments[5]
    arguments[3] = arguments[3].masked_fill(arguments[3] == 1, -1)
    expected = outcome(definition, wide(arguments))
    for index in (1, 2):
        arguments[index] = arguments[index].clone()
        arguments[index][:, chunk : 2 * chunk] = torch.nan
        arguments[index][:, whole * chunk :] = torch.nan
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)
        poison = lambda *a, f=original, **kw: f(*a, **kw).fill_(torch.nan if f(*a, **kw).is_floating_point() else -9)  # noqa: E731
        monkeypatch.setattr(torch, name, poison)
    found = outcome(on_kernels, arguments)
    for name in ("d k", "d v"):
        # NaN times a gradient of 0, in the chunk that nobody chose.
        found[name][:, chunk : 2 * chunk] = 0
    assert all(error < 5e-6 for error in errors(found, expected).values())


def test_no_query_has_a_chunk() -> None:
    for shape in ("short chunks", "grouped"):
        for weighted in (True, False):
            arguments = attention_inputs(shape, weighted=weighted)
            arguments[3] = torch.full_like(arguments[3], -1)
            assert all(bool((x == 0).all()) for x in outcome(on_kernels, arguments).values())


def choice_inputs(length: int, width: int, whole: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    queries, vectors = torch.randn(2, length, width, generator=g), torch.randn(2, whole, width, generator=g)
    finished = torch.randint(0, whole + 1, (2, length), generator=g).sort(1).values
    finished[:, 0], finished[:, -1] = 0, whole
    return [queries.to(dtype), vectors.to(dtype), finished]


def choose(inputs: list[Tensor], count: int, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The chunks from the best on, and the scores with their gradients in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs[:2]]
    chunks, scores = best_chunks(*leaves, inputs[2], count, backend=name)
    ordered = torch.where(chunks < 0, -torch.inf, scores.detach()).argsort(dim=-1, descending=True, stable=True)
    chunks, scores = chunks.gather(-1, ordered), scores.gather(-1, ordered)
    scores.backward(torch.linspace(-1, 1, scores.numel(), device=scores.device, dtype=scores.dtype).view(scores.shape))
    found = {"scores": scores} | {f"d {n}": x.grad for n, x in zip(("queries", "vectors"), leaves, strict=True)}
    return chunks.cpu(), {name: x.detach().double().cpu() for name, x in found.items()}


@pytest.mark.parametrize(
    ("length", "width", "whole", "count"), [(20, 12, 150, 3), (40, 17, 70, 1), (70, 70, 5, 8), (1, 32, 200, 4)]
)
def test_the_best_chunks_that_have_ended_are_chosen(length: int, width: int, whole: int, count: int) -> None:
    inputs = choice_inputs(length, width, whole)
    chunks, found = choose(inputs, count, "triton")
    exact = [*(x.double() for x in inputs[:2]), inputs[2]]
    right, expected = choose(exact, count, "reference")
    assert torch.equal(chunks, right)
    assert bool((chunks < inputs[2][..., None]).all())
    # float32 sums of at most a few dozen terms.
    assert all(error < 5e-6 for error in errors(found, expected).values())


def test_blocks_of_the_plain_choice_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, vectors, _ = choice_inputs(23, 6, 7, torch.float64)
    finished = ((torch.arange(23) + 6) // 4).expand(2, -1)  # as many as `reach` allows
    expected = choose([queries, vectors, finished], 3, "reference")
    monkeypatch.setattr(retrieval, "QUERY_BLOCK", 4)
    leaves = [queries.requires_grad_(), vectors.requires_grad_()]
    chunks, scores = best_chunks(*leaves, finished, 3, reach=(5, 4))
    assert torch.equal(chunks.sort(-1).values, expected[0].sort(-1).values)
    assert torch.autograd.gradcheck(lambda a, b: best_chunks(a, b, finished, 3, reach=(5, 4))[1], leaves)
    assert bool((scores[chunks < 0] == 0).all())


def test_equal_scores_take_the_earlier_chunk() -> None:
    vectors = torch.ones(1, 9, 4)
    chunks, _ = best_chunks(torch.ones(1, 1, 4), vectors, torch.tensor([[7]]), 3, backend="triton")
    assert chunks.sort(-1).values.tolist() == [[[0, 1, 2]]]


@pytest.mark.parametrize("selector", ["weighted", "hard"])
def test_layers_give_the_same_on_the_kernels(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = mixer_config(MIXERS["retrieval"] | {"selector": selector}).build(16)
    x, ids, table = torch.randn(2, 21, 16), torch.randint(0, 9, (2, 21)), torch.randn(9, 16)
    found = []
    for chosen in ("chunked", "triton"):
        monkeypatch.setenv("LONGRECALL_BACKEND", chosen)
        context = TokenContext.read(None, ids, None, lambda i: table[i])
        y, _ = layer(x, None, mask=None, position=torch.zeros(2, dtype=torch.long), context=context)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.square().sum(), parameters)])
    for kernel, plain in zip(found[1], found[0], strict=True):
        # float32 on both sides, in another order.
        assert float((kernel - plain).detach().abs().max()) < 2e-5 * float(plain.detach().abs().max())


def test_what_kernels_decline_is_said() -> None:
    q, chunks = torch.zeros(1, 4, 2, 300), torch.zeros(1, 4, 17, dtype=torch.long)
    with pytest.raises(ValueError, match="heads are at most 256 wide; got 300"):
        selected_attention(q, q, q, chunks, None, 2, backend="triton")
    many = torch.zeros(1, 4, 129, 2)
    with pytest.raises(ValueError, match="at most 128 query heads share a key head; got 129"):
        selected_attention(many, many[:, :, :1], many[:, :, :1], chunks, None, 2, backend="triton")
    with pytest.raises(ValueError, match="a query chooses at most 16 chunks; got 17"):
        best_chunks(q[..., 0], torch.zeros(1, 20, 2), chunks[..., 0], 17, backend="triton")
    with pytest.raises(ValueError, match="chunk vectors are at most 256 wide; got 300"):
        best_chunks(q[:, :, 0], q[:, :, 0], chunks[..., 0], 2, backend="triton")
    assert "float64" in str(why_no_kernel("best_chunks", {"queries": q.double()}))
    with pytest.raises(ValueError, match='Did you mean "triton"'):
        best_chunks(q[:, :, 0], q[:, :, 0], chunks[..., 0], 2, backend="tritn")


@pytest.mark.parametrize(
    ("queries", "vectors", "finished", "count"),
    [
        ((1, 4, 2), (1, 5, 3), (1, 4), 2),
        ((1, 4, 2), (2, 5, 2), (1, 4), 2),
        ((1, 4, 2), (1, 5, 2), (1, 3), 2),
        ((1, 4, 2), (1, 5, 2), (1, 4), 0),
    ],
)
def test_shapes_that_do_not_fit_are_named(queries: tuple, vectors: tuple, finished: tuple, count: int) -> None:
    with pytest.raises(ValueError, match="must"):
        best_chunks(torch.zeros(queries), torch.zeros(vectors), torch.zeros(finished, dtype=torch.long), count)
