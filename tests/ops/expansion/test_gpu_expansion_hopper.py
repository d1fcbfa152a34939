"""Expansion, convolution, SiLU and norm in Gluon, forward and backward, against float64 and against plain Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from longrecall.ops.expansion.triton import expansion
from longrecall.ops.kernels import hopper as machine
from tests.ops.expansion.test_triton_expansion import EPS, Case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES = [
    Case(2, 1003, 2, 128, 4),
    Case(1, 17, 1, 128, 8, grafted=True),
    Case(3, 300, 2, 128, 2, normalise=False),
    # More streams than a program has.
    Case(9, 64, 8, 128, 8),
    Case(2, 1003, 2, 64, 2),
    Case(1, 129, 2, 64, 4, grafted=True, normalise=False),
]

NAMES = ("y", "weight", "head", "taps", "state")
"""Arguments of the expansion's functions, in their order."""

# Results, and what products multiply, are rounded to bfloat16: 2^-9 each, a little over half of that on average.
TOLERANCE = 4e-3


@pytest.fixture(autouse=True)
def _kernels_run() -> None:
    reason = machine.why_not(torch.empty(1, device="cuda", dtype=torch.bfloat16))
    if reason is not None:
        pytest.skip(reason)


def tensors(case: Case) -> dict[str, Tensor]:
    found = {name: x.cuda().bfloat16() for name, x in case.tensors().items()}
    g = torch.Generator().manual_seed(9)
    shape = (case.rows, case.length, case.heads * case.factor, case.width)
    return {**found, "d_out": torch.randn(shape, generator=g).cuda().bfloat16()}


def results(case: Case, inputs: dict[str, Tensor], exact: bool) -> dict[str, Tensor]:
    """The output and the gradients of all inputs, by one launch each way or, `exact`, by the formulas in float64."""
    if exact:
        leaves = {name: x.double().requires_grad_() for name, x in inputs.items() if name != "d_out"}
        out = formulas(case, *(leaves.get(name) for name in NAMES))
        found = torch.autograd.grad(out, list(leaves.values()), inputs["d_out"].double())
        return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}
    rest = [inputs.get(name) for name in NAMES]
    out, kept = expansion.forward(*rest, normalise=case.normalise, eps=EPS)
    d_before = torch.empty_like(inputs["state"].transpose(1, 2), memory_format=torch.contiguous_format)
    *found, d_taps = expansion.backward(*rest, kept, inputs["d_out"], d_before, normalise=case.normalise, eps=EPS)
    found += [d_taps.sum(0).t(), d_before.transpose(1, 2)]
    return {"out": out, **{name: x for name, x in zip(NAMES, found, strict=True) if x is not None}}


def convolved(y: Tensor, weight: Tensor, head: Tensor | None, state: Tensor) -> Tensor:
    """What the convolution takes, ``[B, H * E * D, 3 + T]``."""
    z = torch.einsum("bthd,hdf->bthf", y, weight)
    z = (z if head is None else torch.cat([head, z], -1)).flatten(2)
    # Rounded as the kernels do, with the gradient of the identity: SiLU's slope depends on it.
    z = z + (z.bfloat16().double() - z).detach()
    return torch.cat([state.transpose(1, 2), z], 1).transpose(1, 2)


def convolution(z: Tensor, taps: Tensor, width: int) -> Tensor:
    """Of what `convolved` makes: ``[B, T, H * E, D]``."""
    c = functional.conv1d(z, taps[:, None], groups=len(taps))
    return c.transpose(1, 2).unflatten(2, (-1, width))


def formulas(case: Case, y: Tensor, weight: Tensor, head: Tensor | None, taps: Tensor, state: Tensor) -> Tensor:
    made = functional.silu(convolution(convolved(y, weight, head, state), taps, case.width))
    return made * (made.square().sum(-1, keepdim=True) + EPS).rsqrt() if case.normalise else made


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_equal_the_formulas(case: Case) -> None:
    inputs = tensors(case)
    wanted = results(case, inputs, exact=True)
    errors = {name: error(x, wanted[name]) for name, x in results(case, inputs, exact=False).items()}
    assert all(x < TOLERANCE for x in errors.values()), errors


