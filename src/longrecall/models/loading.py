"""From a checkpoint of any known format to a model in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from longrecall.errors import UserError, did_you_mean
from longrecall.models.accounting import STATE_BYTES
from longrecall.models.checkpoint import Checkpoint, open_checkpoint
from longrecall.models.limits import check_memory
from longrecall.models.quantising import check_quantize, quantise
from longrecall.models.recurrent_lm import RecurrentLM, RecurrentModel
from longrecall.models.state import RecurrentState, zero_state

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype of "bfloat16", "bf16", "torch.bfloat16", ...; None and "auto" mean: as stored.

    Raises:
        UserError: an unknown name, or a type that is no 16-, 32- or 64-bit float.
    """
    if dtype is None or dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UserError(f'dtype "{name}" is not one of {", ".join(_DTYPES)}, auto.{did_you_mean(name, _DTYPES)}')
    return _DTYPES[name]


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    quantize: str | None = None,
) -> RecurrentLM:
    """Load a model; native, fla, transformers and mamba_ssm formats are told apart by config.json.

    Args:
        path: a checkpoint folder, or a hub id such as org/name.
        dtype: type of the weights in memory; None = as stored.
        device: where the weights go; None = the CPU.
        quantize: "int8" or "fp8" gives linear layers weights of one byte a number (`models.quantising`), for inference.

    Returns:
        The model in evaluation mode.

    Raises:
        UserError: whatever is wrong with the checkpoint (`open_checkpoint`), the dtype, the device or `quantize`.

    >>> model = load(BASE)
    >>> model(torch.tensor([[72, 105]])).logits.shape             # [B, T, vocabulary]
    torch.Size([1, 2, 258])
    """
    wanted, place = parse_dtype(dtype), _parse_device(device)
    check_quantize(quantize)
    model = materialise(open_checkpoint(path), wanted, place)
    if quantize is not None:
        quantise(model, quantize)
    return model


def materialise(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> RecurrentLM:
    """Build the model of an open checkpoint; beside it only one tensor is in memory at a time."""
    _check_room(checkpoint, dtype, device)
    with torch.device("meta"):
        model = RecurrentLM(checkpoint.config)
    buffers = dict(model.named_buffers())
    tensors = {}
    for name in checkpoint.names():
        # Buffers (a handover's progress) are counters, not weights: they keep their own precision.
        kind = buffers[name].dtype if name in buffers else dtype
        tensors[name] = checkpoint.read(name).to(device=device, dtype=kind)
    model.load_state_dict(tensors, strict=False, assign=True)
    if checkpoint.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embeddings.weight
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if left:
        raise RuntimeError(f"{left[0]} is in the model but not in config.tensor_shapes()")
    nn.Module.train(model, False)
    return model


def materialise_sharded(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Callable[[RecurrentLM], None],
    own_rows: Callable[[Tensor], tuple[int, int] | None],
    pieces: int,
) -> RecurrentLM:
    """Build a model of which this process holds a part of every weight; it reads no more than that part.

    Beside it only one piece of a tensor is in memory at a time: a whole tensor where the format of the checkpoint
    makes it of several (`Checkpoint.read_rows`).

    Args:
        checkpoint: open; the same on all processes.
        dtype: type of the weights in memory.
        device: where they go.
        shard: shards a model on the meta device, in place.
        own_rows: of a parameter of it: the rows that this process holds, None for all.
        pieces: how many processes share the weights.

    Raises:
        UserError: the part does not fit into memory.
    """
    _check_room(checkpoint, dtype, device, pieces)
    with torch.device("meta"):
        model = RecurrentLM(checkpoint.config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    tied = checkpoint.config.tie_word_embeddings
    if tied:
        model.lm_head.weight = model.model.embeddings.weight
    shard(model)
    model.to_empty(device=device)
    if tied and model.lm_head.weight is not model.model.embeddings.weight:
        raise RuntimeError("the head is no longer tied to the embeddings")
    there: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = set(checkpoint.names())
    if left := [name for name in there if name not in names and name in model.state_dict()]:
        raise RuntimeError(f"{left[0]} is in the model but not in config.tensor_shapes()")
    with torch.no_grad():
        for name in checkpoint.names():
            rows = own_rows(there[name])
            read = checkpoint.read(name) if rows is None else checkpoint.read_rows(name, *rows)
            held = cast(Any, there[name])
            (held if rows is None else held.to_local()).copy_(read)
    nn.Module.train(model, False)
    return model


@torch.no_grad()
def start_of_text(checkpoint: Checkpoint) -> RecurrentState:
    """Return the state, of one row, on the CPU, from which the model of a checkpoint begins a text.

    Zeros, or what memory tokens leave: these are read layer by layer, and one layer is in memory at a time.
    """
    config = checkpoint.config
    dtype = checkpoint.dtype("model.embeddings.weight")
    if not config.memory_tokens:
        return zero_state(config, 1, torch.device("cpu"), dtype)
    names = checkpoint.names()
    with torch.device("meta"):
        model = RecurrentModel(config)
    nn.Module.train(model, False)
    model.memory_tokens = nn.Parameter(checkpoint.read("model.memory_tokens"))
    # Memory tokens are no words: nothing is looked up, and the largest tensor is not needed.
    model.embeddings.weight = nn.Parameter(torch.empty((0, config.hidden_size), dtype=dtype))
    for index, layer in enumerate(model.layers):
        start = f"model.layers.{index}."
        own = [name.removeprefix(start) for name in names if name.startswith(start)]

        def fill(layer: nn.Module, _: Any, start: str = start, own: list[str] = own) -> None:
            layer.load_state_dict({name: checkpoint.read(start + name) for name in own}, strict=False, assign=True)

        # Whoever needs the weights of a layer calls it: sharded ones are gathered in the same way.
        layer.register_forward_pre_hook(fill)
        layer.register_forward_hook(_drop_weights)
    # Of a text without tokens nothing but the state is computed.
    nothing = torch.zeros((1, 0, config.hidden_size), dtype=dtype)
    state: RecurrentState = model(nothing, None, None)[1]
    return state


def _drop_weights(layer: nn.Module, *_: Any) -> None:
    layer.to("meta")


def _check_room(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str, pieces: int = 1) -> None:
    """Raise UserError when the weights, or one of so many pieces, and the state of a sequence exceed the memory."""
    numbers = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
    weights = sum(count * (dtype or checkpoint.dtype(name)).itemsize for name, count in numbers.items()) // pieces
    state = STATE_BYTES * checkpoint.config.state_size()
    check_memory(weights + state, f"the model in {checkpoint.path}, with the state of one sequence,", device)


def preferred_device(device: str | None = None) -> str:
    """`device`, or where it is None the GPU if there is one, else the CPU: what every command line option means."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _parse_device(device: str | torch.device | None) -> torch.device:
    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or ["unknown device"])[0]
        raise UserError(f'device "{device}" cannot be used: {reason}') from None
    if place.type == "meta":
        raise UserError('device "meta" holds no numbers; use cpu or cuda')
    return place
