"""Expansion, convolution, SiLU and norm, in one launch and in two, against their formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from longrecall.layers.expansion import ACTIVATIONS
from longrecall.ops.convolution.triton.short import convolve_heads
from longrecall.ops.delta_rule.triton import expanded
from longrecall.ops.delta_rule.triton import plan as delta_plan
from longrecall.ops.expansion.triton import expansion
from longrecall.ops.expansion.triton import forward as expansion_forward
from longrecall.ops.kernels import launch
from tests.ops.delta_rule.test_triton_delta import TOLERANCE as LAYER_TOLERANCE
from tests.ops.delta_rule.test_triton_delta import layer_errors

interpreted = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; see test_gpu_expansion.py"
)

# Results of float32 lose a few bits of 24 in sums over tokens and channels; those of bfloat16 are rounded to 8, and so
# are the convolution's inputs.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Rows, tokens, heads and their width, subheads, and whether the first is grafted and all are normalised."""

    rows: int
    length: int
    heads: int
    width: int
    factor: int
    grafted: bool = False
    normalise: bool = True

    def tensors(self, seed: int = 5) -> dict[str, Tensor]:
        """y, weight, head (if grafted), taps and state in float32; all of about one but the weight, 1 / sqrt(D)."""
        g = torch.Generator().manual_seed(seed)
        shape = (self.rows, self.length, self.heads, self.width)
        channels = self.heads * self.factor * self.width
        made = (self.factor - self.grafted) * self.width
        found = {
            "y": torch.randn(shape, generator=g),
            "weight": torch.randn(self.heads, self.width, made, generator=g) * self.width**-0.5,
            "taps": torch.randn(channels, 4, generator=g),
            "state": torch.randn(self.rows, channels, 3, generator=g),
        }
        return {**found, "head": torch.randn(shape, generator=g)} if self.grafted else found


def wide(y: Tensor, weight: Tensor, head: Tensor | None) -> Tensor:
    """The expansion: ``[B, T, H * E, D]``."""
    made = torch.einsum("bthd,hdf->bthf", y, weight)
    made = made if head is None else torch.cat([head, made], -1)
    return made.unflatten(-1, (-1, y.shape[3])).flatten(2, 3)


def formula(case: Case, y: Tensor, weight: Tensor, taps: Tensor, state: Tensor, head: Tensor | None = None) -> Tensor:
    """The definition: ``[B, T, H * E, D]``."""
    inputs = torch.cat([state.transpose(1, 2), wide(y, weight, head).flatten(2)], 1)
    c = (
        torch.stack([inputs[:, j : j + y.shape[1]] * taps[:, j] for j in range(4)])
        .sum(0)
        .unflatten(-1, (-1, case.width))
    )
    z = c / (1 + torch.exp(-c))
    return z * (z.square().sum(-1, keepdim=True) + EPS) ** -0.5 if case.normalise else z


def one_launch(
    case: Case, y: Tensor, weight: Tensor, taps: Tensor, state: Tensor, head: Tensor | None = None
) -> Tensor:
    return expansion.expand_and_convolve(y, weight, head, taps, state, normalise=case.normalise, eps=EPS)


def two_passes(
    case: Case, y: Tensor, weight: Tensor, taps: Tensor, state: Tensor, head: Tensor | None = None
) -> Tensor:
    return convolve_heads(expansion.expand(y, weight, head), taps, state, normalise=case.normalise, eps=EPS)


