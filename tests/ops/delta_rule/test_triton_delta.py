"""The kernels of the delta rule and of layers with subheads in Triton's CPU interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.layers import fused_delta
from longrecall.layers.mixers.delta_net import DeltaNetConfig, GatedDeltaNetConfig
from longrecall.layers.norm import l2_normalise
from longrecall.ops import gated_delta_rule, short_convolution
from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from longrecall.ops.execution import padding_at_the_end

delta_rule = pytest.importorskip("longrecall.ops.delta_rule.triton.chunked")
delta_plan = pytest.importorskip("longrecall.ops.delta_rule.triton.plan")
convolution = pytest.importorskip("longrecall.ops.convolution.triton.short")
launch = pytest.importorskip("longrecall.ops.kernels.launch")

interpreted = pytest.mark.skipif(not launch.interpreting(), reason="needs TRITON_INTERPRET=1; see test_gpu_delta.py")

NAMES = ("output", "final state", "q", "k", "v", "log decay", "beta", "weights", "state")
# The norm of the error over the norm of the result. float32: sums of a few thousand terms, from three tf32 products
# each. float16 is multiplied as tf32, to which tensor cores cut float32 (2^-10 at worst, always towards zero), three or
# four products in a row; bfloat16 is rounded to 2^-8, as often.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def make(shape: dict[str, int], length: int, dtype: torch.dtype, strength: float = 0.02) -> list[Tensor]:
    """q, k, v, log decay, beta, weights, state on the CPU, rounded to the dtypes the kernels read.

    Decays are weak by default: a strong one hides what tokens far apart in a chunk do to each other.
    """
    g = torch.Generator().manual_seed(length)
    B, H, E, R, K, V = (shape[name] for name in "BHERKV")

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    q, k = (F.normalize(randn(B, length, H * E, K), dim=-1).to(dtype) for _ in range(2))
    decay = -strength * torch.rand(B, length, H * E * R, generator=g)
    beta = torch.rand(B, length, H * E * R, generator=g)
    v = randn(B, length, H * R, V).to(dtype)
    return [q, k, v, decay, beta, randn(H * R, E), randn(B, H * E * R, K, V)]


def run(op: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """o, final state and the gradient of a fixed random scalar to every input, in float64 on the CPU."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, decay, beta, weights, state = leaves
    o, final = op(q, k, v, decay, beta, weights=weights, initial_state=state)
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g).to(x)).sum() for x in (o, final))
    loss.backward()
    return [x.detach().double().cpu() for x in (o, final, *(x.grad for x in leaves))]


