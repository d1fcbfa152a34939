"""Bytes and products of a layer with subheads are counted rightly, and its page says what was counted and measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_layer_bounds
import hopper_instructions
import layer_designs
import pytest
import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECORD = RESULTS / "gpu_layer_bounds.json"
PAGE = (ROOT / "docs" / "kernels" / "layer_bounds.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())

MADE, GRADIENTS = "expansion, convolution, SiLU, norm", "gradients of those"
WALKS = ("walk, forward", "walk that keeps states", "walk back")
KEYS, PRODUCTS = "gradients of queries and keys", "projections and gradients of heads and weights"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return layer_designs.read(RECORD)


@pytest.fixture(scope="module")
def instructions() -> dict[str, dict[str, Any]]:
    return layer_designs.read(RESULTS / "hopper_instructions.json")


def share(number: float) -> str:
    """Two digits, no zero before the point."""
    return f"{number:.2f}".removeprefix("0")


@pytest.mark.parametrize("subheads", [2, 8])
def test_bytes_are_those_of_the_tensors(subheads: int) -> None:
    """The walks' and the gradients' tensors in the shapes in which ops/delta_rule makes them, each once."""
    B, T, H, D, C = 8, 4096, 8 * subheads, 128, 64

    def size(*shape: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return torch.empty(shape, dtype=dtype, device="meta").nbytes

    wide, shared, gate = size(B, T, H, D), size(B, T, 8, D), size(B, T, H, dtype=torch.float32)
    inverse, states = size(B, H, T // C, C, C), size(B, H, T // C, D, D)
    final = size(B, H, D, D, dtype=torch.float32)
    counted = {part.name: part.bytes for part in gpu_layer_bounds.parts(subheads)}
    assert counted["inverse"] == wide + 2 * gate + inverse + gate
    assert counted["walk, forward"] == 2 * wide + shared + inverse + 2 * gate + wide + final
    assert counted["sum over subheads"] == wide + shared
    assert counted["walk that keeps states"] == wide + shared + inverse + 2 * gate + states + wide
    assert counted["walk back"] == 2 * wide + shared + inverse + 2 * gate + states + wide
    assert counted["gradients of values"] == wide + shared + gate + shared + gate
    assert counted[KEYS] == 4 * wide + 2 * states + shared + 2 * gate + 2 * wide + 2 * gate
    assert counted[MADE] == 4 * (shared + wide) + 2 * gate
    assert counted[GRADIENTS] == 2 * (shared + wide + gate + wide)


def test_products_of_the_walks_are_those_of_their_code() -> None:
    """Instructions of 64 x N numbers over 16 channels, as tests/ops/kernels/test_hopper_compiles.py counts them."""
    counted = {part.name: part.flops for part in gpu_layer_bounds.parts(8)}
    chunks = gpu_layer_bounds.units(8).chunks
    # Both warp groups together: 128 x 64, 64 x 64 (scores) or 128 x 128 numbers.
    tokens, scores, state = 2 * 128 * 64, 2 * 64 * 64, 2 * 128 * 128
    read = 8 * 16 * (2 * tokens + scores) + 4 * 16 * (2 * tokens + state)
    keep = 8 * 16 * tokens + 4 * 16 * (tokens + state)
    back = 8 * 16 * (tokens + scores) + 4 * 16 * (2 * state + 2 * tokens)
    assert [counted[name] / chunks for name in WALKS] == [read, keep, back]
    # Two scores and three products with a state over the values, then four products of scores with rows.
    assert counted[KEYS] / chunks == 128 * (2 * scores + 3 * tokens) + 64 * 4 * tokens


def test_a_record_is_counted_anew_and_keeps_its_times(tmp_path: Path, rows: dict[str, dict[str, Any]]) -> None:
    copy = tmp_path / "record.json"
    shutil.copy(RECORD, copy)
    told = json.loads(copy.read_text())
    for row in told["rows"][2:]:
        row.update({key: 0.0 for key in ("bound_ms", "share", "gigabytes", "teraflops") if key in row})
    copy.write_text(json.dumps(told))
    gpu_layer_bounds.recount(copy)
    for name, found in layer_designs.read(copy).items():
        assert found == rows[name], name


def test_scripts_print_their_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_layer_bounds.py", "--counts"])
    gpu_layer_bounds.main()
    assert "gradients of queries and keys: 5.47 GB, 0.412 TFLOP" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["layer_designs.py", str(RECORD)])
    layer_designs.main()
    assert "as it is: bound 7.20 ms, layer 10.20 ms" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_layer_bounds.py", "--subheads", "1"])
    with pytest.raises(SystemExit):
        gpu_layer_bounds.main()
    assert "at least 2" in capsys.readouterr().err


def test_the_longest_loop_of_disassembled_code() -> None:
    code = """
    .L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
    .L_x_1:
        /*0010*/              @!P0 FADD.FTZ R2, R2, R3 ;
        /*0020*/                   MUFU.EX2 R4, R2 ;
        /*0030*/              @P1  BRA `(.L_x_1) ;
        /*0040*/                   BRA `(.L_x_2) ;
        /*0050*/                   NOP ;
    .L_x_2:
        /*0060*/                   BRA `(.L_x_2) ;
    """
    assert hopper_instructions.longest_loop(code) == ["FADD", "MUFU", "BRA"]


@pytest.mark.slow
def test_recorded_instructions_are_those_of_todays_kernels(
    tmp_path: Path, instructions: dict[str, dict[str, Any]]
) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "hopper_instructions.py"), "--out", str(out)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    subprocess.run(command, check=True, env=env, timeout=280, capture_output=True)
    for name, row in layer_designs.read(out).items():
        # Releases of Triton and of its assembler differ by a few instructions.
        assert row["instructions"] == pytest.approx(instructions[name]["instructions"], rel=0.1), name


def test_page_time_and_bound(rows: dict[str, dict[str, Any]]) -> None:
    kernels = {name: row for name, row in rows.items() if name != "rates" and not name.startswith("layer")}
    for name, row in kernels.items():
        if name == "everything else":
            cells = [f"{row['ms']:.2f}", "", "", "", "", ""]
        else:
            cells = [f"{row['ms']:.2f}", f"{row['bound_ms']:.2f}", share(row["share"])]
            cells.append(f"{abs(round(row['ms'] - row['bound_ms'], 2)):.2f}")
            cells += [f"{row[of]:.2f}" if of in row else "" for of in ("gigabytes", "teraflops")]
        line = f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
        assert line in PAGE
    total, rates, layer = rows["all kernels"], rows["rates"], rows["layer E 8"]["ms"]
    rest = layer - total["ms"]
    assert f"takes {layer:.1f} ms forward and backward" in WORDS and f"and {rest:.2f} ms pass between them" in WORDS
    assert f"kernels are at {share(total['share'])} of their bound" in WORDS
    assert f"take {total['bound_ms']:.2f} ms at least. The kernels take {total['ms']:.2f} ms, and" in WORDS
    assert f"{rates['copy_tb_per_second']:.2f} TB/s" in WORDS and f"{rates['product_tflops']:.0f} TFLOP/s" in WORDS
    wanted = total["bound_ms"] / (8 - rest)
    assert f"**8 ms would need {share(wanted)}, from" in WORDS
    assert f"are {8 - rest:.2f} ms, and the bound is {total['bound_ms']:.2f} ms: a share of {share(wanted)}." in WORDS
    at_bound = [
        layer - sum(rows[n]["ms"] - rows[n]["bound_ms"] for n in (MADE, GRADIENTS, *more)) for more in ((), WALKS)
    ]
    assert f"would take {at_bound[0]:.2f} ms. If the three walks did so too, {at_bound[1]:.2f} ms." in WORDS


def test_page_what_the_gap_is_made_of(rows: dict[str, dict[str, Any]]) -> None:
    gap = rows["all kernels"]["ms"] - rows["all kernels"]["bound_ms"]
    groups = {
        MADE: (MADE,), GRADIENTS: (GRADIENTS,), "three walks": WALKS, KEYS: (KEYS,), "products of cuBLAS": (PRODUCTS,)
    }  # fmt: skip
    beyond = {title: sum(rows[x]["ms"] - rows[x]["bound_ms"] for x in names) for title, names in groups.items()}
    beyond["all other kernels"] = gap - sum(beyond.values())
    for title, ms in beyond.items():
        assert f"| {title} | {ms:.2f} | {ms / gap:.0%} |" in PAGE
    assert 0.45 < (beyond[MADE] + beyond[GRADIENTS]) / gap < 0.55 and "Half of the gap lies in the expansion" in WORDS


def test_page_instructions(rows: dict[str, dict[str, Any]], instructions: dict[str, dict[str, Any]]) -> None:
    rates = rows["rates"]
    for name, row in instructions.items():
        times = [
            rows[name]["gigabytes"] / rates["copy_tb_per_second"],
            1e3 * rows[name]["teraflops"] / rates["product_tflops"],
        ]
        times.append(row["issue_ms"])
        cells = [f"{ms:.2f}" for ms in (*times, sum(times), rows[name]["ms"])]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
    # A turn of 8 warps makes 64 x 128 numbers.
    numbers = 64 * 128 / (8 * 32)
    made, gradients = instructions[MADE], instructions[GRADIENTS]
    takes = [f"{row['instructions'] / numbers:.1f}" for row in (made, gradients)]
    special = [f"{row['special_functions'] / numbers:.1f}" for row in (made, gradients)]
    assert f"A number takes {takes[0]} instructions forward and {takes[1]} backward." in WORDS
    assert f"Of these {special[0]} and {special[1]} are powers of two and reciprocals" in WORDS
    memory = [instructions[name]["shared_kib"] for name in WALKS]
    assert f"{min(memory):.0f} to {max(memory):.0f} KiB of shared memory" in WORDS
    assert f"{instructions[KEYS]['shared_kib']:.1f} of 227 KiB" in WORDS


def test_page_other_designs(rows: dict[str, dict[str, Any]]) -> None:
    for design in layer_designs.designs(8):
        counts = [
            sum(x.bytes for x in design.parts) / 1e9,
            sum(x.flops for x in design.parts) / 1e12,
            design.kept / 2**30,
        ]
        bound = gpu_layer_bounds.bound_ms(design.parts, rows["rates"])
        expected = layer_designs.expected_ms(design, 8, rows)
        cells = [f"{counts[0]:.1f}", f"{counts[1]:.2f}", f"{counts[2]:.1f}", f"{bound:.2f}", f"{expected:.1f}"]
        assert f"| {design.name} | {' | '.join(cells)} |" in PAGE
        if design.name == "nothing expanded is written":
            # Each of four passes of today takes as long as the others; there would be seven.
            once = rows[MADE]["ms"] / 4
            assert f"Each time takes {once:.2f} ms today" in WORDS
            assert f"with three more the layer takes {expected + 3 * once:.1f} ms" in WORDS
    assert f"might take {expected:.1f} ms" in WORDS


def test_page_by_expansion_factor(rows: dict[str, dict[str, Any]]) -> None:
    layers = layer_designs.read(RESULTS / "gpu_layers.json")
    bounds = [gpu_layer_bounds.bound_ms(gpu_layer_bounds.parts(E), rows["rates"]) for E in (2, 4, 8, 16)]
    times = [layers[f"layer E={E} ours"]["graph_ms"] for E in (2, 4, 8, 16)]
    for title, cells in (
        ("bound, ms", [f"{ms:.2f}" for ms in bounds]),
        ("time, ms", [f"{ms:.2f}" for ms in times]),
        ("share", [share(bound / ms) for bound, ms in zip(bounds, times, strict=True)]),
    ):
        assert f"| {title} | {' | '.join(cells)} |" in PAGE
