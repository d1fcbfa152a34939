"""Linear recurrences with a fixed complex diagonal: S4D (Gu et al. 2022), by Fourier transforms or step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.backends import Op, declare, kernel
from longrecall.ops.borders import state_after, state_before
from longrecall.ops.convolution.long import long_convolution, real_tokens_first, reorder
from longrecall.ops.execution import context, with_context

DIAGONAL_TAPS = declare(Op("diagonal_taps", kernels="convolution.triton.diagonal", compiler_fuses=True))

_diagonal_taps_kernel = kernel("convolution.triton.diagonal", "taps")


def diagonal_ssm(
    u: Tensor,
    rate: Tensor,
    angle: Tensor,
    gain: Tensor,
    skip: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    wants_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    r"""Run :math:`s_t = \lambda s_{t-1} + u_t`, :math:`y_t = 2\,\mathrm{Re} \sum_m g_m s_{t,m} + D u_t`, all channels.

    :math:`\lambda_m = e^{-rate_m + i\,angle_m}`; a pair of conjugate eigenvalues counts once, hence the factor 2. The
    outputs are a convolution with taps :math:`2\,\mathrm{Re} \sum_m g_m \lambda_m^l`, plus the part of the initial
    state. Time is O(T log T + T M), memory O(T). All arithmetic is in float32 (float64 for float64).

    Args:
        u: ``[B, T, H, P]``: P channels of head h share its eigenvalues and gains.
        rate: ``[H, M]``, not negative: by how much a token lets the state decay, in nats.
        angle: ``[H, M]``, radians.
        gain: ``[H, M, 2]``, real and imaginary part.
        skip: D, ``[H]``; None = no skip connection.
        initial_state: ``[B, H, 2 M, P]``, M real parts and then M imaginary ones; None = zeros.
        mask: bool ``[B, T]``; False marks padding: it is skipped as if it were not there (its outputs are arbitrary).
        wants_state: whether to compute the final state, which takes T * 2 M products for every channel.

    Returns:
        ``[B, T, H, P]`` in the dtype of `u` and the final state ``[B, H, 2 M, P]``, None where it is not wanted.

    >>> rate, angle = torch.full((2, 1, 1), 0.0)                  # one eigenvalue, 1: it adds up the inputs
    >>> y, state = diagonal_ssm(torch.ones(1, 3, 1, 1), rate, angle, torch.tensor([[[0.5, 0.0]]]))
    >>> y[0, :, 0, 0].round(decimals=3)
    tensor([1., 2., 3.])
    """
    length, heads, width = u.shape[1:]
    wide = torch.float64 if u.dtype == torch.float64 else torch.float32
    if context() is not None:
        wants_state = True
        if initial_state is None:
            initial_state = u.new_zeros((u.shape[0], heads, 2 * rate.shape[1], width), dtype=wide)
        initial_state = state_before(initial_state.to(wide), u, rate, angle)
    rate, angle, gain = rate.to(wide), angle.to(wide), gain.to(wide)
    with torch.autocast(u.device.type, enabled=False):
        # Plain torch computes the taps from the powers, which the states need anyway.
        powers = _powers(rate, angle, length + 1) if wants_state or initial_state is not None else None
        taps = _taps(rate, angle, gain, length, powers)
        if skip is not None:
            # The skip connection is added to the tap of lag 0, so it needs no pass over memory.
            taps = torch.cat([taps[:, :1] + skip.to(wide)[:, None], taps[:, 1:]], dim=1)
        flat = u.flatten(2)
        with with_context(None):
            y = long_convolution(flat.to(wide), taps.repeat_interleave(width, dim=0), mask=mask)[0]
        y = y.unflatten(2, (heads, width))
        if powers is None:
            return y.to(u.dtype), None
        real, imaginary = powers
        if initial_state is not None:
            weights = torch.cat([part[..., 1:] for part in _weights(gain, real, imaginary)], dim=1)
            left = torch.einsum("hmt,bhmp->bthp", weights, initial_state.to(wide))
            y = y + (left if mask is None else left.flatten(2).gather(1, _steps(mask, heads * width)).view_as(left))
        final = _final_state(flat, real, imaginary, initial_state, mask, wide) if wants_state else None
    y = y.to(u.dtype)
    return (y, final) if final is None else state_after(y, final)


def diagonal_taps(rate: Tensor, angle: Tensor, gain: Tensor, length: int, *, backend: str | None = None) -> Tensor:
    r"""Return :math:`2\,\mathrm{Re} \sum_m g_m \lambda_m^l` for the lags l < `length`: ``[H, length]``.

    The arguments are those of `diagonal_ssm`, of one dtype; `backend` "triton" or "reference", None chooses.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    return _taps(rate, angle, gain, length, None, backend)


