"""The figures in docs/kernels/measured.md, and of the engine elsewhere, are those of the recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "kernels" / "measured.md").read_text(encoding="utf-8").split())


def rows_of(record: str) -> dict[str, dict[str, Any]]:
    text = (ROOT / "benchmarks" / "results" / f"{record}.json").read_text(encoding="utf-8")
    return {row["name"]: row for row in json.loads(text)["rows"]}


def shown(number: float, digits: int) -> str:
    """So many significant digits, no zero before the point."""
    after = max(0, digits - len(str(int(number)))) if number >= 1 else digits
    return f"{number:.{after}f}".removeprefix("0" if number < 1 else "")


def test_layers_by_expansion_factor() -> None:
    rows = rows_of("gpu_layers")
    ours = [rows[f"layer E={factor} ours"] for factor in (1, 2, 4, 8, 16)]
    for title, key in (
        ("forward, ms", "forward_ms"),
        ("forward and backward, ms", "both_ms"),
        ("the same as a CUDA graph, ms", "graph_ms"),
        ("peak, GiB", "peak_gib"),
    ):
        assert f"| {title} | {' | '.join(shown(row[key], 3) for row in ours)} |" in PAGE
    for title, name in (
        ("fla's kernel in its place: both, ms; peak, GiB", "fla"),
        ("FlashQLA's kernel in its place", "FlashQLA"),
    ):
        one, eight = (rows[f"layer E={factor} {name}"] for factor in (1, 8))
        assert f"| {title} | {shown(one['both_ms'], 3)}; {one['peak_gib']:.2f} |" in PAGE
        assert f"| {shown(eight['both_ms'], 3)}; {eight['peak_gib']:.1f} |" in PAGE


@pytest.mark.parametrize(
    ("title", "name", "target"),
    [
        ("GLA, merged", "gla of the 1.3B model", 1.6),
        ("Mamba-2, N 128 to 512", "mamba2 of the 1.3B model, N 128 and 512", 1.5),
    ],
)
def test_layers_with_a_larger_state(title: str, name: str, target: float) -> None:
    rows = rows_of("gpu_layers")
    plain, larger = (rows[f"layer {name}, {kind}"] for kind in ("plain", "larger state"))
    assert larger["times"] < target
    times = f"{plain['both_ms']:.1f} ms | {larger['both_ms']:.1f} ms | {larger['times']:.2f} | {target} |"
    assert f"| {title} | {times}" in PAGE


@pytest.mark.parametrize(
    ("title", "case", "peers"),
    [
        ("8 x 4096, 8 heads", "gated_delta_rule, decay head, 8x4096 8/8 x (128, 128)", ("fla", "flash_qla")),
        ("1 x 4096, 8 heads", "gated_delta_rule, decay head, 1x4096 8/8 x (128, 128)", ("fla", "flash_qla")),
        ("1 x 32768, 8 heads", "gated_delta_rule, decay head, 1x32768 8/8 x (128, 128)", ("fla", "flash_qla")),
        ("8 x 4096, 64 heads", "gated_delta_rule, decay head, 8x4096 64/64 x (128, 128)", ("fla", "flash_qla")),
        (
            "8 x 4096, 8 heads of 8 subheads",
            "subhead_delta_rule, decay head, 8x4096 64/64 x (128, 128) E=8",
            ("fla", "flash_qla"),
        ),
        (
            "GLA, 8 x 4096, 4 heads of 256 x 512",
            "gated_linear_attention, decay channel, 8x4096 4/4 x (256, 512)",
            ("fla",),
        ),
        (
            "GLA, 1 x 4096, 4 heads of 256 x 512",
            "gated_linear_attention, decay channel, 1x4096 4/4 x (256, 512)",
            ("fla",),
        ),
    ],
)
def test_recurrences_beside_peers(title: str, case: str, peers: tuple[str, ...]) -> None:
    rows = rows_of("gpu_peers")
    cells = []
    for backend in ("ours", *peers):
        times = [rows[f"{case}: {what}, {backend}"]["ms"] for what in ("forward", "forward and backward")]
        cells.append("; ".join(shown(ms, 2 if ms < 1 else 3) for ms in times))
    assert f"| {title} | {' | '.join(cells)} |" in PAGE


def test_errors_of_peers() -> None:
    worst = [row["worst"] for name, row in rows_of("gpu_peers").items() if name.startswith("errors") and "worst" in row]
    assert 0.0040 < max(worst) < 0.0045 and "at most .0045 of any output or gradient" in PAGE


def test_first_calls() -> None:
    rows = rows_of("gpu_first_calls")
    one, eight = (rows[f"first call of layer E={factor} ours"]["seconds"] for factor in (1, 8))
    assert f"took {eight:.0f} s at E = 8 and {one:.0f} s at E = 1 (`gpu_first_calls.json`" in PAGE


def test_decoding() -> None:
    rows = rows_of("gpu_decoding")
    one, many, most = (rows[f"gated_delta_net_400m: decoding, batch {batch}"] for batch in (1, 64, 256))
    assert f"| {one['ms']:.2f} ms | fla, eager" in PAGE
    assert f"| {one['generate_ms_per_token']:.2f} ms |" in PAGE
    per_second = [f"{round(row['tokens_per_second'], -1):,.0f}" for row in (many, most)]
    assert f"| {per_second[0]} and {per_second[1]} tokens/s |" in PAGE
    captured, plain = (rows[f"gated_delta_net_400m: prefill 1 x 4096{kind}"]["ms"] for kind in (", captured", ""))
    assert f"| {captured:.1f} ms; {plain:.1f} ms |" in PAGE
    assert f"copy rate ({rows['copy']['bytes_per_second'] / 1e12:.2f} TB/s)" in PAGE
    for first, second in (
        ("mamba2 64 x 128 x 64", "mamba2 64 x 512 x 64"),
        ("gla merged 4 x 256 x 2048", "gla 4 x 256 x 512"),
        ("gated_delta_net 64 subheads x 128 x 128", "gated_delta_net 8 x 128 x 128, batch 256"),
    ):
        shares = [
            "; ".join(shown(rows[f"step kernel, {name}, {dtype}"][share], 3) for name in (first, second))
            for dtype, share in (("float32", "share"), ("bfloat16", "share"), ("bfloat16", "ahead_share"))
        ]
        assert f"| {' | '.join(shares)} |" in PAGE


def test_a_training_step() -> None:
    rows = rows_of("gpu_training")
    fused, whole = (rows[f"gated_delta_net_400m: step, {kind}"] for kind in ("loss alone", "whole logits"))
    assert (
        f"takes {fused['ms']:.0f} ms and {fused['peak_gib']:.1f} GiB with the fused loss, {whole['ms']:.0f} ms" in PAGE
    )
    assert f"and {whole['peak_gib']:.1f} GiB with whole logits" in PAGE


def test_plain_calls() -> None:
    rows = {name.removeprefix("gated_delta_net_400m: "): row for name, row in rows_of("gpu_calls").items()}
    words = PAGE
    last = {what: rows[f"call {what}, last logits"] for what in ("1 x 4096", "8 x 4096", "1 x 65536", "1 x 1048576")}
    assert (
        f"take {last['1 x 4096']['ms']:.1f} ms ({rows['call 1 x 4096, all logits']['ms']:.1f} with all logits), "
        f"8 x 4,096 {last['8 x 4096']['ms']:.1f}, 1 x 65,536 {last['1 x 65536']['ms']:.0f}. "
        f"One million tokens are read at {last['1 x 1048576']['tokens_per_second'] / 1e3:.0f} thousand a second "
        f"in {last['1 x 1048576']['peak_gib_beyond']:.1f} GiB"
    ) in words
    one, busy = (rows[f"generate, batch 1{kind}"]["ms_per_token"] for kind in ("", ", busy host"))
    assert f"takes {one:.2f} ms at batch 1, {busy:.2f} with two processes" in words
    fast, plain = (rows[f"generate, batch 256, {kind} states"]["tokens_per_second"] for kind in ("bfloat16", "float32"))
    assert f"writes {fast / 1e3:.0f} thousand tokens a second with bfloat16 states, {plain / 1e3:.0f} with" in words


def test_weights_of_one_byte() -> None:
    before = rows_of("gpu_quantised")
    rows = before | rows_of("gpu_wide_steps")
    for title, model, batch in (
        ("Gated DeltaNet 400M, 1", "gated_delta_net_400m", 1),
        ("Gated DeltaNet 400M, 256", "gated_delta_net_400m", 256),
        ("GLA 1.3B, 1", "gla_1.3b", 1),
        ("Gated DeltaNet 1.5B, 1", "gated_delta_net_1.5b", 1),
    ):
        kinds = [rows[f"{model}: {kind} weights, generate, batch {batch}"] for kind in ("bf16", "int8", "fp8")]
        assert f"| {title} | {' | '.join(format(row['ms_per_token'], '.2f') for row in kinds)} |" in PAGE
    e8 = [f"gated_delta_net_400m_e8: {kind} states, generate, batch 256" for kind in ("bfloat16", "float32")]
    fast, plain = (rows[name]["tokens_per_second"] / 1e3 for name in e8)
    words = " ".join(PAGE.split())
    assert f"writes {fast:.1f} thousand tokens a second at batch 256 with bfloat16 states, {plain:.1f} with" in words
    assert "it wrote {:.1f} and {:.1f}, and".format(*(before[name]["tokens_per_second"] / 1e3 for name in e8)) in words
    plain, *bytewise = (
        before[f"gated_delta_net_400m: {kind} weights, generate, batch 256"]["ms_per_token"]
        for kind in ("bf16", "int8", "fp8")
    )
    assert f"took {plain:.2f} ms, with int8 {bytewise[0]:.2f}, with fp8 {bytewise[1]:.2f}" in words


def test_steps_of_small_models() -> None:
    rows = rows_of("gpu_sweep_steps")
    labels = {
        "base_conv": "BaseConv",
        "h3": "H3",
        "hyena": "Hyena",
        "rwkv5": "RWKV-5",
        "mamba": "Mamba",
        "mamba2": "Mamba-2",
    }
    assert {name.split()[0] for name in rows} == set(labels)
    for name, row in rows.items():
        mixer, length, width = name.split()
        size = f"{length[1:]}, {width[1:]}, {row['batch']}"
        assert f"| {labels[mixer]} | {size} | {row['ms']:.1f} | {row['torch_ms']:.1f} |" in PAGE
    apart = {name.split()[0]: row["apart"] for name, row in rows.items()}
    assert apart.pop("rwkv5") < 0.0042 and max(apart.values()) < 0.00006


def test_the_engine() -> None:
    rows = {name.removeprefix("gated_delta_net_400m, "): row for name, row in rows_of("gpu_engine").items()}
    decoding, serving = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("kernels/decoding.md", "serving.md")
    )
    every, words = rows["256 slots"], " ".join(PAGE.split())
    bound = every["where"]["longest_answer_s"]
    for name, title, slots, order, longest in (
        ("64 slots", "64, arrival", 64, "arrival", ""),
        ("64 slots, longest first", "64, longest first", 64, "longest", ""),
        ("256 slots", "256, all at once", 256, "all at once", f"{shown(bound, 2)} "),
    ):
        row = rows[name]
        seconds = [row["engine_s"], row["uniform_s"], row["ratio"], row["where"]["steps_s"]]
        cells = [shown(second, 2 if second < 1 else 3) for second in seconds]
        assert f"| {title} | {' | '.join(cells)} | {longest}|" in PAGE
        assert f"| {slots} | {order} | {round(row['tokens_per_s'], -1):,.0f} | {cells[2]} |" in serving
        assert f"256 requests with {row['new_tokens']:,} new tokens in all" in words and row["requests"] == 256
    assert f"Its own steps take {bound / every['uniform_s']:.2f} of the uniform batch" in " ".join(serving.split())
    left = rows["memory"]
    told = f"10,000 requests took {left['seconds']:.1f} s and left {left['gpu_bytes']} bytes on the GPU"
    assert f"{told}; the process grew by {left['process_bytes'] / 2**20:.0f} MiB" in words
    assert left["requests"] == 10_000 and f"now {rows['64 slots']['where']['steps']['64'][1]:.2f} and" in words
    steps = every["where"]["steps"]
    found = [f"{steps[str(count)][1]:.3f}".removeprefix("0") for count in (4, 8, 16, 32, 64, 128, 256)]
    assert f"| now | {' | '.join(found)} |" in decoding
    counts = {count: times for count, (times, _) in rows["64 slots, longest first"]["where"]["steps"].items()}
    assert f"Longest first, {counts['64']:,} of {sum(counts.values()):,} steps have 64 rows" in words
    narrow = [f"{rows['narrow steps'][f'{n}_rows_{how}_ms']:.3f}" for how in ("tiles", "fused") for n in (2, 4, 8)]
    *tiles, two, four, eight = (ms.removeprefix("0") for ms in narrow)
    told = f"take {tiles[0]}, {tiles[1]} and {tiles[2]} ms by tiles, and {two}, {four} and {eight} with norms"
    assert told in " ".join(decoding.split())