def off(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def error(case: Case, dtype: torch.dtype, device: str = "cpu") -> float:
    """The relative error of one launch."""
    tensors = {name: x.to(device, dtype) for name, x in case.tensors().items()}
    found = one_launch(case, **{name: x.requires_grad_() for name, x in tensors.items()})
    assert found.dtype == dtype and not found.requires_grad
    return off(found, formula(case, **{name: x.detach().double() for name, x in tensors.items()}))


def expansion_errors(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Relative errors of `expand` and its gradients."""
    tensors = {name: x.to(device, dtype) for name, x in case.tensors().items() if name in ("y", "weight", "head")}
    results: list[dict[str, Tensor]] = []
    for kind, function in ((torch.float64, wide), (dtype, expansion.expand)):
        leaves = {name: x.to(kind).requires_grad_() for name, x in tensors.items()}
        z = function(leaves["y"], leaves["weight"], leaves.get("head"))
        up = torch.randn(z.shape, generator=torch.Generator().manual_seed(6)).to(dtype).to(z)
        found = torch.autograd.grad(z, list(leaves.values()), up)
        results.append({"z": z.detach(), **{f"d_{name}": d for name, d in zip(leaves, found, strict=True)}})
    right, found = results
    return {name: off(found[name], x) for name, x in right.items()}


def unlike(case: Case, dtype: torch.dtype, device: str) -> float:
    """How far apart one launch and two passes are, relative to their size."""
    tensors = {name: x.to(device, dtype) for name, x in case.tensors().items()}
    return off(one_launch(case, **tensors), two_passes(case, **tensors))


# A few of the convolution's inputs are neighbours in bfloat16. Rounding all of them makes an error of 2e-3; where less
# than a tenth of that is between the two, gradients of one are those of the other for all that bfloat16 can tell.
ALIKE = 2e-4


CASES = [
    Case(2, 70, 1, 64, 2),
    Case(1, 150, 1, 128, 2, grafted=True),
    Case(2, 9, 1, 64, 4, grafted=True, normalise=False),
    Case(1, 190, 1, 64, 2, normalise=False),
]


@interpreted
@pytest.mark.parametrize(("dtype", "longest"), [(torch.float32, 1), (torch.bfloat16, 3)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_equals_the_formulas(
    case: Case, dtype: torch.dtype, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several programs a row, and streams of one tile and of several.
    monkeypatch.setattr(expansion, "LONGEST", longest)
    assert error(case, dtype) < TOLERANCE[dtype]


@interpreted
@settings(max_examples=6, deadline=None, derandomize=True)
@given(rows=st.integers(1, 2), length=st.integers(1, 300), longest=st.integers(1, 4), grafted=st.booleans())
def test_any_length(rows: int, length: int, longest: int, grafted: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "LONGEST", longest)
        found = error(Case(rows, length, 1, 64, 2, grafted=grafted), torch.float32)
    assert found < TOLERANCE[torch.float32], found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_equals_the_formula(case: Case) -> None:
    found = expansion_errors(case, torch.float32)
    assert set(found) == {"z", "d_y", "d_weight"} | ({"d_head"} if case.grafted else set())
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


@interpreted
def test_one_launch_rounds_the_product_as_two_passes_do() -> None:
    case = CASES[0]
    tensors = {name: x.bfloat16() for name, x in case.tensors().items()}
    exact = {name: x.double() for name, x in tensors.items()}
    product = wide(exact["y"], exact["weight"], None).float()
    # The interpreter rounds to bfloat16 towards zero; GPUs, to the nearest: see test_gpu_expansion.py.
    product = (product.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()
    found = one_launch(case, **tensors)
    assert off(found, convolve_heads(product, tensors["taps"], tensors["state"], normalise=True, eps=EPS)) < ALIKE
    # Not rounded in between it would be this far away.
    assert off(found, formula(case, **exact)) > 10 * ALIKE


@interpreted
def test_a_text_in_two_parts_equals_the_whole() -> None:
    case = Case(2, 45, 1, 64, 2)
    tensors = case.tensors()
    whole = one_launch(case, **tensors)
    y, weight = tensors["y"], tensors["weight"]
    first = one_launch(case, **{**tensors, "y": y[:, :19]})
    state = expansion.expand(y[:, 16:19], weight, None).flatten(2).transpose(1, 2)
    second = one_launch(case, **{**tensors, "y": y[:, 19:], "state": state})
    # A few roundings of float32: the same products, formed in tiles that begin elsewhere.
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=5e-7)


@interpreted
@pytest.mark.parametrize(
    ("change", "message"),
    [({"width": 256}, "64 or 128 wide, not 256"), ({"width": 32}, "not 32"), ({"mixed": True}, "different dtypes")],
)
def test_what_the_kernels_decline_takes_two_passes(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(1, 20, 1, change.get("width", 64), 2)
    tensors = case.tensors()
    weight = tensors["weight"].bfloat16() if change.get("mixed") else tensors["weight"]
    reason = expansion.why_not(tensors["y"], weight)
    assert reason is not None and message in reason
    monkeypatch.setattr(expansion, "forward_kernel", None)
    if not change.get("mixed"):
        assert error(case, torch.float32) < TOLERANCE[torch.float32]


def test_only_bfloat16_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "interpreting", lambda: False)
    y, weight = torch.zeros(1, 4, 1, 64), torch.zeros(1, 64, 128)
    assert expansion.why_not(y, weight) == "the product is built for bfloat16, not for float32"
    reason = expansion.why_not(y.bfloat16(), weight.bfloat16())
    assert reason is None if launch.interpreting() else "CUDA" in str(reason)


def test_programs_are_as_short_as_it_takes_to_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "processors", lambda _: 132)
    shape = (8, 4096, 8, 128)
    grid, chunks = expansion._launch(torch.empty(shape, device="meta"), 64)
    # 64 tiles of 8 x 8 tokens a row: 4 programs of 16.
    assert (grid, chunks) == ((64, 4, 8), 16)
    grid, chunks = expansion._launch(torch.empty((1, 4096, 8, 128), device="meta"), 16)
    assert chunks == 1 and grid == (16, 64, 1)
    for rows, length in ((1, 1), (3, 777), (64, 100_003)):
        grid, chunks = expansion._launch(torch.empty((rows, length, 8, 128), device="meta"), 64)
        assert grid[1] * chunks * 64 >= length and 1 <= chunks <= expansion.LONGEST and grid[2] == rows


@interpreted
@pytest.mark.parametrize("grafted", [False, True])
def test_a_layer_expands_in_one_launch(grafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[bool] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                launched.append(constants["GRAFTED"])
                expansion_forward.forward_kernel[grid](*args, **constants)

            return launch

    monkeypatch.setattr(expansion, "forward_kernel", Counted())
    # The backward takes one row of the batch after the other.
    monkeypatch.setattr(delta_plan, "WORKSPACE", 1)
    sizes = {"num_heads": 1, "key_dim": 64, "value_dim": 16}
    config = sizes | {"expansion": {"kind": "headwise", "factor": 2, "grafted": grafted}}
    found = layer_errors(config, 16, torch.float32, monkeypatch, rows=2)
    assert launched == [grafted, grafted]  # queries and keys, in the forward alone
    # float32 arithmetic; a few gradients are small beside the terms they are sums of.
    assert all(error < 5 * LAYER_TOLERANCE[torch.float32] for error in found.values()), found


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_through_an_activation(name: str) -> None:
    y, d_active, out = (torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    expanded._Maker(ACTIVATIONS[name], False).through_activation(y, d_active, out)
    leaf = y.clone().requires_grad_()
    ACTIVATIONS[name](leaf).backward(d_active)
    # The same operations, in the same dtype.
    assert torch.equal(out, leaf.grad)
    expanded._Maker(ACTIVATIONS[name], False).through_activation(y, d_active, d_active)
    assert torch.equal(d_active, leaf.grad)
