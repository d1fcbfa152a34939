"""Kernels that are launched while the one before is at work: what they use before they have waited for it.

Triton's interpreter runs one kernel after the other, so nothing goes wrong there. Here it says what a kernel reads and
writes, and when it waits: see longrecall/ops/kernels/dependent_launch.py. What torch writes between two kernels counts
as well.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels do not run in Triton's interpreter where there is a GPU", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpreterBuilder

from longrecall.inference.step import DecodingStep
from longrecall.models.captured_steps import parts_of
from longrecall.models.config import RecurrentConfig
from longrecall.models.quantising import quantise
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.decoding.triton import attention as attention_decoding
from longrecall.ops.decoding.triton import elementwise as decoding
from longrecall.ops.decoding.triton import products as small_products
from longrecall.ops.decoding.triton import recurrence as decoding_recurrence
from longrecall.ops.decoding.triton import retrieval as retrieval_decoding
from longrecall.ops.decoding.triton import wide_products
from longrecall.ops.execution import may_prefetch
from longrecall.ops.kernels import dependent_launch
from tests.conftest import MIXERS

MODULES = (attention_decoding, decoding, decoding_recurrence, retrieval_decoding, small_products, wide_products)

ROOM = {"retrieval": 12, "hymba": 12, "attention": 140}
"""For models whose state grows; in the last the keys are split among programs."""


Span = tuple[int, int]
"""Addresses of a storage, from the first to the one after the last."""


def span(x: torch.Tensor) -> Span:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def within(addresses: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Which of the addresses are in one of the spans."""
    found = np.zeros(addresses.shape, bool)
    for first, end in spans:
        found |= (addresses >= first) & (addresses < end)
    return found


class Watch:
    """What the programs of a launch do, in their order."""

    def __init__(self, early: int) -> None:
        self.early, self.waiting, self.programs, self.ahead = early, False, 0, 0
        self.owned: list[Span] = []
        """What may be read ahead."""
        self.written: list[np.ndarray] = []
        """Addresses, by the programs of the last launch so far."""
        self.before = np.zeros(0, np.int64)
        """Addresses that the kernel before has written, if it is one of ours."""
        self.by_torch: list[Span] = []
        """What it has written if it is one of torch's."""
        self.running = False
        self.launches: set[str] = set()

    def launch(self, name: str, kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        self.launches.add(name)
        self.before = np.concatenate([*self.written, np.zeros(0, np.int64)])
        self.written, self.running = [], True
        early = self.early if may_prefetch() else min(self.early, dependent_launch.WAITING)
        kernel[grid](*args, **constants, EARLY=early)
        self.end()
        self.by_torch, self.running = [], False

    def begin(self) -> None:
        """Of a program."""
        self.end()
        self.programs, self.waiting = self.programs + 1, True

    def end(self) -> None:
        assert not self.waiting, "a program has not waited for the kernel before"

    def wait(self) -> None:
        self.waiting = False

    def let_next(self) -> None:
        assert not self.waiting, "the next kernel may come before the one before this has ended"

    def read(self, addresses: np.ndarray) -> None:
        if self.waiting and addresses.size:
            assert self.early == dependent_launch.PREFETCHING, "read before the kernel before has ended"
            self.ahead += 1
            assert within(addresses, self.owned).all(), "what is read ahead is neither a weight nor a state"
            assert not np.isin(addresses, self.before).any(), "read ahead while the kernel before may still write it"
            assert not within(addresses, self.by_torch).any(), "read ahead while torch may still write it"

    def write(self, addresses: np.ndarray) -> None:
        assert not self.waiting, "written before the kernel before has ended"
        self.written.append(addresses)


class Torch(TorchDispatchMode):
    """What torch's kernels write between ours. Each of them waits for all before it."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        uses = [argument.alias_info for argument in function._schema.arguments]
        changed = [x for x, use in zip(args, uses, strict=False) if use is not None and use.is_write]
        if not any(uses) and "empty" not in str(function):
            changed.append(out)
        tensors = [x for x in tree_leaves(changed) if isinstance(x, torch.Tensor)]
        if tensors and not self.watch.running:
            self.watch.by_torch, self.watch.written = [span(x) for x in tensors], []
        return out


class Early:
    """A kernel that is launched early."""

    def __init__(self, watch: Watch, name: str, kernel: Any) -> None:
        self.watch, self.name, self.kernel = watch, name, kernel

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.watch.launch, self.name, self.kernel, grid)


def early_kernels(module: Any) -> list[tuple[str, Any]]:
    """The kernels of a module that can be launched early, by name."""
    kernels = [(name, found) for name, found in vars(module).items() if name.endswith("_kernel")]
    return [(name, found) for name, found in kernels if dependent_launch.CONSTANT in found.arg_names]


def watched(early: int, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Have all kernels that can be launched early launched so."""
    watch = Watch(early)
    for module in MODULES:
        for name, kernel in early_kernels(module):
            monkeypatch.setattr(module, name, Early(watch, name, kernel))
    monkeypatch.setattr(dependent_launch, "gdc_wait", watch.wait)
    monkeypatch.setattr(dependent_launch, "gdc_launch_dependents", watch.let_next)
    builder = InterpreterBuilder
    set_place, load, store = builder.set_grid_idx, builder.create_masked_load, builder.create_masked_store

    def placed(self: Any, x: int, y: int, z: int) -> None:
        watch.begin()
        set_place(self, x, y, z)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.read(pointers.data[mask.data.astype(bool)].astype(np.int64))
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.write(pointers.data[mask.data.astype(bool)].astype(np.int64))
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "set_grid_idx", placed)
    monkeypatch.setattr(builder, "create_masked_load", loaded)
    monkeypatch.setattr(builder, "create_masked_store", stored)
    return watch


