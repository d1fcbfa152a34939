"""Softmax attention with rotary embeddings and an optional sliding window: Transformer++ and its windowed variant.

Its decoding step writes into a cache that has columns to spare. A cache that grows has another shape for every token;
here the positions say which columns hold one, -1 stands for none. With a window the columns are used round and round.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.norm import Norm
from longrecall.layers.rotary import apply_rotary, token_positions
from longrecall.layers.stepping.step import Buffers, MixerStep, Progress, Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops.backends import why_no_kernel

QUERY_BLOCK = 1024
PADDING_POSITION = -1
FLASH_DTYPES = (torch.bfloat16, torch.float16)
"""What torch's flash attention serves on a GPU: twice as fast without a mask, and linear in memory in one piece."""
META_SCALE = 0.02
"""Standard deviation of fresh meta keys and values: they begin as places to attend to that say nothing."""


class Attention(nn.Module):
    """Its state is the key-value cache, with the position of every cached token (-1 = padding).

    Meta keys are parameters and stand at the positions -M..-1, just before the first token.
    """

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_dim, int(config.kv_heads or 0) * config.head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, hidden_size, bias=False)
        shape = (config.meta_tokens, int(config.kv_heads or 0), config.head_dim)
        self.meta_key = nn.Parameter(torch.empty(shape)) if config.meta_tokens else None
        self.meta_value = nn.Parameter(torch.empty(shape)) if config.meta_tokens else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Meta keys and values are small normal numbers."""
        for meta in (self.meta_key, self.meta_value):
            if meta is not None:
                nn.init.normal_(meta, std=META_SCALE)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new cache."""
        config = self.config
        positions = token_positions(position, x.shape[1], mask)
        q, k, v = self.rotated(x, positions)
        key_positions = positions if mask is None else positions.masked_fill(~mask, PADDING_POSITION)
        if state is not None:
            k, v = torch.cat([state["key"].to(k.dtype), k], dim=1), torch.cat([state["value"].to(v.dtype), v], dim=1)
            key_positions = torch.cat([state["position"], key_positions], dim=1)
        first_text = mask is None and state is None and config.window is None and not config.meta_tokens
        if first_text and q.is_cuda and q.dtype in FLASH_DTYPES:
            found = attend_causally(q, k, v)
        else:
            found = self.attend(q, k, v, positions, key_positions)
        y: Tensor = self.o_proj(found.flatten(-2))
        cache = {"key": k, "value": v, "position": key_positions}
        if self.config.window is not None and mask is None and state is None:
            # Known without looking at positions, which would make the CPU wait in every training step.
            first = max(0, k.shape[1] + 1 - self.config.window)
            return y, {name: tensor[:, first:] for name, tensor in cache.items()}
        # A row that reads nothing but padding has its newest token before this segment.
        newest = positions[:, -1:] if mask is None else (position + mask.sum(1) - 1)[:, None]
        return y, self.trimmed(cache, newest)

    def rotated(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x ``[B, T, d]`` at `positions` ``[B, T]`` -> queries ``[B, T, H, P]``, keys and values ``[B, T, Hkv, P]``."""
        heads = (-1, self.config.head_dim)
        q, k, v = (proj(x).unflatten(-1, heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (apply_rotary(y, positions, self.config.rope_theta) for y in (q, k))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        """Blocks of queries against the keys they may see, so that memory is linear in the context: ``[B, T, H, P]``.

        `key_positions` ``[B, S]``: those of the keys; -1 = none may see it.
        """
        if self.meta_key is not None and self.meta_value is not None:
            places = torch.arange(-self.config.meta_tokens, 0, device=k.device)[None]
            key = apply_rotary(self.meta_key[None], places, self.config.rope_theta)
            k, v = _prepend(key, k), _prepend(self.meta_value[None], v)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        outputs = []
        for start in range(0, q.shape[2], QUERY_BLOCK):
            query_positions = positions[:, start : start + QUERY_BLOCK, None]
            visible = (key_positions[:, None] <= query_positions) & (key_positions[:, None] != PADDING_POSITION)
            if self.config.window is not None:
                visible &= key_positions[:, None] > query_positions - self.config.window
            # A padded query may see nothing; let it see everything, since its output is never used.
            visible |= ~visible.any(-1, keepdim=True)
            visible = F.pad(visible, (self.config.meta_tokens, 0), value=True)
            block = q[:, :, start : start + QUERY_BLOCK]
            outputs.append(F.scaled_dot_product_attention(block, k, v, visible[:, None], enable_gqa=grouped))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def trimmed(self, state: LayerState, newest: Tensor) -> LayerState:
        """Drop the columns that no row's window can reach any more; `newest` [B, 1]: positions of the last tokens."""
        if self.config.window is None:
            return state
        oldest = newest + 2 - self.config.window
        needed = ((state["position"] >= oldest) & (state["position"] != PADDING_POSITION)).any(0)
        first = int(needed.to(torch.int8).argmax()) if bool(needed.any()) else needed.shape[0]
        return {name: tensor[:, first:] for name, tensor in state.items()}

    def decoding_step(self, config: AttentionConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return AttentionStep(config, self, settings)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q ``[B, T, H, P]``, k, v ``[B, T, Hkv, P]``: every token to itself and those before it, in one piece."""
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _prepend(meta: Tensor, cached: Tensor) -> Tensor:
    """Meta keys or values ``[1, M, Hkv, P]`` before the cached ones ``[B, S, Hkv, P]`` of every row."""
    return torch.cat([meta.to(cached.dtype).expand(cached.shape[0], -1, -1, -1), cached], dim=1)


class AttentionStep(MixerStep):
    """The step of an attention layer. Its buffers are those of its state, with columns for the tokens to come.

    `load` or `clear` before the first token: they say where the next column is.
    """

    mixer: Attention

    def __init__(self, config: AttentionConfig, mixer: nn.Module, settings: StepSettings) -> None:
        super().__init__(config, mixer, settings)
        mixer, config = self.mixer, self.mixer.config
        device = mixer.q_proj.weight.device
        self.offset = torch.zeros(1, dtype=torch.long, device=device)
        self.columns = 0
        half = config.head_dim // 2
        self.frequency = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        self.fused = settings.fused and _why_no_kernels(mixer) is None
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

    def allocate(self) -> dict[str, Tensor]:
        columns = self.mixer.config.columns_for(self.settings.room)
        state = super().allocate()
        return {name: x.new_zeros((len(x), columns, *x.shape[2:])) for name, x in state.items()}

    def clear(self, buffers: Buffers) -> None:
        super().clear(buffers)
        buffers["position"].fill_(PADDING_POSITION)
        self.offset.zero_()
        self.columns = 0

    @torch.no_grad()
    def load(self, buffers: Buffers, state: LayerState, position: Tensor) -> int:
        """Copy a cache after `position` ``[B]`` tokens into the buffers; return the columns it takes of the room.

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
        return 0 if self.goes_round(buffers) else columns

    def goes_round(self, buffers: Buffers) -> bool:
        """Whether a column is out of every row's window when it is used again: the buffers never fill up."""
        window = self.mixer.config.window
        return window is not None and buffers["position"].shape[1] >= 2 * window

    def export(self, buffers: Buffers, progress: Progress) -> LayerState:
        """The cache now, the oldest column first, as views or copies of the buffers."""
        columns, room = self.columns + progress.read, buffers["position"].shape[1]
        if columns <= room:
            cache = {name: tensor[:, :columns] for name, tensor in buffers.items()}
        else:
            cache = {name: tensor.roll(-(columns % room), 1) for name, tensor in buffers.items()}
        return self.mixer.trimmed(cache, progress.position[:, None] - 1)

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
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


def _why_no_kernels(mixer: Attention) -> str | None:
    """Why the kernels cannot serve this layer, in words; None = they can."""
    like = mixer.k_proj.weight
    q = like.new_empty((1, 1, mixer.config.num_heads, mixer.config.head_dim))
    k = q[:, :, : mixer.config.kv_heads]
    return why_no_kernel("selected_attention", {"q": q, "k": k, "v": k})
