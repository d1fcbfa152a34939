"""Products of many rows: several weights in one launch, gate and up in one, against float64 products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

launch = pytest.importorskip("longrecall.ops.kernels.launch")

from longrecall.inference.step import DecodingStep  # noqa: E402
from longrecall.layers.mlp import SwiGLU  # noqa: E402
from longrecall.layers.norm import RMSNorm  # noqa: E402
from longrecall.layers.stepping.stream import FusedStream, Stream  # noqa: E402
from longrecall.models.config import RecurrentConfig  # noqa: E402
from longrecall.models.recurrent_lm import RecurrentLM  # noqa: E402
from longrecall.ops.decoding.triton import wide_products as wide  # noqa: E402
from longrecall.ops.decoding.triton.products import MOST_PARTS, Weight, numbers_of  # noqa: E402
from longrecall.ops.row_scaled import RowScaled  # noqa: E402
from tests.conftest import MIXERS  # noqa: E402
from tests.ops.decoding.test_row_scaled_products import exact, scaled  # noqa: E402
from tests.ops.decoding.test_triton_step import DEVICE, pytestmark, randn  # noqa: E402, F401

SIZE = 40
"""Channels: no power of two, so that the last ones of a tile are masked."""
KINDS = (torch.float32, torch.int8, torch.float8_e4m3fn)
# Sums of 40 products in float32; the largest is near 40.
CLOSE = {"rtol": 1e-5, "atol": 1e-4}


def weight_of(seed: int, count: int, size: int, kind: torch.dtype) -> Weight:
    return randn(seed, count, size) if kind == torch.float32 else scaled(seed, count, size, kind)


def matrix_of(weight: Weight) -> Tensor:
    return exact(weight) if isinstance(weight, RowScaled) else weight.double()


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps along the channels; on a GPU the tiles are what they are."""
    if DEVICE == "cpu":
        monkeypatch.setattr(wide, "_COLUMNS", 16)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [5, 140])
def test_weights_share_a_launch(kind: torch.dtype, rows: int) -> None:
    """More than a launch takes, of all heights; one of another kind stands between them. Rows of x lie apart."""
    x = randn(1, rows, 2 * SIZE)[:, SIZE:]
    counts = [19, 1, 70, 8, 3, 2, 33, 4, 6, 5, 64]
    assert len(counts) > MOST_PARTS
    weights = [weight_of(3 + i, n, SIZE, kind) for i, n in enumerate(counts)]
    weights[3] = weight_of(20, 8, SIZE, KINDS[KINDS.index(kind) - 1])
    for y, weight in zip(wide.wide_products(x, weights), weights, strict=True):
        torch.testing.assert_close(y.double(), x.double() @ matrix_of(weight).T, **CLOSE)
        # Kernels that take the products presume it; and an address from which 16 bytes can be read at once.
        assert y.is_contiguous() and y.data_ptr() % 16 == 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [5, 140])
def test_gate_and_up(kind: torch.dtype, rows: int) -> None:
    # Sums of at most some tens: numpy warns of an overflow in the exponential of larger ones.
    x, gate, up = randn(1, rows, SIZE) / 8, weight_of(3, 19, SIZE, kind), weight_of(4, 19, SIZE, kind)
    expected = F.silu(x.double() @ matrix_of(gate).T) * (x.double() @ matrix_of(up).T)
    # A product of two such sums, each of which may be off by as much.
    torch.testing.assert_close(wide.wide_gate_up(x, gate, up).double(), expected, rtol=4e-5, atol=1e-3)


