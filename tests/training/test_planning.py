"""What a run would take: counted from the config, held against a measured peak and against counts by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.accounting import account
from longrecall.models.description import read_sizes
from longrecall.training.planning import Hardware, RunPlan, plan_run
from longrecall.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
CONFIG = "recipes/configs/gated_delta_net_400m.json"
BIG: dict[str, Any] = {
    "model": {"checkpoint": CONFIG},
    "data": {"context_length": "4k", "sources": [{"kind": "text", "path": "nowhere.txt"}]},
    "run": {"output": "out", "steps": 10, "batch_size": 8, "precision": "bf16"},
}


def plan(*overrides: str, gpus: int = 1) -> RunPlan:
    return plan_run(Recipe.from_dict(BIG, overrides), Hardware(gpus))


def test_the_bytes_are_those_that_were_measured() -> None:
    """bfloat16 weights, 8 x 4,096 tokens, forward and backward without an optimizer, on an H200."""
    rows = json.loads((ROOT / "benchmarks/results/gpu_training.json").read_text())["rows"]
    measured = {row["name"]: row.get("peak_gib") for row in rows}
    found = plan("model.dtype=bfloat16")
    counted = sum(found.bytes_per_gpu.values()) - found.bytes_per_gpu["optimizer (two moments)"]
    # An estimate: which of a layer's tensors are kept, and what the allocator rounds up.
    assert counted / 2**30 == pytest.approx(measured["gated_delta_net_400m: step, loss alone"], rel=0.05)
    counted += found.whole_logits_bytes
    assert counted / 2**30 == pytest.approx(measured["gated_delta_net_400m: step, whole logits"], rel=0.1)


def test_weights_are_counted_exactly_and_shared() -> None:
    total = account(read_sizes(ROOT / CONFIG)).parameters
    alone, copies, sharded = plan(), plan(gpus=8), plan("parallel.shard=4", gpus=8)
    assert alone.parameters == alone.trained_parameters == total
    kept = ("master weights", "gradients", "optimizer (two moments)")
    assert [alone.bytes_per_gpu[kind] for kind in kept] == [4 * total, 4 * total, 8 * total]
    assert [sharded.bytes_per_gpu[kind] for kind in kept] == [total, total, 2 * total]
    assert copies.bytes_per_gpu["gradient buckets"] == 4 * total and "gradient buckets" not in sharded.bytes_per_gpu
    assert (sharded.replicate, sharded.shard, sharded.context) == (2, 4, 1)
    # A context group reads one row together: an eighth of the tokens a GPU, and of a step.
    long = plan("parallel.context=8", gpus=8)
    assert (copies.tokens_per_step, long.tokens_per_step) == (8 * 8 * 4096, 8 * 4096)
    assert long.bytes_per_gpu["activations"] * 8 == alone.bytes_per_gpu["activations"]
    small = plan("run.gradient_checkpointing=true")
    assert small.bytes_per_gpu["activations"] < alone.bytes_per_gpu["activations"] / 5
    assert sum(small.flops_per_token.values()) > 1.2 * sum(alone.flops_per_token.values())


def test_flops_are_six_for_every_weight_and_the_state() -> None:
    found = plan()
    config = read_sizes(ROOT / CONFIG)
    matrices = sum(
        a * b for name, (a, b) in ((n, s) for n, s in config.tensor_shapes().items() if len(s) == 2) if "layers" in name
    )
    assert found.flops_per_token == {
        "matrices of the layers": 6 * matrices,
        "recurrences": 3 * 6 * config.state_size(),  # the delta rule reads the state, writes it, and reads it
        "head": 6 * 32000 * 1024,
    }
    assert found.hours == round(sum(found.flops_per_token.values()) * 10 * 8 * 4096 / (989e12 * 0.4) / 3600, 3)
    attention = plan("model.checkpoint=recipes/configs/transformer_400m.json")
    # Keys and values of 2,048 tokens on average, 26 layers of 1,024 channels; forward and twice backward.
    assert attention.flops_per_token["attention"] == 3 * 26 * 4 * 1024 * 2048


def test_what_is_frozen_costs_no_moments_and_less_work() -> None:
    found, frozen = plan(), plan("optimizer.train=[layers.23.*]")
    assert frozen.trained_parameters < found.parameters / 25
    assert frozen.bytes_per_gpu["gradients"] == 4 * frozen.trained_parameters
    # A forward pass through everything, and backward through the last layer and the head.
    assert 1 / 3 < sum(frozen.flops_per_token.values()) / sum(found.flops_per_token.values()) < 0.42
    state = plan("initial_state.kind=learned")
    assert state.trained_parameters == 0 and state.bytes_per_gpu["gradients"] == 0
    assert 0.6 < sum(state.flops_per_token.values()) / sum(found.flops_per_token.values()) < 0.7


def test_a_leash_costs_a_teacher_that_reads() -> None:
    leash = f"leash={{teacher: {CONFIG}}}"
    plain, held, half = plan(), plan(leash), plan(leash, "leash.length=2k", "leash.dtype=bfloat16")
    assert (
        held.bytes_per_gpu["teacher's weights"] == 4 * plain.parameters == 2 * half.bytes_per_gpu["teacher's weights"]
    )
    sharded = plan(leash, "parallel.shard=8", gpus=8)
    assert sharded.bytes_per_gpu["teacher's weights"] < 2 * plain.parameters  # an eighth, the head and one layer
    assert {kind: held.bytes_per_gpu[kind] for kind in plain.bytes_per_gpu} == plain.bytes_per_gpu
    # A third of the passes through the layers, and both heads: forward twice, twice backward.
    head = 2 * 32000 * 1024
    third = sum(count for part, count in plain.flops_per_token.items() if part != "head") // 3
    assert held.flops_per_token["leash"] == third + 4 * head
    assert half.flops_per_token["leash"] == third + 2 * head
    # The teacher reads the rows that are held alone.
    sources = "data.sources=[{kind: text, path: x}, {kind: passkey, weight: 3}]"
    assert plan(leash, sources).flops_per_token["leash"] * 4 == held.flops_per_token["leash"]
    assert held.flops_per_step - plain.flops_per_step == held.flops_per_token["leash"] * held.tokens_per_step


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/papers").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_papers_fit_on_eight_gpus(path: Path) -> None:
    """Those that name the description of their model: half a million tokens a step, and the memory of an H200."""
    config = re.search(r"model.checkpoint=(recipes/configs/\S+)", path.read_text())
    if config is None:
        return
    found = plan_run(Recipe.load(path, [f"model.checkpoint={config[1]}"]), Hardware(8))
    assert found.tokens_per_step == 1 << 19 and sum(found.bytes_per_gpu.values()) < 139 * 2**30
    # The counts of the papers and of the published checkpoints.
    sizes = {"statex_gla_1.3b": 1365514304, "statex_mamba2_1.3b": 1350064128, "statex_mamba2_1.3b_lpt": 1343757312}
    assert found.parameters == sizes.get(path.stem, found.parameters)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps(BIG))
    command = ["train", str(tmp_path / "r.yaml"), "--plan", "--gpus", "8", "--set", "parallel.shard=8"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for part in (
        "399,724,928",
        "replicate 1 x shard 8 x context 1",
        "262,144",
        "gathered weights",
        "% of 8 x 989 TFLOP/s",
    ):
        assert part in shown
    assert main([*command, "--json", "--peak-tflops", "100", "--utilisation", "0.5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total_bytes_per_gpu"] == sum(told["bytes_per_gpu"].values()) and told["peak_tflops"] == 100
    assert (
        main([*command, "--peak-tflops", "1e9"]) == 0
        and "time               a minute at most" in capsys.readouterr().out
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "--gpus", "0"], "--gpus must be at least 1"),
        (["--plan", "--gpus", "3", "--set", "parallel.shard=2"], "does not divide the 3 processes"),
        (["--plan", "--utilisation", "2"], "--utilisation is a share"),
        (["--plan", "--peak-tflops", "-1"], "--peak-tflops must be above 0"),
        (["--plan", "--resume"], "leave out --resume"),
        (["--gpus", "2"], "--gpus belongs to --plan"),
        (["--plan", "--set", "optimizer.train=[x]"], "matches no parameter"),
        (["--plan", "--set", "model.checkpoint=nowhere"], "nowhere does not exist"),
        (["--plan", "--set", "model.checkpoint=nowhere"], "--set model.checkpoint=FILE.json"),
    ],
)
def test_bad_plans(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps(BIG))
    assert main(["train", str(tmp_path / "r.yaml"), *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_an_impossible_number_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        Hardware(gpus=-1)
