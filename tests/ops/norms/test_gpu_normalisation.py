"""The kernels of norms and gates on a GPU against float64: in models, in CUDA graphs, and the same every time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.backends import Op
from longrecall.ops.norms import op as ops
from tests.conftest import RECURRENT
from tests.ops.norms.test_triton_normalisation import (
    SHAPES,
    TOLERANCE,
    add_norm,
    check,
    draw,
    gated,
    norm,
    stream_norm,
    through,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# More tiles than programs of a launch, on any GPU; whole tiles and parts of one.
MANY = [(70000, 128, 1), (9000, 1024, 1), (3001, 2048, 1), (1000, 512, 8)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "width", "groups"), [*SHAPES, *MANY], ids=str)
def test_norms_equal_float64(rows: int, width: int, groups: int, dtype: torch.dtype) -> None:
    size = width * groups
    x, update, weight = draw(dtype, (rows, size), (rows, size), (size,), seed=rows)
    check(norm, [x, weight], dtype, device="cuda", groups=groups)
    check(add_norm, [x, update, weight], dtype, device="cuda", groups=groups)
    check(stream_norm, [x.float(), weight], dtype, device="cuda", groups=groups, dtype=dtype)


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "silu_before"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "width", "groups"), [*SHAPES, *MANY], ids=str)
def test_gated_norms_equal_float64(rows: int, width: int, groups: int, dtype: torch.dtype, kind: str) -> None:
    size = width * groups
    x, gate, weight = draw(dtype, (rows, size), (rows, size), (size,), seed=rows)
    check(gated, [x, gate, weight], dtype, device="cuda", groups=groups, kind=kind)


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "silu_before"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "width", "groups"), [(70, 5, 1), (37, 24, 3), (1200, 1024, 1)], ids=str)
def test_products_with_gated_norms_equal_float64(
    rows: int, width: int, groups: int, dtype: torch.dtype, kind: str
) -> None:
    size = width * groups
    x, gate, weight, matrix = draw(dtype, (rows, size), (rows, size), (size,), (64, size), seed=rows)
    check(through, [x, gate, weight, matrix / size**0.5], dtype, device="cuda", groups=groups, kind=kind)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", [8, 2048, 5001])
def test_swiglu_equals_float64(size: int, dtype: torch.dtype) -> None:
    gate, up, weight = draw(dtype, (300, size), (300, size), (64, size), seed=size)
    check(ops.silu_product, [gate, up], dtype, device="cuda")
    check(ops.gated_projection, [gate, up, weight / size**0.5], dtype, device="cuda")


# Sizes with which every short convolution has a multiple of 32 channels.
EVEN = {name: {"num_heads": 2, "key_dim": 16, "value_dim": 16} for name in RECURRENT}
EVEN["mamba2"] = {"state_dim": 16}


def model_of(mixer: str, dtype: torch.dtype, *, even: bool = False) -> RecurrentLM:
    torch.manual_seed(0)
    layer = {"mixer": RECURRENT[mixer] | (EVEN[mixer] if even else {}), "mlp_size": 24}
    return RecurrentLM(RecurrentConfig(vocab_size=32, hidden_size=16, layers=[layer, layer])).to("cuda", dtype)


def gradients(model: RecurrentLM, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("even", [False, True], ids=["odd", "even"])
@pytest.mark.parametrize("mixer", ["gla_conv", "gated_delta_net", "delta_net", "kda", "mamba2", "hgrn2", "hgrn2_conv"])
def test_models_compute_the_same_with_and_without(mixer: str, even: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(mixer, torch.float32, even=even)
    ids = torch.randint(32, (2, 50), generator=torch.Generator().manual_seed(1)).cuda()
    asked: dict[str, set[str | None]] = {}
    channels: set[int] = set()
    decide = Op.why_plain

    def watched(self: Op, tensors: dict[str, Tensor], backend: str | None = None, **options: object) -> bool:
        reason, op = decide(self, tensors, backend, **options), self.name
        if backend is not None:
            return reason is None
        size = tensors["x"].shape[2] if op == "short_convolution" else 0
        if op == "look_up":
            assert reason is not None and "1024 tokens" in reason  # as few as here
        elif size % 32 and not even:
            assert reason == f"the channels must be a multiple of 32, not {size}"
        else:
            asked.setdefault(op, set()).add(reason)
        channels.add(size)
        return reason is None

    monkeypatch.setattr(Op, "on_kernels", watched)
    found = gradients(model, ids)
    assert len(asked) > 1 and all(reasons == {None} for reasons in asked.values()), asked
    assert (len(channels) > 1) == (mixer != "hgrn2")
    monkeypatch.setattr(Op, "on_kernels", lambda *_, **__: False)
    expected = gradients(model, ids)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        # float32 sums in another order, through two layers.
        error = float((found[name] - right).norm() / right.norm().clamp(min=1e-6))
        assert error < 1e-4, f"{name}: {error:.2g}"


def test_two_runs_agree_to_the_bit() -> None:
    model = model_of("gated_delta_net", torch.bfloat16)
    ids = torch.randint(32, (4, 300), generator=torch.Generator().manual_seed(1)).cuda()
    first = gradients(model, ids)
    second = gradients(copy.deepcopy(model), ids)
    norms = [name for name in first if "norm" in name]
    assert norms and all(torch.equal(first[name], second[name]) for name in norms)


def test_forward_and_backward_can_be_captured_in_a_graph() -> None:
    x, update, weight = (t.cuda() for t in draw(torch.float32, (64, 48), (64, 48), (48,)))
    for t in (x, update, weight):
        t.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        stream, normed = ops.add_rms_norm(x, update, weight, 1e-5, backend="triton")
        out = ops.gated_projection(
            normed, ops.gated_rms_norm(stream, normed, weight, 1e-5), update[:8], backend="triton"
        )
        return torch.autograd.grad(out.square().sum(), (x, update, weight))

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))
