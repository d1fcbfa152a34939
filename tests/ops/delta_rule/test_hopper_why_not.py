"""When kernels for Hopper leave a call to plain ones: told from tensors that only say they are on such a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.ops import hopper_kernels
from longrecall.ops.backends import OPS
from longrecall.ops.delta_rule.triton import chunked as delta_rule
from longrecall.ops.expansion.triton.expansion import serves_on_hopper
from longrecall.ops.hopper_kernels import HOPPER_KERNELS, HopperKernel, inside
from longrecall.ops.kernels import hopper, launch

SHAPE = (2, 16, 3, 64)


class OnHopper(Tensor):
    """A tensor on the CPU that takes itself for one on a GPU."""

    is_cuda = True  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


def heads(offset: int = 0) -> OnHopper:
    """Contiguous bfloat16 ``[B, T, H, D]``, `offset` numbers behind an address that is a multiple of 16 bytes."""
    size = torch.Size(SHAPE).numel()
    return torch.zeros(size + 8, dtype=torch.bfloat16)[offset : offset + size].view(SHAPE).as_subclass(OnHopper)


@pytest.fixture(autouse=True)
def _suitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_remembered", lambda device: None)
    monkeypatch.delenv(hopper.SWITCH, raising=False)


def test_the_switch_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper.why_not(heads()) is None
    monkeypatch.setenv(hopper.SWITCH, "0")
    assert hopper.why_not(heads()) == "LONGRECALL_GLUON is 0"


def test_what_asynchronous_copies_read_begins_at_multiples_of_16_bytes() -> None:
    assert hopper.why_not(heads(), heads()) is None
    for tensors in ((heads(1), heads()), (heads(), heads(4))):
        assert "multiples of 16 bytes" in str(hopper.why_not(*tensors))


def test_so_do_the_heads_of_an_expansion_and_those_it_grafts() -> None:
    weight = torch.zeros(3, 64, 128, dtype=torch.bfloat16).as_subclass(OnHopper)
    assert serves_on_hopper(heads(), weight, None) and serves_on_hopper(heads(), weight, heads())
    for tensors in ((heads(1), weight, heads()), (heads(), weight, heads(1)), (heads(), weight.float(), None)):
        assert not serves_on_hopper(*tensors)


def test_the_registry_says_which_of_them_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From shapes and devices alone: tensors without memory have no address."""
    monkeypatch.setattr(launch, "_processors", lambda _: 4)
    like = {name: heads() for name in "qkv"} | {"log_decay": None, "beta": torch.zeros(2, 16, 3)}
    rule = inside("gated_delta_rule", like, {})
    assert set(rule) == {"inverse of a chunk", "walk forward", "walk back", "gradients of queries and keys"}
    assert rule["inverse of a chunk"] is None and rule["walk forward"] == rule["walk back"]
    assert rule["walk back"] == "states must have 128 keys and 128 values, not 64 x 64"
    assert "expansion, convolution and norm" not in inside("expanded_delta_rule", like, {"expands": False})
    assert inside("expanded_delta_rule", like, {"expands": True})["expansion, convolution and norm"] is None
    many = torch.zeros(64, 4, 128, 64, dtype=torch.bfloat16).as_subclass(OnHopper)
    for state, reason in ((many[:, :, :48], "not 48 x 64"), (many[:0], "too few")):
        assert reason in str(inside("recurrent_step", {"state": state}, {})["step on many states"])
    assert "bfloat16, not float32" in str(inside("gated_delta_rule", {**like, "q": heads().float()}, {}))
    with pytest.raises(ValueError, match="already"):
        hopper_kernels.declare(HOPPER_KERNELS["walk back"])
    assert OPS.keys() >= {op for one in HOPPER_KERNELS.values() for op in one.ops}


@pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1")
def test_walks_ask_for_all_that_they_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse as well: what autograd kept may come back from a hook that laid it elsewhere."""
    asked: list[tuple[Tensor, ...]] = []

    def serves(kernel: HopperKernel, *tensors: Tensor, **_: Any) -> bool:
        if kernel.name.startswith("walk"):
            asked.append(tensors)
        return False

    monkeypatch.setattr(HopperKernel, "serves", serves)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 1, 16, generator=g) for _ in range(3))
    beta, state = torch.rand(1, 20, 1, generator=g), torch.zeros(1, 1, 16, 16)
    inputs = (q, k, *delta_rule.complete(v, None, beta, None, state))
    out, final, *solved = delta_rule.forward(1.0, *inputs)
    delta_rule.backward(1.0, inputs, (solved[0], solved[1]), out, final)
    assert len(asked) == 3, "forward, the walk again and back"

    def places(*tensors: Any) -> set[int]:
        return {x.data_ptr() for x in tensors}

    for tensors in asked:
        assert places(q, k, v, solved[0]) <= places(*tensors)
    assert out.data_ptr() in places(*asked[2])