def check_below_zero(inputs: dict[str, Tensor], case: Case) -> None:
    """The first head's first subhead is what it is made from, about 1, and the convolution brings it to -5 .. -12.

    Its last channel comes to -1000, and shares a reciprocal with the one before.
    """
    width = case.width
    inputs["y"][:, :, 0] = 1 + 0.1 * inputs["y"][:, :, 0]
    inputs["weight"][0, :, :width] = torch.eye(width)
    inputs["taps"][:width] = -torch.linspace(5, 12, width)[:, None].to(inputs["taps"]) / 4
    inputs["taps"][width - 1] = -250
    inputs["state"][:, :width] = 1 + 0.1 * inputs["state"][:, :width]
    wanted, found = results(case, inputs, exact=True), results(case, inputs, exact=False)
    assert float(found["out"][:, :, 0, -1].abs().max()) < 1e-12
    out, exact = found["out"][:, :, 0, :-1].double(), wanted["out"][:, :, 0, :-1]
    # Each number but for its rounding to bfloat16; by Hopper's tanh they are off by up to 4 percent.
    assert float(((out - exact) / exact).abs().max()) < 1.01 * 2**-8
    # Sums of up to three numbers that may cancel: of a channel all together.
    gap, size = (x[:, : width - 1].double().norm(dim=-1) for x in (found["state"] - wanted["state"], wanted["state"]))
    assert float((gap / size).max()) < 2**-7


@pytest.mark.parametrize("normalise", [False, True])
def test_a_head_far_below_zero_keeps_its_digits(normalise: bool) -> None:
    case = Case(2, 203, 2, 128, 2, normalise=normalise)
    check_below_zero(tensors(case), case)


def check_large(inputs: dict[str, Tensor], case: Case) -> None:
    """Of the sigmoid's powers of two some are infinite or limited, others zero."""
    for name in ("y", "state"):
        inputs[name] *= 1e4
    wanted, found = results(case, inputs, exact=True), results(case, inputs, exact=False)
    errors = {name: error(x, wanted[name]) for name, x in found.items()}
    assert all(x < TOLERANCE for x in errors.values()), errors
    # What SiLU takes to almost nothing: its argument is below -60 however sums before a rounding to bfloat16 were added
    # up, which moves a number by 2^-7 of itself, or by a little where large ones cancelled (40 is plenty).
    y, weight, head, taps, state = (None if x is None else x.double() for x in map(inputs.get, NAMES))
    z = convolved(y, weight, head, state)
    most = convolution(z, taps, case.width) + 2**-7 * convolution(z.abs(), taps.abs(), case.width)
    nothing = most < -100
    assert nothing.float().mean() > 0.3
    # Arguments of 1e6 at most, times the sigmoid's limit, 2^-62.
    assert float(found["out"][nothing].abs().max()) < 1e6 * 2**-62


@pytest.mark.parametrize("normalise", [False, True])
def test_large_inputs_stay_finite(normalise: bool) -> None:
    case = Case(2, 1003, 2, 128, 4, normalise=normalise)
    check_large(tensors(case), case)


def check_nan(inputs: dict[str, Tensor], case: Case) -> None:
    """Channels that share a reciprocal share nothing else."""
    inputs["state"][0, 5, 0] = float("nan")
    found = results(case, inputs, exact=False)["out"].flatten(2).isnan().nonzero()
    # The first of three inputs before the text: one token takes it.
    assert found.tolist() == [[0, 0, 5]]


def test_nan_stays_in_its_channel() -> None:
    case = Case(1, 17, 1, 128, 2, normalise=False)
    check_nan(tensors(case), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_are_as_precise_as_plain_triton(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(case)
    wanted, found = results(case, inputs, exact=True), results(case, inputs, exact=False)
    monkeypatch.setenv("LONGRECALL_GLUON", "0")
    plain = results(case, inputs, exact=False)
    for name, x in found.items():
        # A tenth more: roundings that lie midway go either way.
        assert error(x, wanted[name]) < 1.1 * error(plain[name], wanted[name]) + 1e-4, name


def test_the_launch_without_a_gradient_makes_the_same() -> None:
    x = tensors(CASES[1])
    rest = (x["y"], x["weight"], x["head"], x["taps"], x["state"])
    found = expansion.expand_and_convolve(*rest, normalise=True)
    assert torch.equal(found, expansion.forward(*rest, normalise=True)[0])


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_two_runs_agree_to_the_bit(case: Case) -> None:
    inputs = tensors(case)
    first, second = results(case, inputs, exact=False), results(case, inputs, exact=False)
    assert all(torch.equal(x, second[name]) for name, x in first.items())
