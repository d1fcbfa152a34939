"""The Triton kernels of gated linear attention in Triton's CPU interpreter, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import gated_linear_attention
from longrecall.ops.backends import why_no_kernel
from tests.conftest import MIXERS
from tests.ops.test_recurrences import make

pytest.importorskip("triton")
linear_attention = pytest.importorskip("longrecall.ops.linear_attention.triton.chunked")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

pytestmark = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu.py")

CASES = ["no_decay", "head_decay", "channel_decay", "grouped", "merged", "merged_head_decay", "merged_channel_decay"]
SMALL = (1, 2, 5, 7)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in few tokens; two sub-blocks of 16 in each."""
    monkeypatch.setattr(linear_attention, "CHUNK", 32)


def keep_wide(inputs: list) -> list:
    """Decays, mixing and state stay float32 whatever the dtype of q, k and v."""
    return [*inputs[:3], *(None if x is None else x.float() for x in inputs[3:])]


def run(op: Callable, inputs: list, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and the gradients of a fixed random scalar, by name, in float64; inputs computed with as `dtype`."""
    leaves = [None if x is None else (x if dtype is None else x.to(dtype)).clone().requires_grad_() for x in inputs]
    o, final = op(*leaves[:-1], initial_state=leaves[-1], backend=backend)
    g = torch.Generator().manual_seed(9)
    # In the dtype of v, so that both sides get the same gradient of o.
    weights = [torch.randn(o.shape, generator=g).to(inputs[2].dtype), torch.randn(final.shape, generator=g)]
    o.backward(weights[0].to(o), retain_graph=True)
    final.backward(weights[1].to(final))
    names = ["q", "k", "v", "log_decay", *(["mixing"] if len(inputs) == 6 else []), "state"]
    found = {"o": o, "final": final}
    found |= {f"d {name}": x.grad for name, x in zip(names, leaves, strict=True) if x is not None}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float = 1e-12) -> dict[str, float]:
    """Largest error of each tensor, relative to its largest entry (at least `floor`); NaN counts as infinite."""
    result = {}
    for name, right in expected.items():
        error = float((found[name] - right).abs().max() / max(float(right.abs().max()), floor))
        result[name] = error if error == error else float("inf")
    return result


def check(op: Callable, inputs: list, tolerance: float, floor: float = 1e-12) -> None:
    found = run(op, inputs, "triton", None)
    expected = run(op, inputs, "reference", torch.float64)
    wrong = {name: error for name, error in errors(found, expected, floor).items() if not error < tolerance}
    assert not wrong


@pytest.mark.parametrize("case", ["channel_decay", "merged_head_decay"])
def test_wide_heads_are_cut_into_blocks(case: str) -> None:
    op, inputs = make(case, 17, torch.float32, sizes=(1, 1 if case == "channel_decay" else 2, 70, 66))
    check(op, inputs, 5e-6)


@pytest.mark.parametrize("case", ["head_decay", "channel_decay"])
def test_long_sequences_are_cut_into_segments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "CHUNK", 16)
    op, inputs = make(case, 70, torch.float32, sizes=(1, 1, 5, 7))
    # Two chunks, then two, then one.
    monkeypatch.setattr(linear_attention, "SEGMENT_BYTES", 2 * inputs[-1].numel() * 4)
    check(op, inputs, 5e-6)


@pytest.mark.parametrize("case", ["head_decay", "channel_decay"])
@pytest.mark.parametrize("strength", [1e-4, 20.0, 1e4])
def test_extreme_decays_stay_finite_and_right(case: str, strength: float) -> None:
    op, inputs = make(case, 40, torch.float32, strength=strength, sizes=(1, 1, 5, 7))
    # As for the chunked backend: cumulative decays of up to 32 * 30 have low bits of 1e-4, and where everything is
    # forgotten at once the true gradient of the decay is below 1e-4, and 0 is as good.
    check(op, inputs, 1e-3 if strength > 1 else 5e-6, floor=1.0)


@pytest.mark.parametrize("case", ["head_decay", "channel_decay"])
def test_weak_decays_after_a_strong_one_keep_their_bits(case: str) -> None:
    op, inputs = make(case, 20, torch.float32, strength=0.1, sizes=(1, 1, 5, 7))
    inputs[3][:, 3] = -1e5
    # Beside -1e5 a sum in float32 knows 0.1 to 8e-3; taken as -30 it costs nothing that float32 could show.
    check(op, inputs, 5e-5, floor=1.0)


def test_many_heads_of_narrow_states_have_wide_tiles_of_keys() -> None:
    op, inputs = make("grouped", 40, torch.bfloat16, sizes=(1, 2, 140, 9))
    # Two tiles of keys where chunks are walked, three where gradients of keys add up; rounding as above.
    check(op, keep_wide(inputs), 3e-2)


def test_values_may_be_wider_than_queries() -> None:
    """Mamba-2 multiplies its values by a float32 step: the output stays float32, products round to bfloat16."""
    op, inputs = make("grouped", 20, torch.bfloat16, sizes=(1, 2, 8, 9))
    inputs = keep_wide(inputs)
    inputs[2] = inputs[2].float()
    o, _ = op(*inputs[:-1], initial_state=inputs[-1], backend="triton")
    assert o.dtype == torch.float32
    check(op, inputs, 3e-2)


def test_what_kernels_decline_is_said() -> None:
    q = torch.zeros(1, 20, 1, 8)
    with pytest.raises(ValueError, match=r'backend "triton" cannot serve this call .*float64'):
        gated_linear_attention(q.double(), q.double(), q.double(), None, backend="triton")
    wide = torch.zeros(1, 2, 1, 1025)
    with pytest.raises(ValueError, match="at most 1024 wide; got keys of 1025"):
        gated_linear_attention(wide, wide, q[:, :2], None, backend="triton")
    assert why_no_kernel("generalised_delta_rule", {"v": q}) == "generalised_delta_rule has no kernel"


def test_the_environment_can_name_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = linear_attention.gated_linear_attention
    monkeypatch.setattr(linear_attention, "gated_linear_attention", lambda **kw: calls.append(1) or original(**kw))
    q = torch.randn(1, 20, 1, 8, generator=torch.Generator().manual_seed(0))
    gated_linear_attention(q, q, q, None)
    assert not calls  # the CPU is never left to the interpreter
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    gated_linear_attention(q, q, q, None)
    assert calls
    gated_linear_attention(q, q, q, None, backend="chunked")
    assert len(calls) == 1
    monkeypatch.setenv("LONGRECALL_BACKEND", "tritn")
    with pytest.raises(ValueError, match='Did you mean "triton"'):
        gated_linear_attention(q, q, q, None)


@pytest.mark.parametrize("name", ["gla_merged", "mamba2_groups", "before_gate", "none"])
def test_layers_give_the_same_on_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixer = mixer_config(MIXERS.get(name) or MIXERS["mamba2_groups"] | {"gated_norm": name}).build(16)
    x, mask = torch.randn(1, 20, 16), torch.arange(20)[None] >= 3
    found = []
    for chosen in ("chunked", "triton"):
        monkeypatch.setenv("LONGRECALL_BACKEND", chosen)
        y, state = mixer(x, None, mask=mask, position=torch.zeros(1, dtype=torch.long))
        gradients = torch.autograd.grad(y.square().sum() + state["recurrent"].sum(), list(mixer.parameters()))
        found.append([y, state["recurrent"], *gradients])
    for kernel, plain in zip(found[1], found[0], strict=True):
        # float32 on both sides, in another order.
        assert float((kernel - plain).detach().abs().max()) < 1e-5 * float(plain.detach().abs().max())
