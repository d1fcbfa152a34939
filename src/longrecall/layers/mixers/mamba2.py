"""Mamba-2 (Dao and Gu 2024): a state-space mixer whose heads share keys B and queries C within a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.mamba2 import Mamba2Config
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.mixers.delta_net import reset_time_steps
from longrecall.layers.mixers.linear_attention import mask_tokens
from longrecall.layers.norm import Norm, RMSNorm, operand_dtype
from longrecall.layers.projections import project_gated, project_product
from longrecall.layers.stepping.step import Buffers, MixerStep, PlainStep, Step, StepSettings
from longrecall.layers.stepping.stream import Stream
from longrecall.ops import gated_linear_attention
from longrecall.ops.backends import Choice
from longrecall.ops.decoding.op import step_choice
from longrecall.ops.linear_attention.stepped_values import stepped_values
from longrecall.ops.norms.op import Gate


class Mamba2(nn.Module):
    """One projection to z, x, B, C and dt; convolution on x, B and C; decay exp(-dt exp(A_log)).

    The output is norm((C S + D x) * silu(z)), projected; the norm may stand before the gate, or be left out.
    """

    def __init__(self, config: Mamba2Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        inner, heads, keys = config.inner_dim, config.num_heads, config.groups * config.state_dim
        self.sizes = (inner, inner + 2 * keys, heads)
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=config.proj_bias)
        self.conv = ShortConvolution(inner + 2 * keys, config.conv_width, config.conv_bias, config.conv_activation)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = None if config.gated_norm == "none" else RMSNorm(inner, config.norm_eps, groups=config.groups)
        self.out_proj = nn.Linear(inner, hidden_size, bias=config.has_out_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in (1, 16), time steps log-uniform in 0.001..0.1, D one (Dao and Gu's initialisation)."""
        nn.init.uniform_(self.A_log, 1.0, 16.0)
        with torch.no_grad():
            self.A_log.log_()
        reset_time_steps(self.dt_bias)
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state (``recurrent [B, H, N, P]``)."""
        config = self.config
        projected = self.in_proj(x)
        if (factors := self.multipliers(projected)) is not None:
            projected = projected * factors
        z, channels, raw_step = projected.split(self.sizes, dim=-1)
        channels, conv_state = self.conv(channels, None if state is None else state["conv"], mask)
        keys = config.groups * config.state_dim
        values, b, c = channels.split((config.inner_dim, keys, keys), dim=-1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        step = F.softplus(raw_step.to(wide) + self.dt_bias.to(wide))
        if config.time_step_limit != (0.0, None):
            step = step.clamp(*config.time_step_limit)
        step = mask_tokens(step, mask)
        # Their products with `wide` numbers are wide without a wide copy of theirs.
        values = values.unflatten(-1, (-1, config.head_dim))
        b, c = (x.unflatten(-1, (config.groups, -1)) for x in (b, c))
        log_decay = -step * self.A_log.to(wide).exp()
        initial = None if state is None else state["recurrent"]

        def attend(stepped: Tensor) -> tuple[Tensor, Tensor]:
            return gated_linear_attention(c, b, stepped, log_decay, scale=1.0, initial_state=initial)

        y, final = stepped_values(values, step, self.D.to(wide), attend)
        y, dtype = y.flatten(-2), operand_dtype(x)
        if self.norm is None:
            out = project_product(y, z, self.out_proj, dtype)
        else:
            kind: Gate = "silu_before" if config.gated_norm == "after_gate" else "silu"
            out = project_gated(y, self.norm, z, self.out_proj, dtype, kind)
        return out, {"recurrent": final, "conv": conv_state}

    def multipliers(self, like: Tensor) -> Tensor | None:
        """The factor of every row of the projection, on the device and in the dtype of a tensor; None = all are 1."""
        config = self.config
        if all(factor == 1.0 for factor in config.part_multipliers):
            return None
        keys = config.groups * config.state_dim
        sizes = (config.inner_dim, config.inner_dim, keys, keys, config.num_heads)
        # Filled on the device: a copy from the host could not be captured.
        return torch.cat(
            [like.new_full((size,), factor) for size, factor in zip(sizes, config.part_multipliers, strict=True)]
        )

    def decoding_step(self, config: Mamba2Config, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        serves = _why_no_kernels(config) is None and settings.serves_state(config.state_dim)
        return Mamba2Step(config, self, settings) if serves else PlainStep(config, self, settings)


def _why_no_kernels(config: Mamba2Config) -> str | None:
    """Why the kernels of a step do not serve such a layer, in words; None = they do."""
    if config.conv_activation != "silu":
        return f"the kernels end a convolution with SiLU, not with {config.conv_activation}"
    return None


class Mamba2Step(MixerStep):
    """One token through convolution, recurrence, skip and gated norm, in a few launches."""

    mixer: Mamba2

    def __init__(self, config: Mamba2Config, mixer: Mamba2, settings: StepSettings) -> None:
        super().__init__(config, mixer, settings)
        self.multipliers = mixer.multipliers(mixer.dt_bias.to(settings.dtype))

    def choices(self, buffers: Buffers) -> Sequence[Choice]:
        return [step_choice(buffers["recurrent"])]

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        from longrecall.ops.decoding.triton.elementwise import Sum, convolve, gated_norm
        from longrecall.ops.decoding.triton.recurrence import Gate, recurrence

        mixer = self.mixer
        config, conv = mixer.config, mixer.conv
        (projected,) = stream.project(norm, [mixer.in_proj.weight])
        if mixer.in_proj.bias is not None:
            projected = projected + mixer.in_proj.bias
        if self.multipliers is not None:
            projected = projected * self.multipliers
        z, channels, raw_step = projected.split(mixer.sizes, dim=-1)
        (mixed,) = convolve([(channels, buffers["conv"].transpose(1, 2), conv.weight, conv.bias)])
        keys = config.groups * config.state_dim
        values, b, c = mixed.split((config.inner_dim, keys, keys), dim=-1)
        low, high = config.time_step_limit
        o = recurrence(
            c,
            b,
            values,
            buffers["recurrent"],
            Gate("step", raw_step, mixer.dt_bias, mixer.A_log, low=low, high=float("inf") if high is None else high),
            scale=1.0,
            key_heads=config.groups,
            value_heads=config.num_heads,
            skip=mixer.D,
        )
        total = Sum(column_step=config.inner_dim // config.groups)
        weight, eps = (None, 0.0) if mixer.norm is None else (mixer.norm.weight, mixer.norm.eps)
        gate_first = config.gated_norm == "after_gate"
        y = gated_norm(o, config.groups, total, weight, eps, mixed.dtype, z, gate_first=gate_first)
        if mixer.out_proj.bias is None:
            stream.add_product(y, mixer.out_proj.weight)
        else:
            stream.add(stream.through(y, mixer.out_proj))
