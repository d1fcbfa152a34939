"""The recurrent state of a whole model: a value that is passed in and returned, saved and loaded, never mutated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longrecall.errors import UserError
from longrecall.files import make_readable, place_of, written_apart
from longrecall.layers.mixers.base import LayerState
from longrecall.models.config import RecurrentConfig

FORMAT = "longrecall-state-1"


class _Owner(Protocol):
    """What a state file asks of the model that it is read for: `RecurrentLM` has all of it."""

    @property
    def config(self) -> Any:
        """Its `num_hidden_layers` is the number of layer states."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors go."""
        ...

    def fingerprint(self) -> str:
        """What the file must name."""
        ...


@dataclass(frozen=True)
class RecurrentState:
    """What a model remembers of the tokens it has read.

    Attributes:
        layers: per layer a mapping from name to tensor, batch first (docs/reference/mixers.md lists the names).
        position: int64 ``[B]``: real (unpadded) tokens each row has read.
        length: columns read, padding included; what transformers calls the cache's sequence length.
        context: int32 ``[B, tokens]``: the real tokens each row has read, from the left without gaps, then -1. Only
            retrieval layers need them: None for a model without any.

    >>> model = load(BASE)
    >>> state = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    >>> state.position                                            # tokens read so far
    tensor([3])
    >>> isinstance(state, RecurrentState), len(state.layers)
    (True, 3)
    >>> more = model(torch.tensor([[4]]), past_key_values=state).past_key_values     # `state` is what it was
    """

    is_compileable: ClassVar[bool] = False
    """Whether generate() may compile for this cache: no, each step makes a new state instead of writing into fixed
    memory."""

    is_croppable: ClassVar[bool] = False
    """Whether the last tokens can be removed: a recurrent state cannot forget them."""

    layers: tuple[LayerState, ...]
    position: Tensor
    length: int = 0
    context: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Rows B."""
        return int(self.position.shape[0])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far (transformers' cache protocol)."""
        return self.length

    def crop(self, max_length: int) -> NoReturn:
        """Raise UserError: transformers' caches can forget their last tokens, a recurrent state cannot."""
        raise UserError(
            f"a recurrent state of {self.length} columns cannot be cropped (to {max_length}): what was read cannot "
            "be taken back. Keep the state from before those tokens; it is never changed"
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> RecurrentState:
        """A new state with `function` applied to every layer tensor (not to the positions and token ids)."""
        layers = tuple({name: function(tensor) for name, tensor in layer.items()} for layer in self.layers)
        return replace(self, layers=layers)

    def detach(self) -> RecurrentState:
        """The same numbers without their history of gradients."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> RecurrentState:
        """The same numbers on another device."""
        context = None if self.context is None else self.context.to(device)
        return replace(self.map(lambda t: t.to(device)), position=self.position.to(device), context=context)

    def select_rows(self, index: Tensor) -> RecurrentState:
        """Rows in the order of int64 `index`, for beam search and for answering many questions from one state."""
        rows = self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))
        index = index.to(self.position.device)
        context = None if self.context is None else self.context.index_select(0, index)
        return replace(rows, position=self.position.index_select(0, index), context=context)

    def repeat_rows(self, count: int) -> RecurrentState:
        """Every row `count` times, side by side."""
        index = torch.arange(self.batch_size, device=self.position.device).repeat_interleave(count)
        return self.select_rows(index)

    def save(self, path: str | Path, fingerprint: str) -> None:
        """Write safetensors with the fingerprint of the model it belongs to; the file appears only when it is whole."""
        path = Path(path)
        tensors = {
            f"{i}.{name}": t.detach().cpu().contiguous()
            for i, layer in enumerate(self.layers)
            for name, t in layer.items()
        }
        tensors["position"] = self.position.cpu()
        if self.context is not None:
            tensors["context"] = self.context.cpu()
        # safetensors cannot hold a tensor and its view; clone what shares storage, such as expanded rows.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        metadata = {"format": FORMAT, "fingerprint": fingerprint, "length": json.dumps(self.length)}
        try:
            place = place_of(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            with written_apart(place) as apart:
                save_file(tensors, apart, metadata=metadata)
                make_readable(apart)
        except (OSError, SafetensorError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UserError(f"cannot write the state file {path}: {reason}; choose another place") from error

    @classmethod
    def load(cls, path: str | Path, model: _Owner) -> RecurrentState:
        """Read a state written by `save`; raises UserError when the file is broken or belongs to another model."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"there is no state file {path}; write one with generate --save-state.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file: {error}.") from error
        if metadata.get("format") != FORMAT:
            raise UserError(f"{path} is not a longrecall state file; write one with generate --save-state.")
        written_by = metadata.get("fingerprint", "")
        if written_by != model.fingerprint():
            raise UserError(
                f"{path} holds the state of model {written_by[:12]}, but this model is "
                f"{model.fingerprint()[:12]}; load the state into the model that wrote it."
            )
        layers: list[LayerState] = [{} for _ in range(model.config.num_hidden_layers)]
        try:
            for name, tensor in tensors.items():
                if name not in ("position", "context"):
                    index, _, key = name.partition(".")
                    layers[int(index)][key] = tensor.to(model.device)
            position, length = tensors["position"].to(model.device), int(metadata["length"])
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(f"{path} is not a whole state file ({error}); write it again.") from error
        context = tensors["context"].to(model.device) if "context" in tensors else None
        return cls(tuple(layers), position, length, context)


LARGE = 1 << 20
"""Bytes beside a state's own from which on a copy is worth a launch."""


def apart_from_text(layer: LayerState) -> LayerState:
    """The same state, without the memory of a whole text that some of its tensors are views of.

    The last inputs of a convolution are a view of all of them: 8 KiB that would keep 64 MiB alive, in every layer.
    """
    return {name: x.clone() if x.untyped_storage().nbytes() - x.nbytes > LARGE else x for name, x in layer.items()}


def zero_state(config: RecurrentConfig, rows: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
    """Return the zero state of a model, as far as its config says it: memory tokens are not read.

    Args:
        config: of the model.
        rows: B.
        device: where the state goes.
        dtype: of the weights.
    """
    layers = tuple(layer.zero_state(rows, device, dtype) for layer in config.layer_configs())
    context = torch.zeros((rows, 0), dtype=torch.int32, device=device)
    position = torch.zeros(rows, dtype=torch.long, device=device)
    return RecurrentState(layers, position, context=context if config.reads_tokens() else None)
