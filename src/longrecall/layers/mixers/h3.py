"""H3 (Fu et al. 2023): a shift of the keys, their products with the values remembered by a diagonal state space."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longrecall.layers.convolution import ShortConvolution
from longrecall.layers.descriptions.h3 import H3Config
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.projections import project_biased
from longrecall.ops import diagonal_ssm
from longrecall.ops.convolution.head_products import pair_products, read_pairs
from longrecall.ops.execution import states_are_unread

SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1


class H3(nn.Module):
    r"""y = W_o (q . S(shift(k) v^T)), head by head.

    The shift state space keeps the last keys and weighs them: a convolution by taps, the newest of which plays the part
    of its skip. The diagonal one is S4D discretised by zero-order hold with its input gain drawn into C,
    :math:`s_t = e^{\Delta A} s_{t-1} + (e^{\Delta A} - 1) / A \cdot u_t`, :math:`y_t = 2 Re(C s_t) + D u_t`. What is
    kept as the state is s without that factor. Queries are summed over the keys' side of a head's products. Source:
    "Hungry Hungry Hippos", section 3.1; the state space is that of "On the Parameterization and Initialization of
    Diagonal State Space Models" (Gu et al. 2022).
    """

    def __init__(self, config: H3Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        channels, heads, pairs = config.channels, config.num_heads, config.state_dim // 2
        self.q_proj = nn.Linear(hidden_size, channels)
        self.k_proj = nn.Linear(hidden_size, channels)
        self.v_proj = nn.Linear(hidden_size, channels)
        self.k_conv = ShortConvolution(channels, int(config.shift_dim or 0), activation=None)
        self.log_step = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads, pairs))
        self.A_imag = nn.Parameter(torch.empty(heads, pairs))
        self.C = nn.Parameter(torch.empty(heads, pairs, 2))
        self.D = nn.Parameter(torch.empty(heads))
        self.o_proj = nn.Linear(channels, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """S4D-Lin: A = -1/2 + i pi n; steps log-uniform in 0.001..0.1; C (complex) and D standard normal."""
        low, high = math.log(SMALLEST_STEP), math.log(LARGEST_STEP)
        nn.init.uniform_(self.log_step, low, high)
        nn.init.constant_(self.A_log, math.log(0.5))
        with torch.no_grad():
            self.A_imag.copy_(math.pi * torch.arange(self.A_imag.shape[1]).expand_as(self.A_imag))
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the state (``recurrent [B, H, N, P*P]``, ``k_conv [B, H*P, W-1]``)."""
        width = self.config.head_dim
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        q, k, v = project_biased(x, self.q_proj, self.k_proj, self.v_proj)
        k, shifted = self.k_conv(k, None if state is None else state["k_conv"], mask)
        q, k, v = (y.to(wide).unflatten(-1, (-1, width)) for y in (q, k, v))
        rate, angle, gain = self._discretised(wide)
        recurrent = None if state is None else state["recurrent"]
        y, final = diagonal_ssm(
            pair_products(k, v), rate, angle, gain, self.D,
            initial_state=recurrent, mask=mask, wants_state=not states_are_unread(),
        )  # fmt: skip
        (projected,) = project_biased(read_pairs(q, y).flatten(-2).to(x.dtype), self.o_proj)
        return projected, {"k_conv": shifted} | ({} if final is None else {"recurrent": final})

    def _discretised(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rate and angle ``[H, N/2]`` of exp(step A) and the gain C (exp(step A) - 1) / A ``[H, N/2, 2]``."""
        step = self.log_step.to(wide).exp()[:, None]
        size, frequency = self.A_log.to(wide).exp(), self.A_imag.to(wide)
        rate, angle = step * size, step * frequency
        # expm1 for the real part keeps its digits at small steps: e^{-r} cos a - 1 = expm1(-r) cos a - 2 sin^2(a / 2).
        real = torch.expm1(-rate) * angle.cos() - 2 * torch.sin(angle / 2).square()
        imaginary = torch.exp(-rate) * angle.sin()
        # Times conj(A) / |A|^2, with A = -size + i frequency.
        norm = size.square() + frequency.square()
        hold_real = (frequency * imaginary - size * real) / norm
        hold_imaginary = -(frequency * real + size * imaginary) / norm
        c_real, c_imaginary = self.C.to(wide).unbind(-1)
        gain = (c_real * hold_real - c_imaginary * hold_imaginary, c_real * hold_imaginary + c_imaginary * hold_real)
        return rate, angle, torch.stack(gain, dim=-1)
