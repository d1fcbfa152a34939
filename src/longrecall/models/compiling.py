"""torch.compile as an option: the layers of a model, compiled for as long as a block lasts.

Layers are compiled one by one and not the model as a whole: layers of the same description share their code, a model of
any depth takes as long as one of its layers, names of tensors stay as they are, and the loss, the states and gradient
checkpointing around the layers need no compiler.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longrecall.errors import UserError
from longrecall.models.recurrent_lm import RecurrentLM

BACKEND = "inductor"
"""torch.compile's own; "aot_eager" traces in the same way and needs no compiler on the machine."""
SHAPES = 32
"""Shapes (and modes: with or without a state, with or without gradients) that each kind of layer is compiled for."""


@contextmanager
def compiled_layers(model: RecurrentLM, wanted: bool = True, backend: str | None = None) -> Iterator[None]:
    """Run the layers of `model` through torch.compile inside the block; with `wanted` False do nothing.

    Code is made anew for each shape ``[B, T]``, the first time that it is met: seconds to minutes. Beyond `SHAPES` of
    them layers run as they are. What is computed is the same up to the order of float sums.

    Args:
        model: on the device that it will run on; compiled in place, and as before after the block.
        wanted: so that a caller need not ask.
        backend: of torch.compile; None = `BACKEND`.

    Raises:
        UserError: the machine has no compiler that this device needs.
    """
    if not wanted:
        yield
        return
    backend = backend or BACKEND
    if backend == "inductor":
        check_compiler(model.device)
    layers = list(model.model.layers)
    # The limit counts for all modules together, whose calls are one piece of code to the tracer.
    limit = SHAPES * len(layers)
    before = [layer._compiled_call_impl for layer in layers]
    with (
        torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=limit),
        warnings.catch_warnings(),
    ):
        # The tracer looks at .grad of every tensor that it is given, also where that warns.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
        for layer in layers:
            layer.compile(backend=backend, dynamic=False)
        try:
            yield
        finally:
            for layer, call in zip(layers, before, strict=True):
                layer._compiled_call_impl = call


def check_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile could make no code: no C++ compiler for a CPU, no Triton for a GPU."""
    if device.type == "cpu":
        # The name that torch.compile looks for.
        name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if shutil.which(name) is None:
            raise UserError(
                f'torch.compile needs a C++ compiler on a CPU, and "{name}" is not found. Install one, name it in the '
                "environment variable CXX, or do without compiling"
            )
    elif importlib.util.find_spec("triton") is None:
        raise UserError("torch.compile needs Triton on a GPU; install triton, or do without compiling")
