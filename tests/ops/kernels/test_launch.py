"""Launches that remember what they compiled: the same kernel for arguments of a kind, Triton's own way for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from longrecall.errors import UserError  # noqa: E402
from longrecall.ops.execution import prefetching  # noqa: E402
from longrecall.ops.kernels import dependent_launch, launch  # noqa: E402


def scaled(x, out, size, factor, BLOCK: tl.constexpr, EXTRA: tl.constexpr = 3):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < size) * factor + EXTRA, mask=place < size)


class Compiled:
    """In the place of a compiled kernel: what it was launched with, and through Triton's own way or not."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, tuple[Any, ...]]] = []
        self.by_triton: list[tuple[Any, tuple[Any, ...]]] = []

    def run(self, *args: Any) -> None:
        assert args[3:9] == ("stream 0", "function", "metadata", None, None, None)
        self.launched.append((args[:3], args[9:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.by_triton.append((grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    kernel = launch.Kernel(scaled)
    kernel.made = []

    def run(*args: Any, grid: Any, warmup: bool, **constants: Any) -> Compiled:
        kernel.made.append((grid, args, constants))
        return Compiled()

    monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False)
    return kernel


def test_products_and_sums_are_fused_whatever_a_release_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda *_, **options: told.append(options))
    for made in (launch.Kernel(scaled), launch.FusedKernel(scaled)):
        made.run(1, grid=(1,), warmup=False)
        made.run(1, grid=(1,), warmup=False, enable_fp_fusion=False)
    assert [options["enable_fp_fusion"] for options in told] == [True, False] * 2


def test_the_same_kind_is_looked_up_once(kernel: Any) -> None:
    x, y = torch.zeros(2, 64)
    kernel[(4,)](x, y, 64, 0.5, BLOCK=64)
    kernel[(7, 2)](y, x, 64, 0.25, BLOCK=64)
    assert len(kernel.made) == 1 and kernel.made[0][0] == (4,)
    ((compiled, values),) = kernel.remembered.values()
    assert values == (64, 3)
    ((grid, args),) = compiled.launched
    # A compiled kernel takes constants too, by position, and a grid of three numbers.
    assert grid == (7, 2, 1) and args[0] is y and args[2:] == (64, 0.25, 64, 3)
    assert not compiled.by_triton


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("added", [True, False])
def test_hooks_are_called(kernel: Any, name: str, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own launch, which a profiler adds itself to, or takes the place of what is there."""
    x = torch.zeros(64)
    kernel[(4,)](x, x, 64, 0.5, BLOCK=64)
    runtime = triton.knobs.runtime
    if added:
        monkeypatch.setattr(getattr(runtime, name), "calls", [print])
    else:
        monkeypatch.setattr(runtime, name, print)
    kernel[(7, 2)](x, x, 64, 0.25, BLOCK=64)
    ((compiled, _),) = kernel.remembered.values()
    ((grid, args),) = compiled.by_triton
    assert not compiled.launched and grid == (7, 2, 1) and args[2:] == (64, 0.25, 64, 3)


def test_other_kinds_are_looked_up(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(80)
    usual = (x, x, 64, 0.5)
    kernel[(1,)](*usual, BLOCK=64)
    others: list[tuple[Any, ...]] = [
        (x.half(), x, 64, 0.5),
        (x[1:], x, 64, 0.5),
        (x, x, 63, 0.5),
        (x, x, 1, 0.5),
        (x, x, True, 0.5),
        (x, x, 64, 1),
    ]
    for index, args in enumerate(others):
        kernel[(1,)](*args, BLOCK=64)
        kernel[(1,)](*args, BLOCK=64)
        assert len(kernel.made) == index + 2
    kernel[(1,)](*usual, BLOCK=128)
    kernel[(1,)](*usual, BLOCK=64, EXTRA=4)
    kernel[(1,)](*usual, BLOCK=64, num_warps=8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kernel[(1,)](*usual, BLOCK=64)
    assert len(kernel.made) == len(others) + 5


class StandIn(torch.Tensor):
    """Some package's tensor, of which nobody knows what lies at its address."""


def test_what_cannot_be_read_is_refused_before_and_after_others_were_launched(kernel: Any) -> None:
    x, freed = torch.zeros(64), torch.zeros(64)
    freed.untyped_storage().resize_(0)
    for count in range(3):
        for wrong, said in ((torch.zeros(64).as_subclass(StandIn), "x is a StandIn"), (freed, "x has 64 numbers")):
            with pytest.raises(UserError, match=f"scaled: {said}"):
                kernel[(1,)](wrong, x, 64, 0.5, BLOCK=64)
        assert len(kernel.made) == min(count, 1)
        kernel[(1,)](x, x, 64, 0.5, BLOCK=64)
    # Triton's own launch, where ours does not know that of the installed release.
    with pytest.raises(UserError, match="scaled: out has 64 numbers, but its memory was freed"):
        launch.FusedKernel(scaled).run(x, freed, 64, 0.5, grid=(1,), warmup=False, BLOCK=64)


def test_what_is_remembered_stays_small(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_KINDS", 5)
    x = torch.zeros(64)
    for size in range(40):
        kernel[(1,)](x, x, size, 0.5, BLOCK=64)
        assert len(kernel.remembered) <= 5


def test_it_is_a_kernel_of_triton() -> None:
    kernel = launch.Kernel(scaled, do_not_specialize=["size"])
    assert isinstance(kernel, triton.JITFunction) and kernel.arg_names[:3] == ["x", "out", "size"]
    # With TRITON_INTERPRET=1 Triton runs the function itself.
    assert isinstance(launch.kernel(scaled), launch.Kernel) is not launch.interpreting()


class CompiledOtherwise(Compiled):
    """As a later Triton might: launched with other arguments."""

    def run(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:  # type: ignore[override]
        raise AssertionError("launched in a way that this Triton does not have")


@pytest.mark.parametrize("change", ["packed_metadata", "run"])
def test_a_triton_of_other_internals_launches_by_itself(
    kernel: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch then goes through Triton's own way, and nothing is remembered."""
    made = []

    def run(*args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        made.append((grid, args, constants))
        return CompiledOtherwise() if change == "run" else object()

    monkeypatch.setattr(kernel, "run", run)
    x = torch.zeros(64)
    for _ in range(3):
        kernel[(4,)](x, x, 64, 0.5, BLOCK=64)
    assert made == [((4,), (x, x, 64, 0.5), {"BLOCK": 64})] * 3 and not kernel.remembered


def test_a_triton_without_what_launches_need_makes_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    made = launch.kernel(scaled)
    assert isinstance(made, launch.Kernel) and launch.why_not_remembered(made) is None
    monkeypatch.setattr(triton.knobs, "runtime", object())
    assert "has no launch_enter_hook, launch_exit_hook" in str(launch.why_not_remembered(made))
    assert type(launch.kernel(scaled)) is launch.FusedKernel


def early_scaled(x, out, size, factor, BLOCK: tl.constexpr, EARLY: tl.constexpr = 0):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(x) * factor)


@pytest.mark.parametrize(("capability", "early"), [((8, 9), False), ((9, 0), True), ((12, 0), False)])
def test_early_launches(capability: tuple[int, int], early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, and another kernel where the caller has promised what may be read ahead."""
    kernel, made = launch.Kernel(early_scaled), []

    def run(*args: Any, grid: Any, warmup: bool, **constants: Any) -> Compiled:
        made.append(constants)
        return Compiled()

    monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    dependent_launch.serves.cache_clear()
    x = torch.zeros(64)
    for _ in range(2):
        kernel[(4,)](x, x, 64, 0.5, BLOCK=64)
        with prefetching():
            kernel[(4,)](x, x, 64, 0.5, BLOCK=64)
    dependent_launch.serves.cache_clear()
    options = [{"EARLY": dependent_launch.WAITING}, {"EARLY": dependent_launch.PREFETCHING}] if early else [{}, {}]
    assert made == [{"BLOCK": 64, **one, **({"launch_pdl": True} if early else {})} for one in options]
    values = [values for _, values in kernel.remembered.values()]
    assert values == [(64, one.get("EARLY", 0)) for one in options]


def test_early_launches_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "serves", lambda device: True)
    assert dependent_launch.options(0, prefetch=False) == {"EARLY": dependent_launch.WAITING, "launch_pdl": True}
    monkeypatch.setenv(dependent_launch.SWITCH, "0")
    assert dependent_launch.options(0, prefetch=True) == {}
