"""The kernels of the delta rule on a GPU against float64: outputs, final state, every gradient, at real widths."""

from __future__ import annotations

import pytest
import torch

from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from tests.ops.delta_rule.test_triton_delta import TOLERANCE, convolution_errors, errors, layer_errors, make, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(inputs: list) -> list:
    return [x.cuda() for x in inputs]


def case(B: int, H: int, E: int, R: int, K: int, V: int) -> dict[str, int]:
    return {"B": B, "H": H, "E": E, "R": R, "K": K, "V": V}


# A length below the chunk, whole chunks, and last chunks of a few tokens and of one. All share a case's kernels.
LENGTHS = (1, 64, 333, 1025)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [case(2, 2, 4, 2, 128, 128), case(1, 2, 3, 1, 64, 64), case(1, 2, 2, 1, 128, 256), case(1, 2, 2, 2, 32, 80)],
    ids=["shared_keys", "narrow", "wide_values", "filled_up"],
)
def test_kernels_equal_float64(shape: dict[str, int], dtype: torch.dtype) -> None:
    found = {length: errors(on_gpu(make(shape, length, dtype))) for length in LENGTHS}
    assert all(error < TOLERANCE[dtype] for of_length in found.values() for error in of_length.values()), found


@pytest.mark.parametrize("shape", [case(1, 2, 2, 1, 256, 256), case(3, 1, 2, 1, 16, 16)], ids=["widest", "narrowest"])
def test_extreme_widths(shape: dict[str, int]) -> None:
    found = {length: errors(on_gpu(make(shape, length, torch.bfloat16))) for length in LENGTHS}
    assert all(error < TOLERANCE[torch.bfloat16] for of_length in found.values() for error in of_length.values()), found


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_extreme_decays(dtype: torch.dtype) -> None:
    for strength in (1e-4, 20.0, 1e4):
        # The floor: where everything is forgotten at once, the decay's true gradient is nothing.
        found = errors(on_gpu(make(case(1, 2, 2, 1, 128, 128), 200, dtype, strength)), floor=1.0)
        # Cumulative decays of up to 64 * 30 have low bits of 1e-4 in float32, and so have their exponentials.
        assert all(error < max(TOLERANCE[dtype], 1e-3 if strength > 1 else 0.0) for error in found.values()), (
            strength,
            found,
        )


def test_two_runs_are_the_same_to_the_bit() -> None:
    inputs = on_gpu(make(case(2, 4, 4, 1, 128, 128), 777, torch.bfloat16))
    first, second = (run(lambda *x, **o: subhead_delta_rule(*x, **o, backend="triton"), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 777, 16, 128), (3, 16, 6, 64), (1, 130, 1, 256), (1, 300, 5, 16)])
def test_convolution(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for normalise in (True, False):
        found = convolution_errors(shape, dtype, normalise, "cuda")
        assert all(error < TOLERANCE[dtype] for error in found), (normalise, found)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grafted", [False, True])
def test_layer_with_four_subheads(grafted: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expansion = {"kind": "headwise", "factor": 4, "grafted": grafted}
    config = {"num_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128, "expansion": expansion}
    dtype = torch.bfloat16 if autocast else torch.float32
    found = layer_errors(config, 200, torch.float32, monkeypatch, device="cuda", hidden=256, rows=2, autocast=autocast)
    # A layer is a dozen roundings deep: projections, expansion, convolution, norm, recurrence, norm, projection.
    assert all(error < 5 * TOLERANCE[dtype] for error in found.values()), found
