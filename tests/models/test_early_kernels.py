"""Kernels that are launched while the one before is at work: what they use before they have waited for it.

Triton's interpreter runs one kernel after the other, so nothing goes wrong there. Here it says what a kernel reads and
writes, and when it waits: see longrecall/ops/triton/dependent.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels do not run in Triton's interpreter where there is a GPU", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from longrecall.models.config import RecurrentConfig
from longrecall.models.decoding import DecodingStep
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.triton import (
    attention_decoding,
    decoding,
    decoding_recurrence,
    dependent,
    retrieval_decoding,
    small_products,
)
from tests.conftest import MIXERS

MODULES = (attention_decoding, decoding, decoding_recurrence, retrieval_decoding, small_products)

ROOM = 12


class Watch:
    """What the programs of a launch do, in their order."""

    def __init__(self, early: int) -> None:
        self.early, self.waiting, self.programs, self.ahead = early, False, 0, 0
        self.owned: list[tuple[int, int]] = []
        """Addresses of what may be read ahead, from the first to the one after the last."""
        self.written: list[np.ndarray] = []
        self.before = np.zeros(0, np.int64)
        """Addresses that the launch before has written."""
        self.launches: set[str] = set()

    def own(self, tensors: Iterator[torch.Tensor]) -> None:
        storages = {x.untyped_storage() for x in tensors}
        self.owned = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]

    def launch(self, name: str, kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        self.launches.add(name)
        self.before = np.concatenate([*self.written, np.zeros(0, np.int64)])
        self.written = []
        kernel[grid](*args, **constants, EARLY=self.early)
        self.end()

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
            assert self.early == dependent.AHEAD, "read before the kernel before has ended"
            self.ahead += 1
            inside = [(addresses >= first) & (addresses < end) for first, end in self.owned]
            assert np.logical_or.reduce(inside).all(), "what is read ahead is neither a weight nor a state"
            assert not np.isin(addresses, self.before).any(), "read ahead while the kernel before may still write it"

    def write(self, addresses: np.ndarray) -> None:
        assert not self.waiting, "written before the kernel before has ended"
        self.written.append(addresses)


class Early:
    """A kernel that is launched early."""

    def __init__(self, watch: Watch, name: str, kernel: Any) -> None:
        self.watch, self.name, self.kernel = watch, name, kernel

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.watch.launch, self.name, self.kernel, grid)


def watched(early: int, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Have all kernels that can be launched early launched so."""
    watch = Watch(early)
    for module in MODULES:
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and dependent.CONSTANT in kernel.arg_names:
                monkeypatch.setattr(module, name, Early(watch, name, kernel))
    monkeypatch.setattr(dependent, "gdc_wait", watch.wait)
    monkeypatch.setattr(dependent, "gdc_launch_dependents", watch.let_next)
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
    mixers = {layer.mixer.type for layer in model.config.layer_configs()}
    step = DecodingStep(model, rows, fused=True, room=ROOM if mixers & {"retrieval", "attention", "hymba"} else 0)
    if watch is not None:
        states = [x for buffers in step.buffers for x in buffers.values()]
        watch.own(iter([*model.parameters(), *model.buffers(), *states]))
    found = []
    for token in range(2):
        step.ids.copy_((7 * token + 3 * torch.arange(rows)) % 40)
        found.append(step().clone())
    return found


KERNELS = {
    "gla_conv": {"_recurrence_kernel", "_conv_kernel", "_gated_norm_kernel"},
    "gated_delta_net": {"_recurrence_kernel", "_conv_kernel", "_gated_norm_kernel"},
    "mamba2": {"_recurrence_kernel", "_conv_kernel", "_gated_norm_kernel"},
    "hymba": {"_recurrence_kernel", "_attend_kernel"},
    "retrieval": {"_recurrence_kernel", "_choose_kernel", "_read_kernel"},
}


@pytest.mark.parametrize(
    ("name", "rows", "early"),
    [
        *[(name, 1, dependent.AHEAD) for name in KERNELS],
        ("gla_conv", 5, dependent.AHEAD),
        ("gla_conv", 1, dependent.WAITING),
        ("retrieval", 1, dependent.WAITING),
    ],
)
@torch.no_grad()
def test_what_steps_use_before_they_have_waited(
    name: str, rows: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many as a GPU has: few programs read their states ahead.
    monkeypatch.setattr(decoding_recurrence, "processors", lambda x: 100)
    model = model_of(name)
    expected = logits_of(model, rows)
    watch = watched(early, monkeypatch)
    found = logits_of(model, rows, watch)
    products = {"_project_kernel", "_gate_up_kernel"} if rows == 1 else {"_add_norm_kernel", "_silu_product_kernel"}
    assert watch.launches >= KERNELS[name] | products
    assert watch.programs and (watch.ahead > 0) == (early == dependent.AHEAD)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