def test_every_tile_of_a_gpu_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a GPU's size makes of a launch: few programs, many programs, rows in one tile and in several."""
    # A GPU's tiles of float32 numbers would be other ones.
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    close = CLOSE if DEVICE == "cpu" else {"rtol": 2**-8, "atol": 1e-4}
    x = randn(1, 140, SIZE).to(dtype)
    weights = [randn(2, 130, SIZE).to(dtype), randn(3, 3, SIZE).to(dtype)]
    found = set()
    for rows in (5, 70, 140):
        for processors in (1, 12, 1000):
            monkeypatch.setattr(wide, "processors", lambda _, many=processors: many)
            found.add(tile := wide.tile_of(x[:rows], weights[0], [130]))
            for part, weight in zip(wide.wide_products(x[:rows], weights, tile=tile), weights, strict=True):
                torch.testing.assert_close(part.double(), x[:rows].double() @ weight.double().T, **close)
            found.add(tile := wide.tile_of(x[:rows], weights[0], [130], pairs=2))
            gate = x[:rows].double() @ weights[0].double().T
            expected = F.silu(gate.to(dtype).double()) * gate.to(dtype).double()
            y = wide.wide_gate_up(x[:rows], weights[0], weights[0], tile=tile).double()
            # Both sums may be rounded to the next number; after that the activation and the product are.
            torch.testing.assert_close(y, expected, rtol=4e-5 if DEVICE == "cpu" else 2**-5, atol=1e-3)
    assert {tile.high for tile in found} >= {16, 32, 64, 128} and {tile.tall for tile in found} == {16, 32, 64}


KIB = {"a gaming GPU": 99, "Ampere": 163, "Hopper": 227}
"""Shared memory that a program can have."""
QUANTISED = [(dtype, kind) for dtype in launch.DTYPES for kind in KINDS[1:]]


@pytest.mark.parametrize("gpu", KIB)
def test_a_tile_has_room_on_every_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers: without the room a launch would end the first step of a batch."""
    for name, found in (("shared_memory", lambda _: KIB[gpu] << 10), ("interpreting", lambda: False)):
        monkeypatch.setattr(wide, name, found)
    monkeypatch.setattr(wide, "_COLUMNS", 128)
    shapes = [(rows, many) for rows in (3, 32, 64, 65, 256) for many in (20, 132)]
    for dtype, kind in ((torch.bfloat16, torch.bfloat16), *QUANTISED):
        numbers = torch.empty(1, 1024, dtype=kind)
        weight = numbers if kind == dtype else RowScaled(numbers, numbers, dtype)
        for rows, processors in shapes:
            monkeypatch.setattr(wide, "processors", lambda _, many=processors: many)
            for counts, pairs in (([64], 1), ([1024], 1), ([1024] * 5, 1), ([1024], 2), ([2816], 2)):
                tile = wide.tile_of(torch.empty(rows, 1024, dtype=dtype), weight, counts, pairs)
                stage = tile.columns * (pairs * tile.tall * kind.itemsize + tile.high * dtype.itemsize)
                # Products of warp groups take all stages from there, others all but one. The second operand is there
                # once more, float32's in two parts, where its numbers are not multiplied as they are.
                parts = {torch.bfloat16: 0, torch.float16: 4, torch.float32: 8}[dtype] * tile.columns * tile.high
                assert tile.stages * stage + parts <= KIB[gpu] << 10, tile
                assert tile.stages >= 2 and tile.columns >= 64 and tile.high >= 16
                # What was measured stays as it is.
                assert gpu != "Hopper" or dtype != torch.bfloat16 or (tile.columns * pairs >= 128 and tile.stages >= 4)


@pytest.mark.parametrize("bias", [False, True])
def test_a_stream_of_many_rows_forms_its_products_here(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections are one launch and an MLP two; a layer with a bias is called as it is."""
    launches: list[int] = []

    def counted(name: str) -> None:
        whole = getattr(wide, name)
        monkeypatch.setattr(wide, name, lambda *args, **named: launches.append(1) or whole(*args, **named))

    for name in ("_products", "wide_gate_up"):
        counted(name)
    generator = torch.Generator().manual_seed(0)
    norm, mlp = RMSNorm(SIZE).to(DEVICE, torch.bfloat16), SwiGLU(SIZE, 24).to(DEVICE, torch.bfloat16)
    if bias:
        mlp.gate_proj = nn.Linear(SIZE, 24, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in (*norm.parameters(), *mlp.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        weights = [randn(seed, n, SIZE).to(torch.bfloat16) for seed, n in ((1, 24), (2, 3), (3, 24))]
        x = randn(4, 6, SIZE).to(torch.bfloat16)
        plain, fused = Stream(x.clone(), x.dtype), FusedStream(x.clone(), x.dtype)
        expected, found = plain.project(norm, weights), fused.project(norm, weights)
        assert len(launches) == 1
        plain.add_mlp(norm, mlp)
        fused.add_mlp(norm, mlp)
        assert len(launches) == 3 - bias
    # A few steps of bfloat16 numbers of a size near 8; the interpreter cuts off where a GPU rounds.
    for y, other in zip(found, expected, strict=True):
        torch.testing.assert_close(y, other, rtol=2**-6, atol=0.06)
    assert fused.update is not None
    torch.testing.assert_close(fused.x + fused.update, plain.x, rtol=2**-5, atol=0.06)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU multiplies float32 in parts: choices of retrieval may differ")
@pytest.mark.parametrize("name", ["gla_conv", "hymba", "retrieval"])
@torch.no_grad()
def test_layers_take_these_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of whole models, as a library's products give them. In float32, so that roundings hide nothing."""
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[name], "mlp_size": 24}]
    model = RecurrentLM(RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers)).to(DEVICE).eval()

    def logits() -> list[Tensor]:
        step, found = DecodingStep(model, 3, fused=True, room=24), []
        for token in range(2):
            step.ids.copy_((7 * token + 3 * torch.arange(3)) % 40)
            found.append(step().clone())
        return found

    expected, launches, whole = logits(), [], wide._products
    monkeypatch.setattr(wide, "_products", lambda *given: launches.append(len(given[1])) or whole(*given))
    monkeypatch.setattr(wide, "serves", lambda weight, _: weight.is_contiguous())
    for y, other in zip(logits(), expected, strict=True):
        # Float32 sums of 32 products in another order, through a layer.
        torch.testing.assert_close(y, other, rtol=1e-5, atol=1e-5)
    assert launches


