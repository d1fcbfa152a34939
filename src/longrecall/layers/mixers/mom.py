"""Mixture of Memories (Du et al. 2025, arXiv 2502.13685): a router writes every token to a few of many memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.access import may_read
from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.mom import MoMConfig
from longrecall.layers.mixers.base import AUXILIARY_LOSS, LayerState
from longrecall.layers.mixers.delta_net import reset_time_steps
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import RMSNorm, l2_normalise, operand_dtype
from longrecall.layers.projections import is_plain, project_gated
from longrecall.ops import gated_delta_rule, gated_linear_attention, short_convolution
from longrecall.ops.borders import sum_of_pieces
from longrecall.ops.execution import context, shapes_are_fixed

OF_A_MEMORY = ("k_proj", "v_proj", "a_proj", "b_proj", "k_conv", "v_conv", "A_log", "dt_bias")
"""Parameters that hold the rows of all memories, one memory after the other; or, where these are tied, of one."""

TIED = ("k_conv", "v_conv", "A_log", "dt_bias")
"""Those that memories share in a layer with `tied`; the others are shared in one with `tied_projections`."""

Part = dict[str, Any]
"""One memory's rows of those, under the names of the parameters.

Of a projection that is more than a product with its weight (an adapter, a quantised one) it has the layer's output
instead, ``[B, T, ...]``, under the name of the layer; of such a convolution, which rows they are, a slice.
"""


class MoM(nn.Module):
    r"""M memories with keys, values and gates of their own, one query; a token is read from where it was written.

    .. math:: p = \mathrm{softmax}(W_r x), \qquad o = \sum_{m \in \mathrm{top}(p)} \frac{p_m}{\sum_{top} p} q S^{(m)}
              + q S^{(shared)}

    A memory is a sequence of its own: it sees its tokens one after the other, in its convolutions too, and neither
    decays nor changes while others are chosen. With one active memory its weight is p itself, or the router would
    learn nothing.

    While training, the layer adds the key `auxiliary_loss` to its new state: balance * M * sum_m f_m P_m, with f_m the
    share of the choices and P_m the mean probability of memory m over the real tokens. It is `balance` when all are
    used alike (Fedus et al. 2021, equation 4).

    A memory's tokens are gathered and read together, so that the work grows with `active` and not with `memories`.
    Under CUDA graph capture and torch.compile, which allow no length that depends on values, every memory reads all
    tokens with those of others masked: the same numbers for more work.
    """

    def __init__(self, config: MoMConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads
        tied, count = (1 if one else config.all_memories for one in (config.tied, config.tied_projections))
        keys, values = heads * config.key_dim, heads * config.value_dim
        self.router = nn.Linear(hidden_size, config.memories, bias=False)
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, count * keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, count * values, bias=False)
        self.a_proj = nn.Linear(hidden_size, count * heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, count * heads, bias=False) if config.rule == "gated_delta" else None
        for name, size in (("q", keys), ("k", tied * keys), ("v", tied * values)):
            self.add_module(f"{name}_conv", ShortConvolution(size, config.conv_width) if config.conv_width else None)
        self.A_log = nn.Parameter(torch.empty(tied * heads))
        self.dt_bias = nn.Parameter(torch.empty(tied * heads))
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if config.output_gate else None
        self.o_norm = RMSNorm(config.value_dim, config.norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in (0, 16), time steps log-uniform in 0.001..0.1, as in Gated DeltaNet."""
        nn.init.uniform_(self.A_log, 1e-4, 16.0)
        reset_time_steps(self.dt_bias)
        with torch.no_grad():
            self.A_log.log_()

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, (M + shared) H, K, V]``)."""
        config, wide = self.config, torch.float64 if x.dtype == torch.float64 else torch.float32
        weights, chosen, balance = self.route(x, mask)
        new_state: LayerState = {}
        q = self.q_proj(x)
        if not config.tied:
            if config.conv_width:
                before = None if state is None else state["q_conv"]
                q, new_state["q_conv"] = self.get_submodule("q_conv")(q, before, mask)
            else:
                q = F.silu(q)
            q = self._normed(q.to(wide))
        places: list[Tensor | None] = [None] * config.all_memories
        if _may_gather(x):
            places[: config.memories] = _gathered(chosen)
        total, after = x.new_zeros((*x.shape[:2], config.num_heads, config.value_dim), dtype=wide), []
        memories = zip(self._parts(x), places, self._state_pieces(state), strict=True)
        for index, (part, place, piece) in enumerate(memories):
            if index == config.memories:
                o, end = self._read(part, x, q, mask, piece)
            else:
                o, end = self._read_chosen(part, x, q, chosen[..., index], place, piece)
                o = o * weights[..., index, None, None]
            total = total + o
            after.append(end)
        for name in after[0]:
            new_state[name] = torch.cat([piece[name] for piece in after], dim=1)
        if balance is not None:
            new_state[AUXILIARY_LOSS] = balance
        return self._output(total, x), new_state

    def route(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where tokens x ``[B, T, d]`` go.

        Returns weights ``[B, T, M]`` (0 where not chosen), which memories are chosen ``[B, T, M]`` (none for padding),
        and while training the balance loss, else None.
        """
        config, wide = self.config, torch.float64 if x.dtype == torch.float64 else torch.float32
        probability = self.router(x).to(wide).softmax(-1)
        best = probability.topk(config.active, dim=-1).indices
        chosen = torch.zeros_like(probability, dtype=torch.bool).scatter(-1, best, True)
        weights = probability * chosen
        if config.active > 1 or config.tied:
            weights = weights / weights.sum(-1, keepdim=True)
        real = torch.ones_like(probability[..., 0]) if mask is None else mask.to(wide)
        chosen = chosen if mask is None else chosen & mask[..., None]
        if not (self.training and config.balance):
            return weights, chosen, None
        # The sequence may be cut over several ranks: the balance is that of all its tokens.
        sums = sum_of_pieces(
            torch.cat([real.sum()[None], chosen.to(wide).sum((0, 1)), (probability * real[..., None]).sum((0, 1))])
        )
        count = sums[0].clamp(min=1)
        share, mean = (part / count for part in sums[1:].chunk(2))
        share = share / config.active
        return weights, chosen, config.balance * config.memories * (share * mean).sum()

    def _read_chosen(
        self, part: Part, x: Tensor, q: Tensor, own: Tensor, place: Tensor | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """As `_read`, for the tokens `own` bool ``[B, T]``: gathered from `place` ``[B, L]``, or None = masked."""
        if place is None:
            return self._read(part, x, q, own, state)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        nothing = q.new_zeros((*q.shape[:2], self.config.num_heads, self.config.value_dim), dtype=wide)
        # No rank may leave out a memory while others read it: states pass from one to the next.
        if not place.shape[1] and state is not None and context() is None:
            return nothing, state
        real = torch.arange(place.shape[1], device=x.device) < own.sum(1)[:, None]
        part = part | {name: _take(part[name], place) for name in OF_A_MEMORY if name.endswith("proj") and name in part}
        o, end = self._read(part, _take(x, place), _take(q, place), real, state)
        return nothing.scatter(1, _as_wide_as(place, nothing), o), end

    def _state_pieces(self, state: LayerState | None) -> list[LayerState | None]:
        """The state of every memory."""
        count = self.config.all_memories
        if state is None:
            return [None] * count
        own = {
            name: tensor.chunk(count, dim=1) for name, tensor in state.items() if self.config.tied or name != "q_conv"
        }
        return [{name: parts[index] for name, parts in own.items()} for index in range(count)]

    def _read(
        self, part: Part, x: Tensor, q: Tensor, mask: Tensor | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """Write the real tokens of x ``[B, L, d]`` to one memory and read q ``[B, L, H, K]`` from it.

        In a layer with `tied` q is what the projection gave, ``[B, L, H * K]``.
        """
        config, new_state = self.config, {}
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if config.tied:
            if config.conv_width:
                before = None if state is None else state["q_conv"]
                q, new_state["q_conv"] = self.get_submodule("q_conv")(q, before, mask)
            else:
                q = F.silu(q)
            q = self._normed(q.to(wide))
        results = []
        for name in ("k", "v"):
            y = _projected(part, f"{name}_proj", x)
            if config.conv_width:
                key = f"{name}_conv"
                y, new_state[key] = self._convolved(part, key, y, None if state is None else state[key], mask)
            else:
                y = F.silu(y)
            results.append(y.to(wide).unflatten(-1, (config.num_heads, -1)))
        k, v = l2_normalise(results[0]), results[1]
        step = F.softplus(_projected(part, "a_proj", x).to(wide) + part["dt_bias"].to(wide))
        decay = mask_tokens(-part["A_log"].to(wide).exp() * step, mask)
        initial = None if state is None else state["recurrent"]
        if config.rule == "gated_delta":
            beta = _projected(part, "b_proj", x).to(wide).sigmoid()
            o, final = gated_delta_rule(q, k, v, decay, mask_tokens(beta, mask), initial_state=initial)
        else:
            o, final = gated_linear_attention(q, mask_tokens(k, mask), v, decay, initial_state=initial)
        return o, {"recurrent": final, **new_state}

    def _parts(self, x: Tensor) -> list[Part]:
        """What each memory has of its own, to read x ``[B, T, d]``."""
        count = self.config.all_memories
        rows: dict[str, Sequence[Any]] = {}
        for name in OF_A_MEMORY:
            own = getattr(self, name)
            shared = self.config.tied if name in TIED else self.config.tied_projections
            if isinstance(own, Tensor):
                rows[name] = [own] * count if shared else own.unflatten(0, (count, -1)).unbind(0)
            elif name.endswith("proj") and own is not None and not is_plain(own):
                rows[name] = [own(x)] * count if shared else own(x).chunk(count, dim=-1)
            elif name.endswith("conv") and own is not None and not may_read(own, ShortConvolution):
                size = len(own.weight) // (1 if shared else count)
                rows[name] = [slice(0, size) if shared else slice(i * size, (i + 1) * size) for i in range(count)]
            elif own is not None:
                weight = own.weight
                rows[f"{name}.weight"] = [weight] * count if shared else weight.unflatten(0, (count, -1)).unbind(0)
        return [{name: parts[index] for name, parts in rows.items()} for index in range(count)]

    def _convolved(
        self, part: Part, name: str, y: Tensor, state: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """y ``[B, L, channels]`` through a memory's rows of a convolution, and its new state; see `Part`."""
        weight = part.get(f"{name}.weight")
        if weight is not None:
            return short_convolution(y, weight, state=state, mask=mask)
        both: tuple[Tensor, Tensor] = self.get_submodule(name)(y, state, mask, rows=part[name])
        return both

    def _normed(self, x: Tensor) -> Tensor:
        """x ``[B, L, H * K]`` -> unit vectors of every head ``[B, L, H, K]``."""
        return l2_normalise(x.unflatten(-1, (self.config.num_heads, -1)))

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        dtype = operand_dtype(x)
        if self.g_proj is not None:
            return project_gated(o, self.o_norm, self.g_proj(x), self.o_proj, dtype)
        projected: Tensor = self.o_proj(self.o_norm(o, dtype).flatten(-2))
        return projected


def _projected(part: Part, name: str, x: Tensor) -> Tensor:
    """x ``[B, L, d]`` through a memory's rows of a projection; see `Part`."""
    weight = part.get(f"{name}.weight")
    found: Tensor = part[name] if weight is None else F.linear(x, weight)
    return found


def _may_gather(x: Tensor) -> bool:
    """Whether lengths may depend on values: not where a graph is recorded, and not without any."""
    return x.device.type in ("cpu", "cuda") and not shapes_are_fixed(x.device)


def _gathered(chosen: Tensor) -> list[Tensor]:
    """For every memory of bool ``[B, T, M]`` the positions of its tokens ``[B, L]``, in order, then some of others.

    L is the longest row's count.
    """
    longest = chosen.sum(1).amax(0).tolist()
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)
    return [order[:, :count, index] for index, count in enumerate(longest)]


def _as_wide_as(place: Tensor, x: Tensor) -> Tensor:
    """Positions ``[B, L]`` -> ``[B, L, ...]`` with the last dimensions of x ``[B, T, ...]``."""
    return place.view(*place.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])


def _take(x: Tensor, place: Tensor) -> Tensor:
    """x ``[B, T, ...]`` at positions ``[B, L]`` -> ``[B, L, ...]``."""
    return x.gather(1, _as_wide_as(place, x))
