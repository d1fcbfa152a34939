"""Heads that the backward makes again: groups of rows, states, launches. The numbers: see test_triton_delta.py."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from longrecall.layers.mixers.delta_net import DeltaNet, GatedDeltaNetConfig
from longrecall.ops.execution import unread_states

delta_plan = pytest.importorskip("longrecall.ops.delta_rule.triton.plan")
expanded = pytest.importorskip("longrecall.ops.delta_rule.triton.expanded")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

pytestmark = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1; see test_gpu_delta.py")

ROWS, TOKENS, WIDTH, SUBHEADS = 2, 17, 16, 2
PARTS = ("queries", "keys", "values")


def tensors(expansion: bool, grafted: bool, seed: int = 0) -> dict[str, Tensor | None]:
    """What `expanded_delta_rule` reads: a key head of 16 channels, two subheads or none, a value head."""
    g = torch.Generator().manual_seed(seed)
    factor = SUBHEADS if expansion else 1
    found: dict[str, Tensor | None] = {}
    for part in PARTS:
        made, wide = (factor - grafted) * WIDTH, 1 if part == "values" else factor
        found[f"{part} projected"] = torch.randn(ROWS, TOKENS, 1, WIDTH, generator=g)
        weight = torch.randn(1, WIDTH, made, generator=g) * WIDTH**-0.5
        found[f"{part} weight"] = weight if expansion and part != "values" else None
        found[f"{part} taps"] = torch.randn(wide * WIDTH, 4, generator=g)
        found[f"{part} state"] = torch.randn(ROWS, wide * WIDTH, 3, generator=g)
    found["log decay"] = -0.1 * torch.rand(ROWS, TOKENS, factor, generator=g)
    found["beta"] = torch.rand(ROWS, TOKENS, factor, generator=g)
    found["state"] = torch.randn(ROWS, factor, WIDTH, WIDTH, generator=g)
    found["weights"] = torch.randn(1, factor, generator=g) if grafted else None
    return found


def call(given: dict[str, Tensor | None], grafted: bool) -> tuple[Tensor, Tensor]:
    heads = {
        part: expanded.Heads(*(given[f"{part} {name}"] for name in ("projected", "weight", "taps", "state")))
        for part in PARTS
    }
    rest = {name: given[name.replace("_", " ")] for name in ("log_decay", "beta", "state", "weights")}
    out, final = expanded.expanded_delta_rule(**heads, **rest, activation=functional.silu, grafted=grafted, scale=0.25)
    return out, final


def results(given: dict[str, Tensor | None], grafted: bool) -> dict[str, Tensor]:
    """Outputs, final states and the gradient of every input of a fixed random scalar."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in given.items()}
    out, final = call(leaves, grafted)
    g = torch.Generator().manual_seed(1)
    sum((x * torch.randn(x.shape, generator=g)).sum() for x in (out, final)).backward()
    gradients = {f"d {name}": x.grad for name, x in leaves.items() if x is not None and x.grad is not None}
    assert len(gradients) == sum(x is not None for x in given.values())
    return {"out": out.detach(), "final": final.detach(), **gradients}


@functools.cache
def at_once(expansion: bool, grafted: bool) -> dict[str, Tensor]:
    """The `results` of all rows at once, which two tests compare with."""
    return results(tensors(expansion, grafted), grafted)


KINDS = pytest.mark.parametrize(("expansion", "grafted"), [(True, True), (False, False)], ids=str)


@KINDS
def test_row_after_row_from_turned_states_finds_what_all_rows_find_at_once(
    expansion: bool, grafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, whole = tensors(expansion, grafted), at_once(expansion, grafted)
    monkeypatch.setattr(delta_plan.Plan, "group_rows", lambda *_, **__: 1)
    turned = dict(given)
    for part in PARTS:
        state = given[f"{part} state"]
        assert state is not None
        turned[f"{part} state"] = state.transpose(1, 2).contiguous().transpose(1, 2)
    found = results(turned, grafted)
    assert found.keys() == whole.keys()
    for name, x in whole.items():
        # Sums over tokens, and products on a CPU, add up in another order: a few roundings of float32.
        assert float((found[name] - x).norm()) < 2e-6 * float(x.norm()), name


@KINDS
def test_what_was_saved_may_come_back_laid_out_anew(expansion: bool, grafted: bool) -> None:
    given, expected = tensors(expansion, grafted), at_once(expansion, grafted)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, torch.Tensor.contiguous):
        found = results(given, grafted)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("end", [0, 1], ids=["out", "final"])
