"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): keys and values of all heads made of one latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.descriptions.mla import MLAConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.norm import Norm, RMSNorm
from longrecall.layers.piece_cache import gather_cache
from longrecall.layers.projections import is_plain
from longrecall.layers.rotary import radians_of, token_positions, turned, turns
from longrecall.layers.softmax_attention import FLASH_DTYPES, Scoring, attend, attend_causally
from longrecall.layers.stepping.cache import PADDING_POSITION, CacheStep, appended
from longrecall.layers.stepping.step import Buffers, Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops.execution import columns_are_in_order, context


class MLA(nn.Module):
    r"""Its state is the latent of every token, normed, then the key channels that all heads share, turned.

    .. math:: c = \mathrm{norm}(W_{ca} x), \qquad k_h = [W^K_h c, r], \qquad v_h = W^V_h c

    with r the shared channels. Read in two ways, which compute the same:

    - expanded: keys and values of all heads are made of the cached latents;
    - absorbed: :math:`q_h \cdot W^K_h c = (W^{K\top}_h q_h) \cdot c`, so that queries are taken to the latents, and
      what they read there is taken to the value heads. The cache is never expanded: less work for a few queries.
    """

    def __init__(self, config: MLAConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.scoring, self.rotation = Scoring(config.score_scale), config.rotation
        queries, bias = config.num_heads * config.query_dim, config.bias
        if config.q_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, config.q_rank, bias=bias)
            self.q_a_norm = RMSNorm(config.q_rank, config.norm_eps)
            self.q_b_proj = nn.Linear(config.q_rank, queries, bias=False)
        self.kv_a_proj = nn.Linear(hidden_size, config.kv_rank + config.rope_dim, bias=bias)
        self.kv_a_norm = RMSNorm(config.kv_rank, config.norm_eps)
        made = config.num_heads * (config.nope_dim + config.value_dim)
        self.kv_b_proj = nn.Linear(config.kv_rank, made, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.value_dim, hidden_size, bias=bias)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new cache (``latent [B, S, R + r]``)."""
        positions = token_positions(position, x.shape[1], mask)
        q, latent = self.project(x, positions)
        key_positions = positions if mask is None else positions.masked_fill(~mask, PADDING_POSITION)
        new = {"latent": latent, "position": key_positions}
        in_order = columns_are_in_order() or (mask is None and state is None)
        if (group := context()) is None:
            seen = cache = appended(state, new)
        else:
            seen, cache, in_order = gather_cache(state, new, None, mask is not None, group)
        if self.absorbs(x.shape[1], seen["latent"].shape[1]):
            found = self.read_absorbed(q, seen, positions)
        else:
            found = self.read_expanded(q, seen, positions, in_order=in_order)
        y: Tensor = self.o_proj(found.flatten(-2))
        return y, cache

    def project(self, x: Tensor, positions: Tensor, radians: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x ``[B, T, d]`` at `positions` ``[B, T]`` -> queries ``[B, T, H, N + r]`` and what is cached of the tokens.

        `radians`: as for `rotary.turns`.
        """
        config = self.config
        projected = self.q_proj(x) if config.q_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = projected.unflatten(-1, (config.num_heads, -1))
        latent, shared = self.kv_a_proj(x).split([config.kv_rank, config.rope_dim], dim=-1)
        latent = self.kv_a_norm(latent)
        if self.rotation is not None:
            by = turns(self.rotation, positions, q.dtype, radians)
            own, to_turn = q.split([config.nope_dim, config.rope_dim], dim=-1)
            q = torch.cat([own, turned(self._in_halves(to_turn), by)], dim=-1)
            shared = turned(self._in_halves(shared[:, :, None]), by)[:, :, 0]
        return q, torch.cat([latent, shared], dim=-1)

    def _in_halves(self, x: Tensor) -> Tensor:
        """Channels in pairs (2 i, 2 i + 1) -> pairs (i, i + half), which are those that are turned."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.config.interleaved else x

    def absorbs(self, queries: int, keys: int) -> bool:
        """Whether queries are taken to the latents, which is less work the fewer there are; always for one.

        An adapter on `kv_b_proj` computes more than the product with the weight that is absorbed.
        """
        if not is_plain(self.kv_b_proj):
            return False
        config = self.config
        made = config.nope_dim + config.value_dim
        # Products of each head, in multiplications: queries or keys through kv_b_proj, then queries with keys.
        absorbed = queries * config.kv_rank * made + queries * keys * (2 * config.kv_rank + config.rope_dim)
        expanded = keys * config.kv_rank * made + queries * keys * (made + config.rope_dim)
        return queries == 1 or absorbed < expanded

    def read_expanded(self, q: Tensor, cache: Buffers, positions: Tensor, *, in_order: bool = False) -> Tensor:
        """Queries ``[B, T, H, N + r]`` against keys and values of all heads -> ``[B, T, H, V]``.

        `in_order`: as for `softmax_attention.attend`.
        """
        config = self.config
        latent, shared = cache["latent"].split([config.kv_rank, config.rope_dim], dim=-1)
        made = self.kv_b_proj(latent).unflatten(-1, (config.num_heads, -1))
        k, v = made.split([config.nope_dim, config.value_dim], dim=-1)
        k = torch.cat([k, shared[:, :, None].expand(-1, -1, config.num_heads, -1)], dim=-1)
        if in_order and q.is_cuda and q.dtype in FLASH_DTYPES and (q.shape[1] == k.shape[1] or context() is not None):
            return attend_causally(q, k, v, self.scoring.scale)
        return attend(q, k, v, positions, cache["position"], self.scoring, in_order=in_order)

    def read_absorbed(self, q: Tensor, cache: Buffers, positions: Tensor) -> Tensor:
        """The same without keys and values of the heads: the latents are one key head and its values."""
        config, latent = self.config, cache["latent"]
        weight = self.kv_b_proj.weight.to(q.dtype).unflatten(0, (config.num_heads, -1))
        to_keys, to_values = weight.split([config.nope_dim, config.value_dim], dim=1)
        own, shared = q.split([config.nope_dim, config.rope_dim], dim=-1)
        taken = torch.cat([torch.einsum("bthn,hnr->bthr", own, to_keys), shared], dim=-1)
        values = latent[:, :, None, : config.kv_rank]
        places = cache["position"]
        read = attend(taken, latent[:, :, None], values, positions, places, self.scoring, by_group=True)
        return torch.einsum("bthr,hvr->bthv", read, to_values)

    def decoding_step(self, config: MLAConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return MLAStep(config, self, settings)


class MLAStep(CacheStep):
    """The step of a layer of multi-head latent attention, in plain torch; shapes do not depend on the text."""

    mixer: MLA

    def __init__(self, config: MLAConfig, mixer: nn.Module, settings: StepSettings) -> None:
        assert isinstance(mixer, MLA)
        device = mixer.o_proj.weight.device
        super().__init__(config, mixer, settings, None, device)
        self.radians = None if mixer.rotation is None else radians_of(mixer.rotation, device)

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        mixer, positions = self.mixer, position[:, None]
        q, latent = mixer.project(stream.normed(norm)[:, None], positions, self.radians)
        self.write(buffers, {"latent": latent, "position": positions}, position)
        read = mixer.read_absorbed if mixer.absorbs(1, buffers["latent"].shape[1]) else mixer.read_expanded
        stream.add(mixer.o_proj(read(q, buffers, positions).flatten(-2))[:, 0])
