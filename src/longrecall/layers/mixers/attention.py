"""Softmax attention: Transformer++, its windowed variant, and the attention layers of today's hybrids.

Its decoding step writes into a cache that has columns to spare (layers/stepping/cache.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrecall.layers.descriptions.attention import FULL, MEMORY, AttentionConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.norm import Norm, RMSNorm
from longrecall.layers.piece_cache import gather_cache
from longrecall.layers.rotary import radians_of, token_positions, turned, turns
from longrecall.layers.softmax_attention import FLASH_DTYPES, Scoring, attend, attend_causally
from longrecall.layers.stepping.cache import PADDING_POSITION, CacheStep, appended, trimmed
from longrecall.layers.stepping.step import Buffers, MixerStep, Progress, Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops.backends import why_no_kernel
from longrecall.ops.execution import columns_are_in_order, context

META_SCALE = 0.02
"""Standard deviation of fresh meta keys and values: they begin as places to attend to that say nothing."""


class Heads(NamedTuple):
    """What an attention layer projects its input to."""

    q: Tensor
    """``[B, T, H, P]``, normed."""
    k: Tensor
    """``[B, T, G, P]``, normed."""
    v: Tensor
    """``[B, T, G, V]``."""
    gate: Tensor | None
    """``[B, T, H, V]``, before the sigmoid."""


class Projected(NamedTuple):
    """Products with the three projections ``[B, T, n]``, before they are cut into heads."""

    q: Tensor
    k: Tensor
    v: Tensor


class Attention(nn.Module):
    """Its state is the key-value cache, with the position of every cached token (-1 = padding).

    Meta keys are parameters and stand at the positions -M..-1, just before the first token.
    """

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        always = config.meta_tokens + config.memory_tokens
        self.scoring = Scoring(config.score_scale, config.window, config.soft_cap, always)
        self.rotation = config.rotation
        heads, width, bias = int(config.kv_heads or 0), config.input_size or hidden_size, config.qkv_bias
        queries, keys = config.num_heads * config.head_dim, heads * config.head_dim
        read = config.num_heads * config.value_width
        self.q_proj = nn.Linear(width, queries + (read if config.output_gate else 0), bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, heads * config.value_width, bias=bias)
        self.o_proj = nn.Linear(read, hidden_size, bias=config.out_bias) if config.out_proj else None
        self.q_norm = self._norm(queries)
        self.k_norm = self._norm(keys)
        places = (config.meta_tokens, heads)
        self.meta_key = nn.Parameter(torch.empty(*places, config.head_dim)) if config.meta_tokens else None
        self.meta_value = nn.Parameter(torch.empty(*places, config.value_width)) if config.meta_tokens else None
        self.reset_parameters()

    def _norm(self, channels: int) -> RMSNorm | None:
        config = self.config
        if config.qk_norm is None:
            return None
        size = channels if config.qk_norm == FULL else config.head_dim
        return RMSNorm(size, config.qk_norm_eps, offset=config.qk_norm_offset)

    def reset_parameters(self) -> None:
        """Meta keys and values are small normal numbers."""
        for meta in (self.meta_key, self.meta_value):
            if meta is not None:
                nn.init.normal_(meta, std=META_SCALE)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        added: Projected | None = None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new cache; `added` as for `project`."""
        window = self.config.window
        positions = token_positions(position, x.shape[1], mask)
        heads = self.project(x, added)
        q, k = self.turn(heads, positions)
        if self.config.memory_tokens and state is None:
            return self._remember(heads._replace(q=q, k=k))
        key_positions = positions if mask is None else positions.masked_fill(~mask, PADDING_POSITION)
        new, remembered = {"key": k, "value": heads.v, "position": key_positions}, memory_of(state)
        if (group := context()) is not None:
            pieces = gather_cache(state, new, window, mask is not None, group)
            seen = pieces.seen | remembered
            y = self.output(self._read(q, seen, positions, in_order=pieces.in_order), heads.gate)
            return y, pieces.whole | remembered | self.passed_on(seen)
        cache, promised = appended(state, new), columns_are_in_order()
        in_order = promised or (mask is None and state is None)
        y = self.output(self._read(q, cache | remembered, positions, in_order=in_order), heads.gate)
        more = remembered | self.passed_on(cache | remembered)
        if promised:
            return y, cache | more
        if window is not None and mask is None and state is None:
            # Known without looking at positions, which would make the CPU wait in every training step.
            first = max(0, x.shape[1] + 1 - window)
            return y, {name: tensor[:, first:] for name, tensor in cache.items()} | more
        # A row that reads nothing but padding has its newest token before this segment.
        newest = positions[:, -1:] if mask is None else (position + mask.sum(1) - 1)[:, None]
        return y, trimmed(cache, newest, window) | more

    def _remember(self, heads: Heads) -> tuple[Tensor, LayerState]:
        """Read the memory tokens of the model, which come before every text; the heads are turned."""
        memory = {"memory_key": heads.k, "memory_value": heads.v}
        y = self.output(self.read_memory(heads.q, memory), heads.gate)
        places = torch.zeros((len(y), 0), dtype=torch.long, device=y.device)
        state = {"key": heads.k[:, :0], "value": heads.v[:, :0], "position": places} | memory
        return y, state | self.passed_on(state)

    def read_memory(self, q: Tensor, memory: Buffers) -> Tensor:
        """Turned queries of the memory tokens themselves ``[B, M, H, P]`` -> ``[B, M, H, V]``."""
        count = self.config.memory_tokens
        if q.shape[1] != count:
            raise ValueError(
                f"text begins with the state after {count} memory tokens; got none and {q.shape[1]} tokens"
            )
        places = torch.arange(count, device=q.device).expand(len(q), -1)
        scoring = Scoring(self.scoring.scale, None, self.scoring.soft_cap)
        return attend(q, memory["memory_key"], memory["memory_value"], places, places, scoring, in_order=True)

    def passed_on(self, cache: Buffers) -> LayerState:
        """What later layers take of a cache, under the names of a state; nothing where it is not to be shared."""
        given = self.config.gives
        return {f"carried.{name}": cache[name.removeprefix("shared_")] for name in given}

    def project(self, x: Tensor, added: Projected | None = None) -> Heads:
        """x ``[B, T, d]`` -> queries, keys and values, not yet turned, and the gate.

        `added`: what is added to the products, by adapters of a layer that shares this one with others.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.cut(q, k, v) if added is None else self.cut(q + added.q, k + added.k, v + added.v)

    def cut(self, q: Tensor, k: Tensor, v: Tensor) -> Heads:
        """What the three projections gave ``[B, T, n]``, in heads and normed."""
        q, gate = self.cut_queries(q)
        return Heads(q, self._heads(k, self.k_norm), v.unflatten(-1, (-1, self.config.value_width)), gate)

    def cut_queries(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first projection gave ``[B, T, n]``: queries, in heads and normed, and the gate."""
        config, gate = self.config, None
        if config.output_gate:
            q, gate = q.unflatten(-1, (config.num_heads, -1)).split([config.head_dim, config.value_width], dim=-1)
            q = q.flatten(-2)
        return self._heads(q, self.q_norm), gate

    def _heads(self, y: Tensor, norm: RMSNorm | None) -> Tensor:
        """Queries or keys ``[B, T, n]`` in heads ``[B, T, H, P]``, normed."""
        full = self.config.qk_norm == FULL
        y = norm(y) if norm is not None and full else y
        y = y.unflatten(-1, (-1, self.config.head_dim))
        return norm(y) if norm is not None and not full else y

    def turn(self, heads: Heads, positions: Tensor, radians: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys of tokens at `positions` ``[B, T]``, turned; `radians` as for `rotary.turns`."""
        if self.rotation is None:
            return heads.q, heads.k
        by = turns(self.rotation, positions, heads.q.dtype, radians)
        return turned(heads.q, by), turned(heads.k, by)

    def turned_meta_keys(self) -> Tensor:
        """The meta keys ``[M, G, P]``, turned to where they stand."""
        assert self.meta_key is not None
        if self.rotation is None:
            return self.meta_key
        places = torch.arange(-self.config.meta_tokens, 0, device=self.meta_key.device)[None]
        return turned(self.meta_key[None], turns(self.rotation, places, self.meta_key.dtype))[0]

    def _read(self, q: Tensor, cache: LayerState, positions: Tensor, in_order: bool) -> Tensor:
        """Queries ``[B, T, H, P]`` -> ``[B, T, H, V]``, in one piece where torch's flash attention serves that."""
        scoring = self.scoring
        columns = cache["key"].shape[1]
        causal = in_order and not scoring.always and scoring.soft_cap is None
        # In a piece of a sequence the keys of earlier pieces come first.
        causal = causal and (columns == q.shape[1] or context() is not None)
        causal = causal and (scoring.window is None or columns <= scoring.window)
        if causal and q.is_cuda and q.dtype in FLASH_DTYPES:
            return attend_causally(q, cache["key"], cache["value"], scoring.scale)
        return self.read(q, cache, positions, in_order=in_order)

    def read(self, q: Tensor, cache: Buffers, positions: Tensor, *, in_order: bool = False) -> Tensor:
        """Turned queries ``[B, T, H, P]`` at `positions` against a cache -> ``[B, T, H, V]``.

        `in_order`: as for `softmax_attention.attend`.
        """
        k, v = cache["key"], cache["value"]
        if self.meta_key is not None and self.meta_value is not None:
            k, v = _prepend(self.turned_meta_keys(), k), _prepend(self.meta_value, v)
        if self.config.memory_tokens:
            k, v = (torch.cat([cache[name].to(y.dtype), y], dim=1) for name, y in zip(MEMORY, (k, v), strict=True))
        return attend(q, k, v, positions, cache["position"], self.scoring, in_order=in_order)

    def output(self, found: Tensor, gate: Tensor | None) -> Tensor:
        """What the heads read ``[B, T, H, V]``, gated and projected: ``[B, T, d]``."""
        y: Tensor = (found if gate is None else found * gate.sigmoid()).flatten(-2)
        return y if self.o_proj is None else self.o_proj(y)

    def decoding_step(self, config: AttentionConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return AttentionStep(config, self, settings)


def memory_of(state: Buffers | None) -> LayerState:
    """The keys and values of the memory tokens in a state; nothing where there are none."""
    return {} if state is None else {name: state[name] for name in MEMORY if name in state}


def _prepend(meta: Tensor, cached: Tensor) -> Tensor:
    """Meta keys or values ``[M, G, P]`` before the cached ones ``[B, S, G, P]`` of every row."""
    return torch.cat([meta.to(cached.dtype).expand(cached.shape[0], -1, -1, -1), cached], dim=1)


def _cache_of(tensors: Buffers) -> dict[str, Tensor]:
    """The tensors of a state with a column for every token."""
    return {name: tensor for name, tensor in tensors.items() if name not in MEMORY}


class AttentionStep(CacheStep):
    """The step of an attention layer, in one kernel (two where the cache is long) besides its projections."""

    mixer: Attention

    def __init__(self, config: AttentionConfig, mixer: nn.Module, settings: StepSettings) -> None:
        assert isinstance(mixer, Attention)
        device = mixer.q_proj.weight.device
        super().__init__(config, mixer, settings, mixer.config.window, device)
        self.radians = None if mixer.rotation is None else radians_of(mixer.rotation, device)
        self.fused = settings.fused and why_no_kernels(mixer) is None
        self.meta: tuple[Tensor, Tensor] | None = None
        if self.fused and mixer.meta_key is not None and mixer.meta_value is not None:
            self.meta = (torch.zeros_like(mixer.meta_key), torch.zeros_like(mixer.meta_value))
        self._turn_meta()

    @torch.no_grad()
    def _turn_meta(self) -> None:
        if self.meta is not None and self.mixer.meta_value is not None:
            self.meta[0].copy_(self.mixer.turned_meta_keys())
            self.meta[1].copy_(self.mixer.meta_value)

    def load(self, buffers: Buffers, state: LayerState, position: Tensor) -> int:
        self._turn_meta()
        for name, tensor in memory_of(state).items():
            buffers[name].copy_(tensor)
        return super().load(_cache_of(buffers), _cache_of(state), position)

    def allocate(self) -> dict[str, Tensor]:
        whole = MixerStep.allocate(self)
        return super().allocate() | memory_of(whole)

    def export(self, buffers: Buffers, progress: Progress) -> LayerState:
        return super().export(_cache_of(buffers), progress) | memory_of(buffers)

    def join(self, buffers: Buffers, rows: Tensor, state: LayerState, position: Tensor) -> None:
        self._turn_meta()
        MixerStep.join(self, memory_of(buffers), rows, memory_of(state), position)
        super().join(_cache_of(buffers), rows, _cache_of(state), position)

    def rows_of(self, buffers: Buffers, rows: Tensor, position: Tensor) -> LayerState:
        memory = MixerStep.rows_of(self, memory_of(buffers), rows, position)
        return super().rows_of(_cache_of(buffers), rows, position) | memory

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        self._call(stream, norm, buffers, position)
        passed = self.mixer.passed_on(buffers)
        stream.carried.update({name.removeprefix("carried."): tensor for name, tensor in passed.items()})

    def _call(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        if not self.fused:
            stream.add(self.plain(stream.normed(norm)[:, None], buffers, position)[:, 0])
            return
        assert self.mixer.o_proj is not None
        found = self._fused(stream, norm, buffers, position)
        if self.mixer.o_proj.bias is None:
            stream.add_product(found, self.mixer.o_proj.weight)
        else:
            stream.add(stream.through(found, self.mixer.o_proj))

    def _fused(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> Tensor:
        """What the heads read ``[B, H * P]``, gated."""
        from longrecall.ops.decoding.triton.attention import Cache, QueryKeyNorm, attend

        mixer, config = self.mixer, self.mixer.config
        projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        parts = stream.project(norm, [proj.weight for proj in projections])
        parts = [x if proj.bias is None else x + proj.bias for x, proj in zip(parts, projections, strict=True)]
        q, k, v = parts
        heads, gate, norms = q.unflatten(-1, (config.num_heads, -1)), None, None
        if config.output_gate:
            heads, gate = heads.split(config.head_dim, dim=-1)
        if mixer.q_norm is not None and mixer.k_norm is not None:
            if config.qk_norm == FULL:
                heads, k = mixer.q_norm(heads.flatten(1)).view(heads.shape), mixer.k_norm(k)
            else:
                weights = (mixer.q_norm.weight, mixer.k_norm.weight)
                norms = QueryKeyNorm(*weights, mixer.q_norm.eps, bool(mixer.q_norm.offset))
        return attend(
            heads,
            k,
            v,
            Cache(buffers["key"], buffers["value"], buffers["position"], self.offset),
            position,
            frequency=None if self.radians is None else self.radians[0],
            magnitude=1.0 if mixer.rotation is None else mixer.rotation.magnitude,
            scale=config.score_scale,
            window=config.window,
            soft_cap=config.soft_cap,
            meta=self.meta,
            norms=norms,
            gate=gate,
        )

    def plain(self, x: Tensor, buffers: Buffers, position: Tensor, added: Projected | None = None) -> Tensor:
        """x ``[B, 1, d]`` -> y of that shape, in plain torch; shapes do not depend on what has been read.

        `added`: as for `Attention.project`.
        """
        positions, heads = position[:, None], self.mixer.project(x, added)
        q, k = self.mixer.turn(heads, positions, self.radians)
        self.write(buffers, {"key": k, "value": heads.v, "position": positions}, position)
        return self.mixer.output(self.mixer.read(q, buffers, positions), heads.gate)


def why_no_kernels(mixer: Attention) -> str | None:
    """Why the kernels of a decoding step cannot serve this layer, in words; None = they can."""
    config, like = mixer.config, mixer.q_proj.weight
    if not config.out_proj or config.memory_tokens:
        return "they read no memory tokens, and leave nothing unprojected"
    if config.value_width != config.head_dim:
        return f"values are as wide as keys ({config.head_dim}) there; got {config.value_width}"
    if config.rope_scaling is not None and mixer.rotation is not None and config.rope_scaling.turned_by_position:
        return f'the angles of rope_type "{config.rope_scaling.rope_type}" depend on the position'
    # A quantised weight makes no tensors like itself.
    q = torch.empty((1, 1, config.num_heads, config.head_dim), dtype=like.dtype, device=like.device)
    k = q[:, :, : config.kv_heads]
    return why_no_kernel("selected_attention", {"q": q, "k": k, "v": k})