@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("kind", [torch.bfloat16, *KINDS[1:]], ids=str)
@pytest.mark.parametrize("rows", [3, 16, 33, 64, 100, 128, 200, 256])
def test_at_the_size_of_a_model(kind: torch.dtype, rows: int) -> None:
    """In bfloat16, with every tile that a launch of this size takes; also the sums of a wide MLP."""
    x = randn(1, rows, 1024).to(torch.bfloat16)

    def made(seed: int, count: int, size: int) -> Weight:
        if kind == torch.bfloat16:
            return randn(seed, count, size).to(kind)
        return scaled(seed, count, size, kind, torch.bfloat16)

    weights = [made(2 + i, n, 1024) for i, n in enumerate((1024, 1024, 2048, 8, 3))]
    for y, weight in zip(wide.wide_products(x, weights), weights, strict=True):
        exact_y = x.double() @ matrix_of(weight).T
        # Half of bfloat16's distance, and float32's error of 1,024 terms that cancel.
        torch.testing.assert_close(y.double(), exact_y, rtol=2**-8, atol=float(exact_y.abs().max()) * 1e-5)
    gate, up = made(8, 2816, 1024), made(9, 2816, 1024)
    g, u = (((x / 64).double() @ matrix_of(weight).T).to(torch.bfloat16).double() for weight in (gate, up))
    sigmoid = torch.sigmoid(g)
    # Both sums may be rounded to the next number; after that the activation and the product are.
    step = (g * u * sigmoid * (1 + g * (1 - sigmoid))).abs() + 3 * (F.silu(g) * u).abs()
    found = wide.wide_gate_up(x / 64, gate, up).double()
    assert ((found - F.silu(g) * u).abs() <= 2**-7 * step + 1e-5).all()
    down, y = made(10, 1024, 2816), randn(11, rows, 2816).to(torch.bfloat16)
    exact_y = y.double() @ matrix_of(down).T
    found = wide.wide_product(y, down).double()
    torch.testing.assert_close(found, exact_y, rtol=2**-8, atol=float(exact_y.abs().max()) * 1e-5)


def test_what_is_left_to_a_library() -> None:
    """Weights of another dtype, parts of another weight, more rows than pay."""
    weight = torch.empty(4, 8, dtype=torch.bfloat16)
    assert wide.serves(weight, 5) and wide.serves(nn.Parameter(weight), wide.MOST_ROWS)
    assert not wide.serves(weight, wide.MOST_ROWS + 1)
    assert not wide.serves(weight[:, :4], 5) and not wide.serves(weight.T, 5)
    assert not wide.serves(weight.float(), 5) and not wide.serves(weight.half(), 5)
    assert numbers_of(weight) is weight
