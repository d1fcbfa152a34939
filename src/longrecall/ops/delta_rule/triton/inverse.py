"""The triangular inverse of every chunk of the delta rule, P = (I + L)^-1, and the cumulative log decays.

The mathematics and the letters are those of ops/delta_rule/chunked.py. hopper/inverse.py does the same in fewer steps.
"""

import triton
import triton.language as tl

from longrecall.ops.delta_rule.triton.forward import CHUNK, dot, exact_dot, numbers_of, rows_of, tile
from longrecall.ops.kernels.launch import kernel


@triton.jit
def _products(k, b, start, T, group, KEY_HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr):
    """k_i k_j^T of a chunk's four blocks of 16 keys, i >= j."""
    p00 = tl.zeros([16, 16], tl.float32)
    p10, p11, p20, p21, p22, p30, p31, p32, p33 = p00, p00, p00, p00, p00, p00, p00, p00, p00
    for column in range(0, K, BK):
        k0 = rows_of(k, b, start, T, group, KEY_HEADS, K, column, 16, BK)
        k1 = rows_of(k, b, start + 16, T, group, KEY_HEADS, K, column, 16, BK)
        k2 = rows_of(k, b, start + 32, T, group, KEY_HEADS, K, column, 16, BK)
        k3 = rows_of(k, b, start + 48, T, group, KEY_HEADS, K, column, 16, BK)
        t0, t1, t2, t3 = tl.trans(k0), tl.trans(k1), tl.trans(k2), tl.trans(k3)
        p00 += dot(k0, t0, MODE)
        p10 += dot(k1, t0, MODE)
        p11 += dot(k1, t1, MODE)
        p20 += dot(k2, t0, MODE)
        p21 += dot(k2, t1, MODE)
        p22 += dot(k2, t2, MODE)
        p30 += dot(k3, t0, MODE)
        p31 += dot(k3, t1, MODE)
        p32 += dot(k3, t2, MODE)
        p33 += dot(k3, t3, MODE)
    return p00, p10, p11, p20, p21, p22, p30, p31, p32, p33


@triton.jit
def _block(products, beta_i, G_i, G_j):
    """A 16 x 16 block of L away from the diagonal."""
    return products * beta_i[:, None] * tl.exp(G_i[:, None] - G_j[None, :])


@triton.jit
def _diagonal_block(products, beta_i, G_i):
    """A 16 x 16 block of L on the diagonal, transposed: its numbers lie above the diagonal."""
    i = tl.arange(0, 16)
    above = i[:, None] < i[None, :]
    decay = tl.where(above, tl.exp(tl.where(above, G_i[None, :] - G_i[:, None], 0.0)), 0.0)
    return products * beta_i[None, :] * decay


@triton.jit
def _substitute(inverse, transposed, i):
    """Row i of (I + L)^-1 from the rows before it, given the transposed L."""
    index = tl.arange(0, 16)
    row = tl.sum(tl.where(index[None, :] == i, transposed, 0.0), axis=1)
    step = tl.sum(row[:, None] * inverse, axis=0)
    return tl.where(index[:, None] == i, inverse - step[None, :], inverse)


@kernel
def invert_kernel(
    k, log_decay, beta, inverse, cumulative, T, strongest,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """P = (I + L)^-1 of one chunk by forward substitution on 16 x 16 blocks, and the cumulative log decay G."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head, start, chunks = row // HEADS, row % HEADS, n * CHUNK, tl.num_programs(0)
    index = tl.arange(0, CHUNK)
    G = tl.cumsum(tl.maximum(numbers_of(log_decay, b, start, T, head, HEADS, CHUNK), strongest), 0)
    here = row * chunks + n
    tl.store(cumulative + here * CHUNK + index, G)
    tl.debug_barrier()
    i = tl.arange(0, 16)
    g = cumulative + here * CHUNK + i
    G0, G1, G2, G3 = tl.load(g), tl.load(g + 16), tl.load(g + 32), tl.load(g + 48)
    group = head // (HEADS // KEY_HEADS)
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = _products(k, b, start, T, group, KEY_HEADS, K, BK, MODE)
    beta0 = numbers_of(beta, b, start, T, head, HEADS, 16)
    beta1 = numbers_of(beta, b, start + 16, T, head, HEADS, 16)
    beta2 = numbers_of(beta, b, start + 32, T, head, HEADS, 16)
    beta3 = numbers_of(beta, b, start + 48, T, head, HEADS, 16)
    L00, L11 = _diagonal_block(p00, beta0, G0), _diagonal_block(p11, beta1, G1)
    L22, L33 = _diagonal_block(p22, beta2, G2), _diagonal_block(p33, beta3, G3)
    P00 = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    P11, P22, P33 = P00, P00, P00
    for r in range(1, 16):
        P00, P11 = _substitute(P00, L00, r), _substitute(P11, L11, r)
        P22, P33 = _substitute(P22, L22, r), _substitute(P33, L33, r)
    L10, L21, L32 = _block(p10, beta1, G1, G0), _block(p21, beta2, G2, G1), _block(p32, beta3, G3, G2)
    L20, L31, L30 = _block(p20, beta2, G2, G0), _block(p31, beta3, G3, G1), _block(p30, beta3, G3, G0)
    P10 = -exact_dot(P11, exact_dot(L10, P00, MODE), MODE)
    P21 = -exact_dot(P22, exact_dot(L21, P11, MODE), MODE)
    P32 = -exact_dot(P33, exact_dot(L32, P22, MODE), MODE)
    P20 = -exact_dot(P22, exact_dot(L20, P00, MODE) + exact_dot(L21, P10, MODE), MODE)
    P31 = -exact_dot(P33, exact_dot(L31, P11, MODE) + exact_dot(L32, P21, MODE), MODE)
    rest = exact_dot(L30, P00, MODE) + exact_dot(L31, P10, MODE) + exact_dot(L32, P20, MODE)
    P30 = -exact_dot(P33, rest, MODE)
    out = inverse + here * CHUNK * CHUNK
    _store_blocks(out, P00, P10, P20, P30, P11, P21, P31, P22, P32, P33)


@triton.jit
def _store_blocks(out, P00, P10, P20, P30, P11, P21, P31, P22, P32, P33):
    """The ten blocks of a lower triangular 64 x 64 matrix, and zeros above them."""
    place = tile(16, 16, CHUNK, 0)
    kind = out.dtype.element_ty
    none = tl.zeros([16, 16], kind)
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1, 4):
            tl.store(out + i * 16 * CHUNK + j * 16 + place, none)
    tl.store(out + place, P00.to(kind))
    tl.store(out + 16 * CHUNK + place, P10.to(kind))
    tl.store(out + 32 * CHUNK + place, P20.to(kind))
    tl.store(out + 48 * CHUNK + place, P30.to(kind))
    tl.store(out + 16 * CHUNK + 16 + place, P11.to(kind))
    tl.store(out + 32 * CHUNK + 16 + place, P21.to(kind))
    tl.store(out + 48 * CHUNK + 16 + place, P31.to(kind))
    tl.store(out + 32 * CHUNK + 32 + place, P22.to(kind))
    tl.store(out + 48 * CHUNK + 32 + place, P32.to(kind))
    tl.store(out + 48 * CHUNK + 48 + place, P33.to(kind))