def errors(inputs: list[Tensor], floor: float = 1e-12) -> dict[str, float]:
    """The kernels against the chunked code in float64, which test_recurrences.py holds against the definition."""

    def kernels(*tensors: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
        return subhead_delta_rule(*tensors, **options, backend="triton")

    def plain(*tensors: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
        return subhead_delta_rule(*tensors, **options, backend="chunked")

    found = run(kernels, inputs)
    expected = run(plain, [x.double() for x in inputs])
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: float((a - b).norm() / b.norm().clamp(min=floor)) for name, a, b in pairs}


@interpreted
@pytest.mark.parametrize(
    ("shape", "length", "dtype"),
    [
        ({"B": 1, "H": 1, "E": 2, "R": 2, "K": 16, "V": 32}, 70, torch.float32),
        ({"B": 2, "H": 2, "E": 1, "R": 1, "K": 32, "V": 16}, 20, torch.bfloat16),
        ({"B": 1, "H": 1, "E": 2, "R": 2, "K": 16, "V": 16}, 66, torch.bfloat16),
        ({"B": 1, "H": 1, "E": 3, "R": 1, "K": 16, "V": 16}, 17, torch.float16),
        ({"B": 1, "H": 2, "E": 1, "R": 2, "K": 7, "V": 17}, 20, torch.float32),
    ],
    ids=["float32", "bfloat16", "bfloat16_subheads", "float16", "filled_up"],
)
def test_kernels_equal_float64(
    shape: dict[str, int], length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One row of the batch at a time in the backward.
    monkeypatch.setattr(delta_plan, "WORKSPACE", 1)
    found = errors(make(shape, length, dtype))
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@interpreted
def test_what_a_token_reads_of_itself_cancels_in_the_gradient_of_strong_decays() -> None:
    shape = {"B": 1, "H": 1, "E": 2, "R": 1, "K": 32, "V": 32}
    found = errors(make(shape, 70, torch.bfloat16, 20.0), floor=1.0)
    # A few roundings to 2^-8. Terms of size 1 that do not quite cancel, beside a sum of a tenth, make it 10 times that.
    assert found["log decay"] < 1e-2, found


@pytest.mark.parametrize("mode", ["bf16", "tf32", "tf32x3"])
@pytest.mark.parametrize("widths", [(64, 64), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 256)])
def test_tiles_of_a_gpu_are_at_least_128_bytes_wide(widths: tuple[int, int], mode: str) -> None:
    plan = delta_plan.Plan(1, 100, 1, 1, 1, 1, *widths, mode, 1.0)
    tiles = (plan.value_block, plan.key_tile, plan.value_tile)
    # Narrower ones were computed wrongly on an H200; see delta_rule.py.
    assert min(tiles) * plan.kept.itemsize >= 128
    assert widths[0] % plan.key_tile == 0
    assert widths[1] % plan.value_block == 0
    assert widths[1] % plan.value_tile == 0


@interpreted
def test_bfloat16_sums_round_every_subhead_once() -> None:
    q, k, v, decay, beta, weights, state = make(
        {"B": 1, "H": 1, "E": 4, "R": 1, "K": 16, "V": 16}, 70, torch.bfloat16, 0.02
    )
    out, _ = delta_rule.subhead_delta_rule(q, k, v, decay, beta, 0.25, state, weights)
    alone = torch.zeros(1, 70, 1, 16)
    for e in range(4):
        head = (q[:, :, [e]], k[:, :, [e]], v, decay[:, :, [e]], beta[:, :, [e]])
        alone += delta_rule.subhead_delta_rule(*head, 0.25, state[:, [e]], weights[:, [e]])[0].float()
    # The same four numbers in bfloat16, added up in float32 and rounded once more.
    assert torch.equal(out, alone.bfloat16())


@pytest.mark.parametrize(("rows", "expected"), [(8, 4), (5, 3), (4, 4), (1, 1)])
def test_groups_of_rows_fit_the_workspace_and_are_alike(rows: int, expected: int) -> None:
    # 64 heads of 128, 4096 tokens: 320 MiB a row of states, corrections and their gradients, and 300 MiB more.
    plan = delta_plan.Plan(rows, 4096, 64, 64, 8, 8, 128, 128, "bf16", 1.0)
    more = 150 * 2**20
    assert plan.group_rows(132, more) == expected
    assert expected * (192 * 2**20 + more) * 2 <= delta_plan.WORKSPACE
    # 2 rows of 128 programs are enough for 132 multiprocessors, whatever they take.
    assert plan.group_rows(132, 2**40) == min(rows, 2)


@interpreted
@pytest.mark.parametrize("strength", [1e-4, 1e4])
def test_extreme_decays(strength: float) -> None:
    found = errors(make({"B": 1, "H": 1, "E": 1, "R": 1, "K": 16, "V": 16}, 40, torch.float32, strength), floor=1.0)
    # Cumulative decays of up to 40 * 30 have low bits of 1e-4 in float32, and so have their exponentials.
    assert all(error < (1e-3 if strength > 1 else TOLERANCE[torch.float32]) for error in found.values()), found


@interpreted
def test_no_decay_no_weights_and_no_state() -> None:
    q, k, v, _, beta, _, _ = make({"B": 1, "H": 1, "E": 2, "R": 1, "K": 16, "V": 16}, 20, torch.float32)
    found = subhead_delta_rule(q, k, v, None, beta, backend="triton")
    expected = subhead_delta_rule(*(x.double() for x in (q, k, v)), None, beta.double(), backend="reference")
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < TOLERANCE[torch.float32]


def test_plain_path_equals_every_state_head_on_its_own() -> None:
    H, E, R = 2, 3, 2
    shape = {"B": 2, "H": H, "E": E, "R": R, "K": 5, "V": 7}
    q, k, v, decay, beta, weights, state = (x.double() for x in make(shape, 9, torch.float64))
    o, final = subhead_delta_rule(q, k, v, decay, beta, weights=weights, initial_state=state)
    expected = torch.zeros_like(v)
    for head in range(H):
        for sub in range(E):
            for repeat in range(R):
                key, value = head * E + sub, head * R + repeat
                index = key * R + repeat
                pick = (slice(None), slice(None), slice(index, index + 1))
                one, last = gated_delta_rule(
                    q[:, :, key, None],
                    k[:, :, key, None],
                    v[:, :, value, None],
                    decay[pick],
                    beta[pick],
                    initial_state=state[:, index, None],
                )
                expected[:, :, value] += weights[value, sub] * one[:, :, 0]
                torch.testing.assert_close(final[:, index], last[:, 0], rtol=0, atol=1e-12)
    # float64 sums of a few terms in another order.
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": (1, 4, 5)}, "beta needs E heads for each of the 2 value heads"),
        ({"q": (1, 4, 3, 16)}, "and q E for each key head"),
        ({"weights": (3, 2)}, r"weights must be \[2, 2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"q": (1, 4, 4, 16), "k": (1, 4, 4, 16), "v": (1, 4, 2, 16), "beta": (1, 4, 4), "weights": (2, 2)} | change
    x = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        subhead_delta_rule(x["q"], x["k"], x["v"], None, x["beta"], weights=x["weights"])


@interpreted
def test_what_the_kernels_decline_is_said() -> None:
    x = torch.zeros(1, 20, 2, 257)
    with pytest.raises(ValueError, match="key width must be 1 to 256, not 257"):
        subhead_delta_rule(x, x, x, None, x[..., 0], backend="triton")
    with pytest.raises(ValueError, match="more than 128 channels, here 129, are served in bfloat16 alone"):
        subhead_delta_rule(x[..., :129], x[..., :129], x[..., :9], None, x[..., 0], backend="triton")
    with pytest.raises(ValueError, match="one decay per head, not one per key channel"):
        gated_delta_rule(x[..., :16], x[..., :16], x[..., :16], -x[..., :16], x[..., 0], backend="triton")


def convolution_errors(
    shape: tuple[int, int, int, int], dtype: torch.dtype, normalise: bool, device: str = "cpu"
) -> list[float]:
    """Relative error of the output and of the gradients of z, taps and state."""
    g = torch.Generator().manual_seed(3)
    B, T, H, D = shape
    sizes = [(B, T, H, D), (H * D, 4), (B, H * D, 3), shape]
    z, taps, state, upstream = (torch.randn(size, generator=g).to(dtype).to(device) for size in sizes)

    def plain(z: Tensor, taps: Tensor, state: Tensor, normalise: bool) -> Tensor:
        y = short_convolution(z.flatten(2), taps, state=state)[0].view_as(z)
        return l2_normalise(y) if normalise else y

    def results(op: Callable, *tensors: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = op(*leaves, normalise=normalise)
        out.backward(upstream.to(out.dtype))
        return [x.double() for x in (out.detach(), *(leaf.grad for leaf in leaves))]

    found = results(convolution.convolve_heads, z, taps, state)
    expected = results(plain, z.double(), taps.double(), state.double())
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@interpreted
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 22, 3, 16), torch.float32), ((2, 2, 1, 16), torch.float32), ((1, 15, 2, 32), torch.bfloat16)],
)
def test_convolution(
    shape: tuple[int, int, int, int], dtype: torch.dtype, normalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several programs of two steps each: what they read of their neighbours' tokens counts, and what they carry on.
    monkeypatch.setattr(convolution, "SEGMENT", 8)
    found = convolution_errors(shape, dtype, normalise)
    assert all(error < TOLERANCE[dtype] for error in found), found


def layer_errors(
    config: dict[str, Any],
    length: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    *,
    device: str = "cpu",
    hidden: int = 24,
    rows: int = 1,
    gated: bool = True,
    autocast: bool = False,
) -> dict[str, float]:
    """A layer that goes on from a state on the kernels, against itself on the plain path in float64."""
    mixer = (GatedDeltaNetConfig if gated else DeltaNetConfig).from_dict(config)
    torch.manual_seed(0)
    source = mixer.build(hidden)
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=hidden**-0.5 if "proj" in name else 0.5)
    x, results = torch.randn(rows, length + 5, hidden), []
    for kind, backend in ((torch.float64, "chunked"), (dtype, "triton")):
        layer = mixer.build(hidden)
        layer.load_state_dict(source.state_dict())
        layer = layer.to(device, kind)
        leaf = x.to(device, kind).requires_grad_()
        options = {"mask": None, "position": torch.zeros(rows, dtype=torch.long)}
        with torch.autocast(device, torch.bfloat16, enabled=autocast and backend == "triton"):
            monkeypatch.setenv("LONGRECALL_BACKEND", "chunked")
            _, state = layer(leaf[:, :5], None, **options)
            monkeypatch.setenv("LONGRECALL_BACKEND", backend)
            assert (fused_delta.why_not(layer, leaf[:, 5:], None, None) is None) == (backend == "triton")
            y, state = layer(leaf[:, 5:], state, **options)
        outputs = {"y": y, **{name: state[name] for name in sorted(state)}}
        g = torch.Generator().manual_seed(1)
        sum((out * torch.randn(out.shape, generator=g).to(out)).sum() for out in outputs.values()).backward()
        gradients = {"x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        results.append({name: t.detach().double() for name, t in {**outputs, **gradients}.items()})
    plain, fused = results
    return {name: float((fused[name] - x).norm() / x.norm()) for name, x in plain.items()}


SIZES = {"num_heads": 1, "key_dim": 16, "value_dim": 16}


@interpreted
@pytest.mark.parametrize(
    ("change", "gated"),
    [
        ({}, True),
        ({"value_heads": 2, "expansion": {"kind": "headwise", "factor": 2}}, True),
        ({"expansion": {"kind": "headwise", "factor": 2, "grafted": True}}, False),
        ({"expansion": {"kind": "lfm", "factor": 2}}, True),
    ],
    ids=["plain", "shared_keys", "grafted", "lfm"],
)
def test_layer_equals_the_plain_path(change: dict[str, Any], gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = layer_errors(SIZES | change, 16, torch.float32, monkeypatch, gated=gated)
    # float32 arithmetic; a few gradients are small beside the terms they are sums of.
    assert all(error < 5 * TOLERANCE[torch.float32] for error in found.values()), found


@interpreted
@pytest.mark.parametrize(
    "change", [{}, {"expansion": {"kind": "headwise", "factor": 2, "grafted": True}}], ids=["plain", "grafted"]
)
def test_layer_takes_a_few_rows_of_the_batch_at_a_time(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_plan, "WORKSPACE", 1)
    config = SIZES | change
    # 3: of a plain layer, whose programs are few, no fewer than 2 are taken.
    found = layer_errors(config, 16, torch.float32, monkeypatch, rows=3)
    assert all(error < 5 * TOLERANCE[torch.float32] for error in found.values()), found


@interpreted
@pytest.mark.parametrize(
    ("change", "gated"),
    [({}, True), ({"expansion": {"kind": "headwise", "factor": 2, "grafted": True}}, False)],
    ids=["plain", "grafted"],
)
def test_padding_at_the_end_is_left_out(change: dict[str, Any], gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = (GatedDeltaNetConfig if gated else DeltaNetConfig).from_dict(SIZES | change).build(24)
    counts, x = [0, 1, 2, 3, 20], torch.randn(5, 25, 24)
    options: dict[str, Any] = {"position": torch.zeros(5, dtype=torch.long)}
    mask = torch.arange(20) < torch.tensor(counts)[:, None]
    with torch.no_grad():
        _, before = layer(x[:, :5], None, mask=None, **options)
        monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
        assert fused_delta.why_not(layer, x[:, 5:], mask, None) is not None
        with padding_at_the_end(mask):
            assert fused_delta.why_not(layer, x[:, 5:], mask, None) is None
            assert fused_delta.why_not(layer, x[:, 5:], mask.clone(), None) is not None
            y, after = layer(x[:, 5:], before, mask=mask, **options)
        monkeypatch.setenv("LONGRECALL_BACKEND", "chunked")
        for row, count in enumerate(counts):
            state = {name: tensor[row : row + 1] for name, tensor in before.items()}
            expected, end = layer(x[row : row + 1, 5 : 5 + count], state, mask=None, **options) if count else (y, state)
            for found, right in [(y[row, :count], expected[0, :count]), *((after[n][row], end[n][0]) for n in end)]:
                # float32 arithmetic in another order.
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@interpreted
def test_a_layer_keeps_what_it_projects_and_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    layer = GatedDeltaNetConfig.from_dict(SIZES).build(24)
    x, kept = torch.randn(1, 40, 24), {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = layer(x.requires_grad_(), None, mask=None, position=torch.zeros(1, dtype=torch.long))
    # Projections of q, k, v and the gate, and the outputs; what convolutions, norm and gate make of them is made again.
    assert list(kept.values()).count(40 * 16) == 5
    assert y.requires_grad


@interpreted
@pytest.mark.parametrize("backend", ["triton", "chunked"])
@pytest.mark.parametrize("factor", [1, 2])
def test_a_layer_takes_a_batch_without_rows(factor: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", backend)
    layer = GatedDeltaNetConfig.from_dict(SIZES | {"expansion": {"kind": "headwise", "factor": factor}}).build(24)
    x = torch.zeros(0, 20, 24, requires_grad=True)
    y, state = layer(x, None, mask=None, position=torch.zeros(0, dtype=torch.long))
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None and state["recurrent"].shape == (0, factor, 16, 16)
    q, v, beta = torch.zeros(0, 20, factor, 16), torch.zeros(0, 20, 1, 16), torch.zeros(0, 20, factor)
    assert subhead_delta_rule(q, q, v, None, beta, backend=backend)[0].shape == v.shape


@interpreted
def test_what_a_layer_leaves_to_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = GatedDeltaNetConfig.from_dict(SIZES).build(24), torch.zeros(1, 20, 24)
    assert "not on a GPU" in str(fused_delta.why_not(layer, x, None, None))
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    assert fused_delta.why_not(layer, x, None, None) is None
    assert "padded" in str(fused_delta.why_not(layer, x, torch.ones(1, 20, dtype=torch.bool), None))
    assert "fewer than 16" in str(fused_delta.why_not(layer, x[:, :15], None, None))
    assert "per key channel" in str(fused_delta.why_not(layer, x, None, torch.zeros(1, 20, 1, 16)))
    with pytest.raises(ValueError, match="float64 is left to the other backends"):
        fused_delta.why_not(layer.double(), x.double(), None, None)
    odd = GatedDeltaNetConfig.from_dict(SIZES | {"key_dim": 24}).build(24)
    assert "key width of 24 would have to be filled up" in str(fused_delta.why_not(odd, x, None, None))
    without = GatedDeltaNetConfig.from_dict(SIZES | {"conv_width": 0}).build(24)
    assert "4 taps" in str(fused_delta.why_not(without, x, None, None))
