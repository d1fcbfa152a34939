"""The decoding step in Gluon on a Hopper GPU, against float64 and against the plain kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longrecall.ops.decoding.hopper import recurrence as decoding
from longrecall.ops.kernels import hopper
from tests.ops.decoding.test_hopper_decoding import KINDS, a_step, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.why_not(torch.zeros(1, device="cuda").bfloat16()) is not None,
        reason="needs a Hopper GPU and the Triton that the kernels are written for",
    ),
]

SIZES = [(133, 64, 64), (67, 128, 128), (35, 128, 192), (37, 256, 512), (71, 512, 64)]
"""Rows, keys and values: with two heads and more, more programs than multiprocessors."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """States of each launch of the kernel in Gluon."""
    found: list[int] = []
    launch = decoding.launch

    def counted(arguments: tuple, states: int, constants: dict) -> None:
        found.append(states)
        launch(arguments, states, constants)

    monkeypatch.setattr(decoding, "launch", counted)
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_the_step(
    kind: tuple, sizes: tuple[int, int, int], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = a_step(*kind, *sizes, "cuda", skip=True)
    check(found, expected)
    assert launches == [sizes[0] * max(kind[2:4])]
    monkeypatch.setenv(hopper.SWITCH, "0")
    plain, _ = a_step(*kind, *sizes, "cuda", skip=True)
    check(plain, expected)
    assert len(launches) == 1
    # Sums in another order: now and then the last rounding goes to the other neighbour.
    assert float((found[1] != plain[1]).float().mean()) < 5e-3


def test_without_a_norm(launches: list[int]) -> None:
    check(*a_step(*KINDS[4], 71, 128, 128, "cuda", normalise=False))
    assert launches


def test_few_states_are_left_to_the_plain_kernel(launches: list[int]) -> None:
    check(*a_step(*KINDS[4], 1, 128, 128, "cuda"))
    assert not launches


def test_no_two_launches_differ() -> None:
    first, again = (a_step(*KINDS[4], 71, 128, 128, "cuda")[0] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
