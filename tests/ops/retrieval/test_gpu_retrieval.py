"""The kernels of retrieval on a GPU against float64: choices, outputs, every gradient; graphs, memory, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.inference.reading import captured_step
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops import best_chunks, selected_attention
from tests.conftest import MIXERS
from tests.ops.retrieval.test_triton_retrieval import SHAPES, attention_inputs, choice_inputs, choose, outcome, wide
from tests.ops.test_gpu import TOLERANCE, norm_errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REAL = {
    "usual": (300, 64, 1500, 4, (8, 1), 64),
    "wide heads": (150, 64, 900, 4, (16, 2), 128),
    "widest": (70, 100, 900, 8, (4, 4), 256),
    "recall of pairs": (512, 2, 512, 4, (1, 1), 32),
}


def on_gpu(arguments: list[Any]) -> list[Any]:
    return [x.cuda() if torch.is_tensor(x) else x for x in arguments]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_attention_equals_the_plain_one(
    shape: str, dtype: torch.dtype, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, shape, (SHAPES | REAL)[shape])
    arguments = on_gpu(attention_inputs(shape, weighted=weighted, dtype=dtype))
    found = outcome(lambda *x: selected_attention(*x, backend="triton"), arguments)
    expected = outcome(lambda *x: selected_attention(*x, backend="chunked"), wide(arguments))
    assert all(error < TOLERANCE[dtype] for error in norm_errors(found, expected).values())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("length", "width", "whole", "count"), [(700, 64, 2048, 4), (100, 200, 300, 1), (1, 64, 2048, 8), (513, 16, 256, 2)]
)
def test_the_choice_is_the_best_one(length: int, width: int, whole: int, count: int, dtype: torch.dtype) -> None:
    inputs = [x.cuda() for x in choice_inputs(length, width, whole, dtype)]
    chunks, found = choose(inputs, count, "triton")
    right, expected = choose([*(x.double() for x in inputs[:2]), inputs[2]], count, "chunked")
    # Products are float32 (three tf32 ones for float32): right to 1e-5, and of chunks so close either may be chosen.
    assert float((found["scores"] - expected["scores"]).abs().max()) < 1e-4
    assert torch.equal(chunks < 0, right < 0) and bool((chunks < inputs[2][..., None].cpu()).all())
    if torch.equal(chunks, right):
        assert all(error < TOLERANCE[dtype] for error in norm_errors(found, expected).values())
    assert float((chunks != right).double().mean()) < 1e-3


def test_the_same_bits_every_time() -> None:
    arguments = on_gpu(attention_inputs("grouped", weighted=True, dtype=torch.bfloat16))
    choice = [x.cuda() for x in choice_inputs(300, 64, 50, torch.bfloat16)]

    def both() -> list[Tensor]:
        attended = outcome(lambda *x: selected_attention(*x, backend="triton"), arguments)
        return [*attended.values(), *choose(choice, 4, "triton")[1].values()]

    first = both()
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(both(), first, strict=True))


@pytest.mark.parametrize("chunk", [2, 16])
def test_a_training_step_is_captured_in_a_graph(chunk: int) -> None:
    torch.manual_seed(0)
    mixer = MIXERS["retrieval"] | {"chunk": chunk}
    config = RecurrentConfig(vocab_size=64, hidden_size=32, layers=[{"mixer": mixer, "mlp_size": 32}])
    model = RecurrentLM(config).cuda().train()
    ids = torch.randint(0, 64, (4, 96), device="cuda")

    def step() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        expected = [step(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    found = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    for x, y in zip(found, expected, strict=True):
        # The embedding's gradient is added up in no fixed order.
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def test_memory_grows_with_the_length_alone() -> None:
    """131072 queries and 2048 chunks: their scores would be 1 GiB; what is kept is 16 bytes a choice."""
    length, whole = 131072, 2048
    queries = torch.randn(1, length, 64, device="cuda", dtype=torch.bfloat16)
    vectors = torch.randn(1, whole, 64, device="cuda", dtype=torch.bfloat16)
    finished = (torch.arange(length, device="cuda") // 64)[None]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chunks, _ = best_chunks(queries, vectors, finished, 4)
    assert torch.cuda.max_memory_allocated() - before < 2**25
    assert bool((chunks[0, 64:, 0] >= 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"selector": "hard", "blend": "learned"}, {"blend": "fixed", "top_k": 9}])
@torch.no_grad()
def test_captured_steps_follow_forward_passes(changes: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS["retrieval"] | changes, "mlp_size": 24}, {"mixer": MIXERS["mamba2"]}]
    config = RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers, initializer_range=0.3)
    model = RecurrentLM(config).cuda().to(dtype).eval()
    prompt = torch.randint(0, 40, (3, 7), device="cuda")
    state = model(prompt).past_key_values
    step = captured_step(model, 3, room=100)
    step.load(state)
    for token in range(30):
        ids = torch.tensor([token, 2 * token % 40, 39 - token], device="cuda")
        out = model(ids[:, None], past_key_values=state)
        state = out.past_key_values
        step.ids.copy_(ids)
        if dtype == torch.float32:
            error = float((step() - out.logits[:, -1]).norm() / out.logits[:, -1].norm())
            # float32 sums in another order.
            assert error < 1e-4, token
        else:
            # Rounded scores may choose other chunks: such tokens differ, the others agree to a few roundings.
            assert bool(step().isfinite().all())
    assert torch.equal(step.export().context, state.context)


def test_generate_gives_the_same_tokens_as_without_a_graph() -> None:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS["retrieval"]}, {"mixer": MIXERS["gla"]}]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers, initializer_range=0.3))
    model = model.cuda().eval()
    ids = torch.randint(0, 40, (2, 11), device="cuda")
    options: dict[str, Any] = {"max_new_tokens": 50, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    model.decoding.graphs = False
    expected = model.generate(ids, **options)
    model.decoding.graphs = True
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options), expected)
    assert list(model.captured_steps) == [("step", 2, None, 4096)]
