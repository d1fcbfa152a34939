"""The kernels of the selective scan on a GPU against float64 on the CPU, in blocks; and a layer in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import selective_scan
from tests.ops.scan.test_selective_scan import make
from tests.ops.scan.test_triton_scan import errors, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Largest error over the largest entry. float32: sums of a few thousand terms, exponentials good to 2 ulp. Else the
# results are rounded once, to 11 bits (5e-4 at worst) or 8 (4e-3); all before is float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 7e-4, torch.bfloat16: 5e-3}


def on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def found_errors(tensors: list[Tensor], floor: float = 1e-12) -> dict[str, float]:
    """Errors of the kernels; a state is float32 whatever the dtype of the other inputs."""
    tensors = [*tensors[:-1], tensors[-1].float()]
    return errors(run(on_gpu(tensors), "triton"), run(tensors, "chunked", torch.float64), floor)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("length", "batch", "sizes"),
    # One token; whole chunks; a part of one; blocks with channels left over; few and many numbers a channel.
    [(1, 2, (64, 16)), (128, 8, (128, 16)), (333, 3, (200, 16)), (70, 2, (37, 5)), (65, 2, (24, 64)), (40, 2, (1, 1))],
    ids=str,
)
def test_kernels_equal_float64(length: int, batch: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    found = found_errors(make(length, dtype, seed=length, batch=batch, sizes=sizes))
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e4])
def test_extreme_decays(strength: float) -> None:
    # The floor: where everything is forgotten at once, the gradient of the decay is next to nothing.
    found = found_errors(make(130, torch.float32, strength=strength, sizes=(64, 16)), floor=1.0)
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


def test_two_runs_are_the_same_to_the_bit_however_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    from longrecall.ops.scan.triton import selective_scan as kernels

    tensors = on_gpu(make(200, torch.float32, batch=9, sizes=(96, 16)))
    first, second = run(tensors, "triton"), run(tensors, "triton")
    # Room for two rows of 3 blocks: launches of 2, 2, 2, 2 and 1.
    monkeypatch.setattr(kernels, "WORKSPACE", 2 * 3 * kernels.CHUNK * 16 * 32 * 4)
    third = run(tensors, "triton")
    assert all(torch.equal(first[name], other[name]) for other in (second, third) for name in first)


def test_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from longrecall.ops.scan.triton import selective_scan as kernels

    calls = []
    original = kernels.selective_scan
    monkeypatch.setattr(kernels, "selective_scan", lambda **inputs: calls.append(1) or original(**inputs))
    x, step, a, b, c, skip, state = on_gpu(make(5, torch.float32))
    selective_scan(x, step, a, b, c, skip, initial_state=state)
    assert calls
    # Declined, and served by the other backend: too many numbers a channel, and float64.
    selective_scan(*on_gpu(make(5, torch.float32, sizes=(2, 65)))[:-1])
    selective_scan(*on_gpu(make(5, torch.float64))[:-1])
    assert len(calls) == 1


def test_a_layer_trains_in_a_cuda_graph() -> None:
    torch.manual_seed(0)
    description = {"type": "mamba", "inner_dim": 64, "state_dim": 16, "dt_rank": 4}
    mixer = mixer_config(description).build(32).cuda()
    x, position = torch.randn(4, 100, 32, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    parameters = list(mixer.parameters())

    def step() -> list[Tensor]:
        y, state = mixer(x, None, mask=None, position=position)
        loss = y.square().mean() + state["recurrent"].square().mean()
        return [y.detach(), *torch.autograd.grad(loss, parameters)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    torch.cuda.current_stream().wait_stream(stream)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.clone() for tensor in captured]
    for found, expected in zip(replayed, step(), strict=True):
        # The same kernels; matrix products may be split otherwise under capture.
        assert float((found - expected).abs().max()) <= 1e-5 * max(float(expected.abs().max()), 1e-6)