def model_of(name: str) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[name], "mlp_size": 24}]
    return RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).eval()


def logits_of(model: RecurrentLM, rows: int, watch: Watch | None = None) -> list[torch.Tensor]:
    """Of two steps from nothing."""
    step = DecodingStep(model, rows, fused=True, room=ROOM.get(model.config.layer_configs()[0].mixer.type, 0))
    found = []
    with contextlib.nullcontext() if watch is None else Torch(watch):
        if watch is not None:
            states = [x for buffers in step.buffers for x in buffers.values()]
            own = (*model.parameters(), *model.buffers(), *states)
            watch.owned = [span(part) for x in own for part in parts_of(x)]
        for token in range(2):
            step.ids.copy_((7 * token + 3 * torch.arange(rows)) % 40)
            found.append(step().clone())
    return found


LINEAR = {"_recurrence_kernel", "_conv_kernel", "_gated_norm_kernel"}
KERNELS = {
    "gla_conv": LINEAR,
    "gated_delta_net": LINEAR,
    "mamba2": LINEAR,
    "attention": {"_attend_kernel", "_merge_kernel"},
    "hymba": {"_recurrence_kernel", "_attend_kernel"},
    "retrieval": {*LINEAR, "_choose_kernel", "_read_kernel"},
}


def uses(name: str, rows: int) -> set[str]:
    """The kernels of a step."""
    few = {"_project_kernel", "_gate_up_kernel", "_add_product_kernel"}
    blending = {"_blend_products_kernel" if rows == 1 else "_blend_kernel"} if name == "retrieval" else set()
    few |= {"_product_kernel"} if name == "gla_conv" else set()
    return KERNELS[name] | blending | (few if rows == 1 else {"_add_norm_kernel", "_silu_product_kernel"})


CASES = [
    *[(name, 1, dependent_launch.PREFETCHING, 100) for name in KERNELS],
    ("gla_conv", 5, dependent_launch.PREFETCHING, 100),
    ("gla_conv", 1, dependent_launch.PREFETCHING, 1),
    ("retrieval", 5, dependent_launch.PREFETCHING, 1),
    ("gla_conv", 1, dependent_launch.WAITING, 100),
    ("retrieval", 1, dependent_launch.WAITING, 100),
]
"""Mixer, rows, early, and multiprocessors: few programs read their states ahead."""


# The logarithm of no key at all, where keys are split.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
@pytest.mark.parametrize(("name", "rows", "early", "processors"), CASES)
@torch.no_grad()
def test_what_steps_use_before_they_have_waited(
    name: str, rows: int, early: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decoding_recurrence, attention_decoding):
        monkeypatch.setattr(module, "processors", lambda x: processors)
    model = model_of(name)
    expected = logits_of(model, rows)
    watch = watched(early, monkeypatch)
    found = logits_of(model, rows, watch)
    assert watch.launches >= uses(name, rows)
    assert watch.programs and (watch.ahead > 0) == (early == dependent_launch.PREFETCHING)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not may_prefetch()


@torch.no_grad()
def test_the_bytes_of_quantised_weights_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are weights like others; their scales are read after the wait."""
    pytest.importorskip("torchao")
    model = model_of("gla_conv")
    quantise(model, "int8")
    expected = logits_of(model, 1)
    watch = watched(dependent_launch.PREFETCHING, monkeypatch)
    found = logits_of(model, 1, watch)
    assert watch.launches >= uses("gla_conv", 1) and watch.ahead
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


WIDE = {"_wide_product_kernel", "_wide_gate_up_kernel"}


@torch.no_grad()
def test_weights_of_wide_products_are_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gla_conv").to(torch.bfloat16)
    expected = logits_of(model, 5)
    watch = watched(dependent_launch.PREFETCHING, monkeypatch)
    found = logits_of(model, 5, watch)
    assert watch.launches >= WIDE | {"_add_norm_kernel"} and watch.ahead
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_every_kernel_is_watched() -> None:
    """A kernel that can be launched early has a case here."""
    used = WIDE.union(*(uses(name, rows) for name, rows, *_ in CASES))
    assert used == {name for module in MODULES for name, _ in early_kernels(module)}
