"""Which backend every layer of a model would take on this machine, and why not a faster one.

The layers themselves are asked: each runs on tensors that have shapes and a device but no memory (torch's fake
tensors), and every op notes what it would choose (`Op.explain`). Nothing is computed and no weight is read. Where the
kernels are chosen, those of their launches that have a kernel for Hopper are listed too (ops/hopper_kernels.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch._subclasses import FakeTensorMode

from longrecall.inference.eligibility import why_no_graph_by_design, why_not_fixed
from longrecall.inference.step import DecodingStep
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.config import RecurrentConfig
from longrecall.models.description import is_description, read_description
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.ops.backends import OPS, TRITON, Choice
from longrecall.ops.execution import fixed_shapes, noting_choices

ROWS, TOKENS = 16, 512
"""Rows of a batch in training, and the tokens of a text."""

PHASES = ("prefill", "decoding", "captured decoding", "training")
"""Captured decoding is listed where it happens, for the layers whose step has kernels of its own."""


class _NoMemory(FakeTensorMode):
    """Tensors with shapes alone; a number that is read back from one is 0, as a window's first column may be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class LayerChoices:
    """What the ops of some layers, which have one description, would take in a phase."""

    layers: list[int]
    mixer: str
    phase: str
    """One of `PHASES`."""
    choices: list[Choice]


def choices_of(
    config: RecurrentConfig, device: torch.device, dtype: torch.dtype
) -> tuple[list[LayerChoices], str | None]:
    """What every layer of a model would take, and why its decoding step is not captured, None = it is.

    Args:
        config: of the model.
        device: on which it would run.
        dtype: of its weights.
    """
    described: dict[str, list[int]] = {}
    for index, layer in enumerate(config.layers):
        described.setdefault(repr(layer), []).append(index)
    groups = list(described.values())
    plain = config.to_dict()
    alike = RecurrentConfig(**{**plain, "layers": [config.layers[group[0]] for group in groups]})
    found = []
    with _NoMemory(), device:
        model = _built(alike, dtype)
        # Fake tensors are no weights that kernels could read: what a real model is made of is not looked at.
        graph = why_no_graph_by_design(model.eval())
        for phase in PHASES:
            captured = phase == "captured decoding"
            if captured and graph is not None:
                continue
            for index, choices in enumerate(_step_choices(model) if captured else _choices(model, phase, device)):
                mixer = cast(RecurrentLayer, model.model.layers[index]).mixer_config.type
                if choices or not captured:
                    found.append(LayerChoices(groups[index], mixer, phase, choices))
    found.sort(key=lambda one: (one.layers, PHASES.index(one.phase)))
    return found, graph


def _built(config: RecurrentConfig, dtype: torch.dtype) -> RecurrentLM:
    # Fake tensors cannot be moved to another dtype in place: they begin in it.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return RecurrentLM(config)
    finally:
        torch.set_default_dtype(before)


def _choices(model: RecurrentLM, phase: str, device: torch.device) -> list[list[Choice]]:
    """What each layer of the model, on fake tensors, would take in a phase."""
    found: list[list[Choice]] = [[] for _ in model.model.layers]
    training = phase == "training"
    ids = torch.zeros((ROWS if training else 1, TOKENS), dtype=torch.long, device=device)
    notes: list[Choice] = []
    with torch.set_grad_enabled(training), fixed_shapes(), _watched(model, notes, found):
        model.train(training)
        with noting_choices(notes):
            state = None
            if phase == "decoding":
                state = model(ids).past_key_values
                for kept in found:
                    kept.clear()
                ids = ids[:, :1]
            model(ids, past_key_values=state)
    return [_outermost(choices) for choices in found]


def _step_choices(model: RecurrentLM) -> list[list[Choice]]:
    """What the captured step of each layer of the model, on fake tensors, would take."""
    room = 0 if why_not_fixed(model) is None else TOKENS
    step = DecodingStep(model, 1, model.decoding.state_dtype, fused=True, room=room)
    return [list(one.choices(buffers)) for one, buffers in zip(step.steps, step.buffers, strict=True)]


@contextmanager
def _watched(model: RecurrentLM, notes: list[Choice], found: list[list[Choice]]) -> Iterator[None]:
    """Move what is noted while a layer runs to its own list."""
    with ExitStack() as hooks:
        for index, layer in enumerate(model.model.layers):

            def before(*_: Any) -> None:
                notes.clear()

            def after(*_: Any, own: list[Choice] = found[index]) -> None:
                own += notes

            for handle in (layer.register_forward_pre_hook(before), layer.register_forward_hook(after)):
                hooks.callback(handle.remove)
        yield


def _outermost(choices: list[Choice]) -> list[Choice]:
    """Every op once, without those that are part of one whose kernels would serve."""
    covered = {part for one in choices if one.chosen == TRITON for part in OPS[one.op].covers}
    return list({one.op: one for one in choices if one.op not in covered}.values())


def shown(checkpoint: str, *, as_json: bool) -> str:
    """The report on a checkpoint, or on the description of a model, for this machine: a GPU where there is one."""
    config = read_description(checkpoint) if is_description(checkpoint) else open_checkpoint(checkpoint).config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    found, graph = choices_of(config, device, dtype)
    if as_json:
        return json.dumps({"device": device.type, "dtype": str(dtype), **as_data(found, graph)}, indent=2)
    head = f"on {device.type}, {str(dtype).removeprefix('torch.')}; {TOKENS} tokens, in training {ROWS} rows of them"
    return "\n".join([head, *as_lines(found, graph)])


def as_data(found: Sequence[LayerChoices], graph: str | None) -> dict[str, Any]:
    """What `choices_of` returned as plain data."""
    return {"layers": [asdict(one) for one in found], "decoding_not_captured": graph}


def as_lines(found: Sequence[LayerChoices], graph: str | None) -> list[str]:
    """What `choices_of` returned as lines that a person reads: ops of one backend and one reason side by side."""
    lines = []
    for one in found:
        lines.append(f"layer {_ranges(one.layers)}, {one.mixer}, {one.phase}")
        groups: dict[tuple[str, str], list[str]] = {}
        for choice in one.choices:
            groups.setdefault((choice.chosen, _why_no_faster(choice)), []).append(choice.op)
        for (name, reason), ops in groups.items():
            lines.append(f"  {name}: {', '.join(ops)}" + (f" ({reason})" if reason else ""))
        for choice in one.choices:
            lines += _hopper_lines(choice)
    if graph is None:
        lines.append("decoding is captured as a CUDA graph; generate() uses the kernels of a step instead of these")
    else:
        lines.append(f"decoding is not captured: {graph}")
    return lines


def _why_no_faster(choice: Choice) -> str:
    """Why the kernels are not taken, where there are any."""
    reason = choice.why_not.get(TRITON)
    return "" if reason is None else f"not {TRITON}: {reason}"


def _hopper_lines(choice: Choice) -> list[str]:
    """Which kernels for Hopper run inside an op, and why the others do not: kernels of one reason side by side."""
    groups: dict[str | None, list[str]] = {}
    for name, reason in choice.hopper.items():
        groups.setdefault(reason, []).append(name)
    said = {reason: ", ".join(names) for reason, names in groups.items()}
    used = [f"    {choice.op} for Hopper: {said.pop(None)}"] if None in said else []
    return used + [f"    {choice.op} not for Hopper: {names} ({reason})" for reason, names in said.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