def test_no_state_is_a_state_of_zeros(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In outputs, final states and gradients, as a gradient of zeros is none; that of the first state is found too."""
    monkeypatch.setattr(f"{__name__}.ROWS", 1)
    given = tensors(False, False)
    leaves = {name: None if x is None else x.requires_grad_("state" not in name) for name, x in given.items()}
    wanted = [x for x in leaves.values() if x is not None and x.requires_grad]
    zeros = torch.zeros(ROWS, 1, WIDTH, WIDTH, requires_grad=True)
    with_zeros = call(leaves | {"state": zeros}, grafted=False)
    upstream = [torch.zeros_like(x) for x in with_zeros]
    upstream[end] = torch.randn(upstream[end].shape, generator=torch.Generator().manual_seed(1))
    *expected, d_zeros = torch.autograd.grad(with_zeros, [*wanted, zeros], upstream)
    without = call(leaves | {"state": None}, grafted=False)
    found = torch.autograd.grad(without[end], wanted, upstream[end])
    pairs = zip((*without, *found), (*with_zeros, *expected), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert d_zeros.any()


def test_no_state_is_a_state_of_zeros_where_segments_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "segments", lambda *_, **__: 2)
    for name, size in (("ROWS", 1), ("TOKENS", 65)):
        monkeypatch.setattr(f"{__name__}.{name}", size)
    given = tensors(False, False)
    with torch.no_grad():
        zeros, none = (call(given | {"state": state}, False) for state in (torch.zeros(ROWS, 1, WIDTH, WIDTH), None))
    assert all(torch.equal(x, y) for x, y in zip(none, zeros, strict=True))


class Counted(TorchDispatchMode):
    """Counts the operations of torch that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_from_nothing_makes_and_copies_no_state_and_sums_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(True, False) | {"state": None}
    for part in PARTS:
        projected, taps = given[f"{part} projected"], given[f"{part} taps"]
        given[f"{part} state"] = expanded.convolution.no_inputs(projected, taps)
    leaves = {name: None if x is None else x.requires_grad_("state" not in name) for name, x in given.items()}
    monkeypatch.setattr(delta_plan.Plan, "group_rows", lambda *_, **__: 1)
    # Gradients are found by the thread that is looked at.
    with torch.autograd.set_multithreading_enabled(False), Counted() as counted:
        out = call(leaves, False)[0]
        torch.autograd.grad(out, [x for x in leaves.values() if x is not None and x.requires_grad], out)
    found = counted.found
    assert not any(found[name] for name in ("clone", "_to_copy", "zeros", "new_zeros", "zeros_like", "zero_")), found
    # Both expansions' weights over groups of rows; a kernel adds up the taps, which groups leave in one place.
    assert found["sum"] == 2 and not found["cat"] and not found["stack"], found
    # Once forward and once back for all rows, of queries and of keys.
    assert found["silu"] == 4 and found["silu_backward"] == 2 * ROWS, found


@pytest.mark.parametrize("expansion", [{}, {"expansion": {"kind": "headwise", "factor": 2}}], ids=["plain", "wide"])
def test_unread_states_change_no_output(expansion: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    torch.manual_seed(0)
    config = GatedDeltaNetConfig.from_dict({"num_heads": 1, "key_dim": WIDTH, "value_dim": WIDTH, **expansion})
    layer: DeltaNet = config.build(8)
    x, options = torch.randn(2, TOKENS, 8), {"mask": None, "position": torch.zeros(2, dtype=torch.long)}
    y, state = layer(x, None, **options)
    with unread_states():
        found, kept = layer(x, None, **options)
    assert torch.equal(found, y) and torch.equal(kept["recurrent"], state["recurrent"])
    # Only what takes launches of its own is left out.
    assert set(state) - set(kept) == {"q_conv", "k_conv", "v_conv"}