def _taps(
    rate: Tensor,
    angle: Tensor,
    gain: Tensor,
    length: int,
    powers: tuple[Tensor, Tensor] | None,
    backend: str | None = None,
) -> Tensor:
    """`diagonal_taps`; `powers` as `_powers` returned at least `length` of them, None = they are not there yet."""
    if DIAGONAL_TAPS.on_kernels({"rate": rate, "angle": angle, "gain": gain}, backend):
        taps: Tensor = _diagonal_taps_kernel(rate, angle, gain, length)
        return taps
    real, imaginary = (part[..., :length] for part in powers or _powers(rate, angle, length))
    return _weights(gain, real, imaginary)[0].sum(1)


def _powers(rate: Tensor, angle: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts ``[H, M, count]`` of every eigenvalue to the power of 0, 1, ..."""
    powers = torch.arange(count, device=rate.device, dtype=rate.dtype)
    size, turn = torch.exp(-rate[..., None] * powers), angle[..., None] * powers
    return size * turn.cos(), size * turn.sin()


def _weights(gain: Tensor, real: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[H, M, T]`` of the real and imaginary part of a state in the output after so many steps."""
    real_gain, imaginary_gain = (part[..., None] for part in gain.unbind(-1))
    weight = 2 * (real_gain * real - imaginary_gain * imaginary)
    return weight, -2 * (real_gain * imaginary + imaginary_gain * real)


def _steps(mask: Tensor, channels: int) -> Tensor:
    """Index of every token among the real ones of its row, ``[B, T, channels]``."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)[..., None].expand(-1, -1, channels)


def _final_state(
    flat: Tensor, real: Tensor, imaginary: Tensor, initial: Tensor | None, mask: Tensor | None, wide: torch.dtype
) -> Tensor:
    """The state after the last token, ``[B, H, 2 M, P]``; inputs ``[B, T, H * P]``, powers ``[H, M, T + 1]``."""
    length, heads = flat.shape[1], real.shape[0]
    if mask is not None:
        # Padding is moved to the front: zeros before the first token add nothing, whatever their power.
        flat = reorder(flat * mask[..., None].to(flat.dtype), real_tokens_first(~mask))
    oldest_first = torch.cat([real[..., :length], imaginary[..., :length]], dim=1).flip(2)
    inputs = flat.to(wide).unflatten(2, (heads, -1))
    final = torch.einsum("hmt,bthp->bhmp", oldest_first, inputs)
    if initial is None:
        return final
    if mask is None:
        turn_real, turn_imaginary = real[..., -1:], imaginary[..., -1:]
    else:
        read = mask.sum(1)
        turn_real, turn_imaginary = (part[..., read].permute(2, 0, 1)[..., None] for part in (real, imaginary))
    before_real, before_imaginary = initial.to(wide).chunk(2, dim=2)
    return final + torch.cat(
        [
            turn_real * before_real - turn_imaginary * before_imaginary,
            turn_real * before_imaginary + turn_imaginary * before_real,
        ],
        dim=2,
    )
