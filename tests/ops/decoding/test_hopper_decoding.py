"""The decoding step in Gluon against float64: its mathematics, on the CPU; test_gpu_decoding_hopper.py runs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from longrecall.ops.decoding.hopper import recurrence as decoding
from longrecall.ops.decoding.op import KEYS, STEP
from longrecall.ops.decoding.triton.recurrence import Gate, recurrence
from longrecall.ops.kernels.dependent_launch import PREFETCHING, WAITING
from tests.ops.decoding.test_triton_step import expected_step
from tests.ops.gluon_emulation import install

KINDS = [
    ("channel", False, 2, 2, 1),
    ("fixed", False, 2, 2, 1),
    (None, False, 2, 1, 1),
    ("step", False, 1, 4, 1),
    ("delta", True, 2, 2, 1),
    ("delta", True, 4, 4, 2),
    (None, True, 2, 4, 1),
    ("channel", True, 2, 2, 1),
]
"""Gate, delta rule or not, key heads, value heads, subheads that share a value head."""


def a_step(
    kind: str | None, delta: bool, key_heads: int, value_heads: int, share: int, rows: int, K: int, V: int, device: str,
    *, normalise: bool = True, skip: bool = False, seed: int = 0,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """Output and new state of `recurrence` for random inputs in bfloat16, and of the same in float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device).bfloat16()

    heads = max(key_heads, value_heads)
    q, k, v = draw(rows, key_heads, K), draw(rows, key_heads, K), draw(rows, value_heads // share, V)
    if delta and not normalise:
        k = F.normalize(k.float(), dim=-1).bfloat16()
    raw = draw(heads) if kind == "fixed" else draw(rows, key_heads * K if kind == "channel" else heads)
    raw = -raw.abs() if kind == "fixed" else raw
    parameters = (draw(heads), draw(heads)) if kind in ("delta", "step") else (None, None)
    gate = Gate(kind, None if kind is None else raw, *parameters, divisor=8.0, low=0.2, high=1.5)
    beta = draw(rows, heads) if delta else None
    D = draw(heads) if skip else None
    state = draw(rows, heads, K, V)
    expected = expected_step(q, k, v, state, gate, share, beta, normalise=normalise, skip=D)
    found = recurrence(
        q.flatten(1), k.flatten(1), v.flatten(1), state, gate,
        scale=0.3, key_heads=key_heads, value_heads=value_heads // share, share=share, beta=beta, normalise=normalise,
        skip=D,
    )  # fmt: skip
    return (found, state), expected


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Float32 sums of up to 512 terms, approximate exponentials, and a state rounded to 8 bits."""
    size = float(expected[0].abs().max())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-5, atol=1e-5 * max(size, 1.0))
    torch.testing.assert_close(found[1].double(), expected[1], rtol=2**-8 + 2e-5, atol=2e-5)


def name_of(kind: tuple) -> str:
    """The kernel that serves a kind."""
    return "delta_step_kernel" if kind[1] else "gated_step_kernel"


@pytest.mark.parametrize(
    ("K", "V", "early"), [(64, 64, 0), (64, 192, WAITING), (128, 128, PREFETCHING), (256, 64, PREFETCHING)]
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_emulated(kind: tuple, K: int, V: int, early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch, early)
    check(*a_step(*kind, 2, K, V, "cpu"))
    assert ran == [name_of(kind)]


def test_more_chunks_than_the_ring_has(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, ring, _ = decoding.chunks(256, 128)
    assert 256 // chunk > ring
    ran = install(monkeypatch, PREFETCHING)
    check(*a_step(*KINDS[0], 1, 256, 128, "cpu"))
    assert ran == ["gated_step_kernel"]


@pytest.mark.parametrize("options", [{"normalise": False}, {"skip": True}], ids=str)
@pytest.mark.parametrize("kind", [KINDS[3], KINDS[4]], ids=str)
def test_emulated_options(kind: tuple, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(monkeypatch)
    check(*a_step(*kind, 1, 64, 64, "cpu", **options))
    assert ran == [name_of(kind)]


def test_small_steps_are_right_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a zero state the new one is the step itself, also where that is almost 0."""
    ran = install(monkeypatch)
    raw = torch.tensor([-80.0, -30.0, -12.0, -3.0, -0.1, 0.0, 0.3, 5.0, 19.0, 100.0])
    none, one = torch.zeros(len(raw)), torch.ones(1, len(raw) * 64)
    state = torch.zeros(1, len(raw), 64, 64).bfloat16()
    y = recurrence(
        one[:, :64].clone(), one[:, :64].clone(), one, state, Gate("step", raw[None], none, none),
        scale=1 / 64, key_heads=1, value_heads=len(raw),
    )  # fmt: skip
    assert ran == ["gated_step_kernel"]
    # Exponentials of float32 with arguments up to 80 * log2 e.
    expected = F.softplus(raw.double())[None, :, None].expand(y.shape)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=0)


def test_what_it_declines() -> None:
    def why_not(state: Tensor, states: int = 2) -> str:
        return str(STEP.why_not(state, keys=state.shape[2], values=state.shape[3], states=states, processors=1))

    for K, V in ((48, 64), (1024, 64), (64, 32), (128, 96)):
        assert "keys" in why_not(torch.zeros(1, 1, K, V).bfloat16())
    assert "too few" in why_not(torch.zeros(1, 1, 64, 64).bfloat16(), states=1)
    assert "float32" in why_not(torch.zeros(1, 1, 64, 64))
    assert "CUDA" in why_not(torch.zeros(1, 1, 64, 64).bfloat16())


@pytest.mark.parametrize("V", [64, 128, 192])
@pytest.mark.parametrize("K", KEYS)
def test_tiles_cover_a_state_and_fit(K: int, V: int) -> None:
    width = decoding.width(K, V, delta=True)
    warps = decoding.delta_warps(K, width)
    assert V % width == 0 and warps in (1, 2, 4)
    # Rows that the threads hold at once are no more than there are.
    assert decoding.ROWS * 32 // (width // 8) * warps <= K
    # Three programs at least share a multiprocessor's memory.
    assert 2 * K * width * 3 <= 227 * 1024


@pytest.mark.parametrize("V", [64, 128, 192])
@pytest.mark.parametrize("K", KEYS)
def test_chunks_cover_a_state_and_fit(K: int, V: int) -> None:
    width = decoding.width(K, V, delta=False)
    chunk, ring, warps = decoding.chunks(K, width)
    assert V % width == 0 and K % chunk == 0 and 1 <= ring <= K // chunk
    # Threads hold a chunk once or more, and all the same number of keys.
    assert chunk % (decoding.ROWS * 32 // (width // 8) * warps) == 0
    # Four programs at least share a multiprocessor's memory, keys, queries and decays included.
    assert (2 * ring * chunk * width + 3 * 4 * K) * 4 <= 223 * 1024
