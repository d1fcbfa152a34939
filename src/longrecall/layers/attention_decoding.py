"""One decoding step of softmax attention on a cache with room for the tokens to come.

A cache that grows has another shape for every token. Here it has columns to spare, and which of them hold a token is
said by their positions: -1 stands for none. With a window the columns are used again, round and round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.layers.decoding import Buffers, Stream
from longrecall.layers.mixers.attention import PADDING_POSITION, Attention, AttentionConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.norm import RMSNorm
from longrecall.layers.rotary import apply_rotary
from longrecall.ops.kernels import backend as triton


def room_of(config: AttentionConfig, room: int) -> int:
    """Columns of a layer's cache in a step with room for so many tokens."""
    # Twice a window: the columns that a state brings, at most one less than it, and as many again.
    return room if config.window is None else min(room, 2 * config.window)


def with_room(config: AttentionConfig, state: LayerState, room: int) -> LayerState:
    """The empty cache with so many columns; `state` is that before the first token."""
    columns = room_of(config, room)
    wide = {name: tensor.new_zeros((len(tensor), columns, *tensor.shape[2:])) for name, tensor in state.items()}
    return wide | {"position": wide["position"].fill_(PADDING_POSITION)}


class AttentionStep:
    """The step of an attention layer. Its buffers are those of its state, with `room` columns or a window's.

    `load` before the first token: it says where the next column is.
    """

    def __init__(self, mixer: Attention, fused: bool) -> None:
        self.mixer, config = mixer, mixer.config
        device = mixer.q_proj.weight.device
        self.offset = torch.zeros(1, dtype=torch.long, device=device)
        self.columns = 0
        half = config.head_dim // 2
        self.frequency = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        self.fused = fused and _declines(mixer) is None
        self.meta: tuple[Tensor, Tensor] | None = None
        if self.fused and mixer.meta_key is not None and mixer.meta_value is not None:
            self.meta = (torch.zeros_like(mixer.meta_key), torch.zeros_like(mixer.meta_value))
        self._turn_meta()

    @torch.no_grad()
    def _turn_meta(self) -> None:
        mixer, config = self.mixer, self.mixer.config
        if self.meta is not None and mixer.meta_key is not None and mixer.meta_value is not None:
            places = torch.arange(-config.meta_tokens, 0, device=mixer.meta_key.device)[None]
            self.meta[0].copy_(apply_rotary(mixer.meta_key[None], places, config.rope_theta)[0])
            self.meta[1].copy_(mixer.meta_value)

    def clear(self, buffers: Buffers) -> None:
        """Forget every token."""
        buffers["position"].fill_(PADDING_POSITION)
        self.offset.zero_()
        self.columns = 0

    @torch.no_grad()
    def load(self, buffers: Buffers, state: LayerState, position: Tensor) -> None:
        """Copy a cache after `position` ``[B]`` tokens into the buffers.

        Raises:
            ValueError: it has more columns than there is room for.
        """
        self._turn_meta()
        window = self.mixer.config.window
        if window is not None and state["position"].shape[1] >= window:
            state = _newest(state, window - 1)
        columns, room = state["position"].shape[1], buffers["position"].shape[1]
        if columns > room:
            raise ValueError(f"the state's cache has {columns} columns, the step room for {room}")
        buffers["position"].fill_(PADDING_POSITION)
        for name, tensor in state.items():
            buffers[name][:, :columns].copy_(tensor)
        self.columns = columns
        self.offset.copy_(columns - position[:1])

    def goes_round(self, buffers: Buffers) -> bool:
        """Whether a column is out of every row's window when it is used again: the buffers never fill up."""
        window = self.mixer.config.window
        return window is not None and buffers["position"].shape[1] >= 2 * window

    def export(self, buffers: Buffers, read: int, position: Tensor) -> LayerState:
        """The cache `read` tokens after `load`, the oldest column first, as views or copies of the buffers."""
        columns, room = self.columns + read, buffers["position"].shape[1]
        if columns <= room:
            cache = {name: tensor[:, :columns] for name, tensor in buffers.items()}
        else:
            cache = {name: tensor.roll(-(columns % room), 1) for name, tensor in buffers.items()}
        return self.mixer.trimmed(cache, position[:, None] - 1)

    def __call__(self, stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor) -> None:
        mixer = self.mixer
        if not self.fused:
            stream.add(self._plain(stream.normed(norm)[:, None], buffers, position)[:, 0])
            return
        from longrecall.ops.decoding.triton.attention import Cache, attend

        projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        parts = stream.project(norm, [proj.weight for proj in projections])
        parts = [x if proj.bias is None else x + proj.bias for x, proj in zip(parts, projections, strict=True)]
        cache = Cache(buffers["key"], buffers["value"], buffers["position"], self.offset)
        q, k, v = parts
        found = attend(q, k, v, cache, position, self.frequency, mixer.config.window, self.meta)
        stream.add_product(found, mixer.o_proj.weight)

    def _plain(self, x: Tensor, buffers: Buffers, position: Tensor) -> Tensor:
        """x ``[B, 1, d]`` -> y of that shape, in plain torch; shapes do not depend on what has been read."""
        column = (position[:1] + self.offset) % buffers["position"].shape[1]
        positions = position[:, None]
        q, k, v = self.mixer.rotated(x, positions)
        for name, new in (("key", k), ("value", v), ("position", positions)):
            buffers[name].index_copy_(1, column, new.to(buffers[name].dtype))
        found = self.mixer.attend(q, buffers["key"], buffers["value"], positions, buffers["position"])
        y: Tensor = self.mixer.o_proj(found.flatten(-2))
        return y


def _newest(state: LayerState, count: int) -> LayerState:
    """The `count` newest tokens of every row, the oldest of them first; padding goes to the front."""
    order = state["position"].argsort(dim=1, stable=True)[:, state["position"].shape[1] - count :]

    def kept(x: Tensor) -> Tensor:
        return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    return {name: kept(x) for name, x in state.items()}


def _declines(mixer: Attention) -> str | None:
    """Why the kernels cannot serve this layer, in words; None = they can."""
    like = mixer.k_proj.weight
    q = like.new_empty((1, 1, mixer.config.num_heads, mixer.config.head_dim))
    k = q[:, :, : mixer.config.kv_heads]
    return triton.declines("selected_attention", {"q": q, "k": k, "v": k})
