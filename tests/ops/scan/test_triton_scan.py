"""The Triton kernels of the selective scan in Triton's CPU interpreter, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import selective_scan
from tests.conftest import MIXERS
from tests.ops.scan.test_selective_scan import NAMES, make

pytest.importorskip("triton")
kernels = pytest.importorskip("longrecall.ops.scan.triton.selective_scan")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

pytestmark = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu_scan.py"
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in few tokens."""
    monkeypatch.setattr(kernels, "CHUNK", 8)


def run(tensors: list[Tensor | None], backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Outputs and the gradients of a fixed random scalar, by name, in float64; computed with as `dtype`."""
    leaves = [None if x is None else (x if dtype is None else x.to(dtype)).clone().requires_grad_() for x in tensors]
    y, final = selective_scan(*leaves[:-1], initial_state=leaves[-1], backend=backend)
    g = torch.Generator().manual_seed(9)
    # In the dtype of x, so that both sides get the same gradient of y.
    weights = [torch.randn(y.shape, generator=g).to(tensors[0].dtype), torch.randn(final.shape, generator=g)]
    torch.autograd.backward([y, final], [weights[0].to(y), weights[1].to(final)])
    found = {"y": y, "final": final}
    found |= {f"d {name}": x.grad for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float = 1e-12) -> dict[str, float]:
    """Largest error of each tensor, relative to its largest entry (at least `floor`); NaN counts as infinite."""
    ratios = {}
    for name, right in expected.items():
        error = float((found[name] - right).abs().max()) / max(float(right.abs().max()), floor)
        ratios[name] = error if error == error else float("inf")
    return ratios


def check(tensors: list[Tensor | None], tolerance: float, floor: float = 1e-12) -> None:
    found, expected = run(tensors, "triton"), run(tensors, "reference", torch.float64)
    wrong = {name: error for name, error in errors(found, expected, floor).items() if not error < tolerance}
    assert not wrong


@pytest.mark.parametrize("sizes", [(1, 1), (40, 16), (9, 64)], ids=str)
def test_channels_are_cut_into_blocks(sizes: tuple[int, int]) -> None:
    """Blocks of 1, of 32 and 8, and of 8 and 1 channels."""
    check(make(11, torch.float32, sizes=sizes), 5e-6)


@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e4])
def test_extreme_decays_stay_finite_and_right(strength: float) -> None:
    # The exponent is rounded to 6e-8 of itself, and its exponential is below e^-20 where that is more than 1e-6. The
    # floor: where everything is forgotten at once, the gradient of the decay is next to nothing, and 0 is as good.
    check(make(18, torch.float32, strength=strength, batch=1), 1e-5, floor=1.0)


def test_no_step_leaves_the_state_as_it_was() -> None:
    tensors = make(20, torch.float32)
    tensors[1][:, 7:] = 0.0
    _, final = selective_scan(*tensors[:-1], initial_state=tensors[-1], backend="triton")
    early = [x[:, :7] if x.dim() == 3 else x for x in tensors[:-1]]
    _, expected = selective_scan(*early, initial_state=tensors[-1], backend="triton")
    assert torch.equal(final, expected)
    check(tensors, 5e-6)


def test_a_skip_connection_is_optional_and_dtypes_may_differ() -> None:
    tensors: list[Any] = make(12, torch.float32)
    tensors[5] = None
    check(tensors, 5e-6)
    # As in a layer in bfloat16: x and the steps are float32, B and C are not.
    tensors[3], tensors[4] = tensors[3].bfloat16(), tensors[4].bfloat16()
    found = run(tensors, "triton")
    expected = run(tensors, "reference", torch.float64)
    # Only the gradients of B and C are rounded, to 8 bits.
    assert all(error < (5e-3 if name in ("d b", "d c") else 5e-6) for name, error in errors(found, expected).items())


def test_rows_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Room for the states of two rows of a chunk of 8 tokens, each a tile of 4 x 8; so 2 rows, 2 rows, 1 row.
    monkeypatch.setattr(kernels, "WORKSPACE", 2 * 8 * 4 * 8 * 4)
    check(make(13, torch.float32, batch=5), 5e-6)


def test_inputs_need_not_be_contiguous_and_stay_as_they_were() -> None:
    tensors = make(12, torch.float32)
    x, step, a, b, c, skip, state = tensors
    wide = torch.cat([x, b, c], 2)
    columns = wide.split((7, 3, 3), dim=2)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (step, state)]
    mixed = [columns[0], turned[0], a.t().contiguous().t(), *columns[1:], skip, turned[1]]
    copies = [t.clone() for t in mixed]
    expected = selective_scan(*tensors[:-1], initial_state=state, backend="triton")
    found = selective_scan(*mixed[:-1], initial_state=mixed[-1], backend="triton")
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(mixed, copies, strict=True))
    # One token a row: contiguous, whatever the distance to the next token that is not there.
    first = [t[:, :1].contiguous() if t.dim() == 3 else t for t in (x, step, a, b, c)]
    odd = [*first[:3], *(t.as_strided(t.shape, (3, 99, 1)) for t in first[3:])]
    assert all(t.is_contiguous() for t in odd)
    found = selective_scan(*odd, skip, initial_state=state, backend="triton")
    expected = selective_scan(*first, skip, initial_state=state, backend="reference")
    # One step of float32 arithmetic.
    assert all(float((p - q).abs().max()) < 1e-5 for p, q in zip(found, expected, strict=True))


def test_without_gradients_no_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make(20, torch.float32)
    kept = []
    forward = kernels._forward

    def recorded(*args: Any, **options: Any) -> Any:
        kept.append(options["keep"])
        return forward(*args, **options)

    monkeypatch.setattr(kernels, "_forward", recorded)
    plain = selective_scan(*tensors[:-1], initial_state=tensors[-1], backend="triton")
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.no_grad():
        again = selective_scan(*leaves[:-1], initial_state=leaves[-1], backend="triton")
    trained = selective_scan(*leaves[:-1], initial_state=leaves[-1], backend="triton")
    assert kept == [False, False, True]
    assert all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(plain, again, trained, strict=True))


def test_what_kernels_decline_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make(6, torch.float64)
    with pytest.raises(ValueError, match=r'backend "triton" cannot serve this call of selective_scan: float64'):
        selective_scan(*tensors[:-1], backend="triton")
    with pytest.raises(ValueError, match="a channel has at most 64 numbers; got 65"):
        selective_scan(*make(6, torch.float32, sizes=(2, 65))[:-1], backend="triton")
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    with pytest.raises(ValueError, match="float64 is left to the other backends"):
        selective_scan(*tensors[:-1])


class NothingReadBack(TorchDispatchMode):
    """Fails where a value, or a shape that depends on values, would come back to Python: no CUDA graph has those."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "unique",
        "repeat_interleave",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        self.seen.add(name)
        if name in {forbidden.lstrip("_") for forbidden in self.FORBIDDEN}:
            raise AssertionError(f"{name} reads values back")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chosen", ["triton", "chunked"])
def test_a_layer_trains_without_reading_values_back(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", chosen)
    torch.manual_seed(0)
    mixer = mixer_config(MIXERS["mamba"]).build(16)
    x, position = torch.randn(2, 20, 16), torch.zeros(2, dtype=torch.long)
    with NothingReadBack() as mode:
        y, state = mixer(x, None, mask=None, position=position)
        loss = y.square().sum() + state["recurrent"].sum()
        gradients = torch.autograd.grad(loss, list(mixer.parameters()))
    assert {"mm", "sum"} <= mode.seen and all(bool(g.isfinite().all()) for g in gradients)
    with pytest.raises(AssertionError, match="local_scalar_dense reads values back"), NothingReadBack():
        loss.item()


def test_a_layer_gives_the_same_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixer = mixer_config(MIXERS["mamba"]).build(16)
    x, mask = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([[0], [3]])
    found = []
    for chosen in ("chunked", "triton"):
        monkeypatch.setenv("LONGRECALL_BACKEND", chosen)
        y, state = mixer(x, None, mask=mask, position=torch.zeros(2, dtype=torch.long))
        gradients = torch.autograd.grad(y.square().sum() + state["recurrent"].sum(), list(mixer.parameters()))
        found.append([y, state["recurrent"], *gradients])
    for kernel, plain in zip(found[1], found[0], strict=True):
        # float32 on both sides, in another order.
        assert float((kernel - plain).detach().abs().max()) < 1e-5 * float(plain.detach().abs().max())
