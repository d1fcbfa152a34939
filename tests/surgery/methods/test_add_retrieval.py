"""add_retrieval: any mixer, any checkpoint, before and after other surgery, and the whole way through the CLI."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery import expand
from longrecall.surgery.expansion import Operation
from tests.conftest import MIXERS
from tests.surgery.conftest import SMALL, operate_on

Build = Callable[..., RecurrentLM]
VECTORS = Path(__file__).parents[2] / "models" / "vectors"
OPTIONS = SMALL["add_retrieval"]
FLAGS = ["--chunk", "5", "--top-k", "2", "--encoder-dim", "12", "--heads", "4", "--set", "head_dim=6"]
PREFIX = "model.layers.0.mixer."


def model_of(*mixers: dict[str, Any], seed: int = 0) -> RecurrentLM:
    torch.manual_seed(seed)
    layers = [{"mixer": mixer, "mlp_size": 24} for mixer in mixers]
    config = RecurrentConfig(vocab_size=64, hidden_size=32, layers=layers, context_length=32, initializer_range=0.2)
    return RecurrentLM(config).eval()


def logits(model: RecurrentLM, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("kind", [name for name in MIXERS if name not in ("retrieval", "handover")])
def test_every_mixer_keeps_its_function_bit_for_bit(kind: str) -> None:
    model = model_of(MIXERS[kind], MIXERS["gla"])
    ids = torch.randint(0, 64, (2, 23), generator=torch.Generator().manual_seed(3))
    grown = operate_on(model, "add_retrieval", (0, 1), "preserve")
    assert torch.equal(logits(model, ids), logits(grown, ids))
    assert grown.state_size() == model.state_size()
    # The layer is awake: with another alpha the same tensors give another function.
    with torch.no_grad():
        grown.get_parameter(f"{PREFIX}blend.bias").fill_(0.5)
    assert not torch.equal(logits(model, ids), logits(grown, ids))


@pytest.mark.parametrize("blend", ["input", "learned"])
@pytest.mark.parametrize("selector", ["weighted", "hard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_preserve_is_exact_and_what_it_touched_learns(
    build: Build, tokens: Tensor, blend: str, selector: str, dtype: torch.dtype
) -> None:
    model = build("mamba2", "gla").to(dtype)
    options = {"blend": blend, "selector": selector}
    grown = operate_on(model, "add_retrieval", (0,), "preserve", **options)
    assert torch.equal(logits(model, tokens), logits(grown, tokens))
    plan = Operation.check("add_retrieval", "preserve", options, 0).plan(0, model.config.layers[0]["mixer"])
    names = {f"model.layers.0.{name}" for name in plan.touched}
    trained = {name for name, parameter in grown.named_parameters() if parameter.requires_grad}
    assert names == {name for name in trained if name.startswith(PREFIX) and ".base." not in name}
    before = {name: grown.get_parameter(name).detach().clone() for name in names}
    optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        grown(tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert [name for name in names if torch.equal(before[name], grown.get_parameter(name))] == []


def test_numbers_are_where_the_method_says(build: Build) -> None:
    model = build("gla")
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for init, alpha, blend in (("preserve", 1.0, "input"), ("perturb", 0.9, "input"), ("reinit", 0.5, "fixed")):
        grown = operate_on(model, "add_retrieval", (0,), init)
        mixer = grown.config.layers[0]["mixer"]
        assert (mixer["type"], mixer["alpha"], mixer["blend"]) == ("retrieval", alpha, blend)
        new = grown.state_dict()
        kept = {name.replace(".mixer.", ".mixer.base."): tensor for name, tensor in old.items()}
        assert all(torch.equal(new[name], tensor) for name, tensor in kept.items())
        assert torch.equal(new[f"{PREFIX}chunk_encoder.weight"], new[f"{PREFIX}query_encoder.weight"])
        rows = new[f"{PREFIX}chunk_encoder.weight"]
        # An isometry: 12 orthonormal rows of 16 numbers in float32.
        torch.testing.assert_close(rows @ rows.T, torch.eye(12), atol=1e-5, rtol=0)
        if blend == "input":
            assert set(new[f"{PREFIX}blend.bias"].tolist()) == {torch.tensor(alpha).item()}
            assert not new[f"{PREFIX}blend.weight"].any()
        # Uniform within fan_in**-0.5, as new layers are: 16 inputs.
        assert 0.9 * 0.25 < float(new[f"{PREFIX}q_proj.weight"].abs().max()) <= 0.25
    wide = operate_on(model, "add_retrieval", (0,), "preserve", noise_scale=2.0).state_dict()
    assert torch.equal(wide[f"{PREFIX}q_proj.weight"], 2 * new[f"{PREFIX}q_proj.weight"])


@pytest.mark.parametrize("case", sorted(path.name for path in VECTORS.iterdir()))
def test_foreign_checkpoints_keep_their_function(case: str, tmp_path: Path) -> None:
    ids = load_file(VECTORS / case / "expected.safetensors")["input_ids"]
    chunk = max(1, ids.shape[1] // 4)
    summary = expand(VECTORS / case, tmp_path / "out", "add_retrieval", layers="all", **OPTIONS | {"chunk": chunk})
    grown, base = load(tmp_path / "out"), load(VECTORS / case)
    assert torch.equal(logits(grown, ids), logits(base, ids))
    assert summary.state_after == summary.state_before and summary.parameters_after > summary.parameters_before
    assert set(summary.touched) <= set(dict(grown.named_parameters()))


@pytest.mark.parametrize(
    ("method", "kind", "limit"),
    # As in the contract: merging sums over heads with exact zeros, growing over more channels.
    [("merge_heads", "gla", 1e-4), ("grow_state", "mamba2", 1e-5), ("subheads", "gated_delta_net", 1e-5)],
)
def test_other_surgery_before_and_after(
    build: Build, tokens: Tensor, method: str, kind: str, limit: float, tmp_path: Path
) -> None:
    model = build("attention", kind)
    save(model, tmp_path / "base")
    expand(tmp_path / "base", tmp_path / "large", method, layers=[1])
    expand(tmp_path / "large", tmp_path / "after", "add_retrieval", layers=[1], **OPTIONS)
    expand(tmp_path / "base", tmp_path / "with", "add_retrieval", layers=[1], **OPTIONS)
    summary = expand(tmp_path / "with", tmp_path / "inside", method, layers=[1])
    large, after, inside = (load(tmp_path / name) for name in ("large", "after", "inside"))
    assert torch.equal(logits(large, tokens), logits(after, tokens))
    allowed = limit * (float(logits(model, tokens).abs().max()) if method == "merge_heads" else 1.0)
    assert float((logits(model, tokens) - logits(inside, tokens)).abs().max()) <= allowed
    assert inside.state_size() == large.state_size() == summary.state_after > model.state_size()
    assert summary.touched and all(name.startswith("model.layers.1.mixer.base.") for name in summary.touched)
    assert set(summary.touched) <= set(dict(inside.named_parameters()))
    retrieval = [name for name in load(tmp_path / "with").state_dict() if ".1.mixer." in name and "base" not in name]
    old, new = load(tmp_path / "with").state_dict(), inside.state_dict()
    assert len(retrieval) == 9 and all(torch.equal(old[name], new[name]) for name in retrieval)
    assert [record["method"] for record in open_checkpoint(tmp_path / "inside").surgery] == ["add_retrieval", method]


def test_a_mixer_inside_a_retrieval_layer_does_not_hand_over(build: Build) -> None:
    once = operate_on(build("gla", "mamba2"), "add_retrieval", (0, 1), "preserve")
    for method, layer in (("merge_heads", 0), ("subheads", 0), ("grow_state", 1)):
        with pytest.raises(UserError, match=f"layer {layer} is a retrieval layer.*before add_retrieval"):
            operate_on(once, method, (layer,), "handover")
    with pytest.raises(UserError, match="layer 1 is mamba2, but merge_heads fits"):
        operate_on(once, "merge_heads", (1,), "preserve")


def test_retrieval_comes_once() -> None:
    once = operate_on(model_of(MIXERS["gla"]), "add_retrieval", (0,), "preserve")
    with pytest.raises(UserError, match=r"add_retrieval, layer 0 \(retrieval\): it already has a retrieval layer"):
        operate_on(once, "add_retrieval", (0,), "preserve")
    hymba = MIXERS["hymba"] | {"ssm": MIXERS["retrieval"]}
    with pytest.raises(UserError, match=r"layer 0 \(hymba\).*already has a retrieval layer"):
        operate_on(model_of(hymba), "add_retrieval", (0,), "preserve")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--chunk", "64"], "a chunk of 64 tokens never ends within the model's context of 64"),
        (["--chunk", "0"], "option chunk: 0 is too small"),
        (["--top-k", "-1"], "option top_k: -1 is too small"),
        (["--selector", "soft"], 'option selector: "soft" is none of weighted, hard'),
        (["--heads", "6", "--set", "kv_heads=4"], r"kv_heads \(4\) must divide num_heads \(6\)"),
        (["--set", "blend=fixed"], "with blend=fixed the layer cannot both start unchanged and learn"),
        (["--set", "alpha=0.5"], 'option alpha of add_retrieval does nothing with init "preserve"'),
        (["--init", "reinit", "--set", "alpha=1.0"], "option alpha: 1.0 is too large"),
        (["--init", "handover"], "does not fit add_retrieval: the learned blend already moves"),
        (["--init", "inherit"], "does not fit add_retrieval: the old layer has no retrieval"),
        (["--factor", "4"], 'add_retrieval has no option "factor"'),
        (["--chunk", "8", "--set", "chunk=9"], "option chunk is given twice"),
    ],
)
def test_bad_command_lines_end_in_one_line(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], cause: str
) -> None:
    save(build("gla"), tmp_path / "base")
    command = ["expand", str(tmp_path / "base"), str(tmp_path / "out"), "--method", "add_retrieval", "--chunk", "5"]
    command = command[:-2] if "--chunk" in words else command
    assert main([*command, *words]) == 2
    error = capsys.readouterr().err
    assert re.search(cause, error) and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_context_that_nobody_recorded_takes_any_chunk(build: Build, tmp_path: Path) -> None:
    model = build("gla")
    model.config.context_length = None
    save(model, tmp_path / "base")
    summary = expand(tmp_path / "base", tmp_path / "out", "add_retrieval", layers="all", chunk=512)
    # The ids of 4096 tokens in 4 bytes, and 8 chunk vectors of 64 numbers in 2.
    assert (summary.context, summary.retrieval_bytes) == (4096, 4 * 4096 + 8 * 64 * 2)


@pytest.mark.parametrize("kind", ["gla", "mamba2"])
def test_from_expand_to_report(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, wide, out = str(tmp_path / "base"), str(tmp_path / "wide"), tmp_path / "run"
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[kind], "mlp_size": 24}] * 2
    config = RecurrentConfig(vocab_size=258, hidden_size=32, layers=layers, context_length=48, initializer_range=0.2)
    save(RecurrentLM(config), base, tokenizer=byte_tokenizer())
    command = ["expand", base, wide, "--method", "add_retrieval", "--layers", "1", *FLAGS]
    assert main([*command, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    # 48 ids of 4 bytes and 9 chunk vectors of 12 numbers of 2.
    assert f"{kind} -> retrieval" in dry and "state unchanged, parameters +" in dry
    assert "retrieval keeps 0.4 KiB at 48 tokens" in dry and not Path(wide).exists()
    assert main(command) == 0 and main(["info", wide]) == 0
    text = capsys.readouterr().out
    assert "weighted chunk=5 top_k=2 encoder_dim=12 num_heads=4" in text
    (record,) = open_checkpoint(wide).surgery
    counts = record["parameters"]
    line = f"add_retrieval (preserve) in layers 1: parameters {counts['before']:,} -> {counts['after']:,}"
    assert line in text and record["state_size"]["before"] == record["state_size"]["after"]
    said, results = [], []
    for name in (base, wide):
        assert main(["generate", name, "--prompt", "the river and the hill", "--max-new-tokens", "12"]) == 0
        said.append(capsys.readouterr().out)
        results.append(f"{name}.json")
        assert main(["eval", name, "--tasks", "phonebook", "--pairs", "2", "--samples", "4", "--out", results[-1]]) == 0
        capsys.readouterr()
    assert said[0] == said[1] and said[0].strip()
    values = [json.loads(Path(file).read_text())["results"][0] for file in results]
    assert values[0]["value"] == values[1]["value"]
    (tmp_path / "books.txt").write_text("the quick brown fox jumps over the lazy dog again and again\n" * 60)
    recipe = ["train", str(Path(__file__).parents[3] / "recipes" / "retrieval.yaml")]
    for override in (f"model.checkpoint={wide}", f"data.sources.0.path={tmp_path / 'books.txt'}", "run.batch_size=2"):
        recipe += ["--set", override]
    for override in ("data.context_length=48", "data.sources.1.pairs=[2, 3]", "run.tokens=null", f"run.output={out}"):
        recipe += ["--set", override]
    recipe += ["--set", "run.save_every=2", "--set", "run.log_every=1", "--set", "run.report_to=none"]
    assert main([*recipe, "--set", "run.steps=3"]) == 0
    rates = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(rates) == 3
    assert all(row["touched_learning_rate"] == pytest.approx(20 * row["learning_rate"]) for row in rates)
    trained, start = load(out / "final").state_dict(), load(wide).state_dict()
    assert [name for name in record["touched"] if torch.equal(trained[name], start[name])] == []
    check_resuming(recipe, out, tmp_path)
    final = ["eval", str(out / "final"), "--tasks", "phonebook", "--pairs", "2", "--samples", "4"]
    assert main([*final, "--out", f"{out}.json"]) == 0
    page = tmp_path / "page.html"
    assert main(["report", *results, f"{out}.json", "-o", str(page)]) == 0
    html = page.read_text()
    assert "add_retrieval" in html and "chunk 5, top_k 2" in html and "(unchanged)" in html
    assert f"{counts['before']:,} → {counts['after']:,}" in html


def check_resuming(recipe: list[str], out: Path, folder: Path) -> None:
    """A run that is taken up again at its second step ends where the unbroken one did."""
    whole = load(out / "final").state_dict()
    again = [word.replace(str(out), str(folder / "again")) for word in recipe]
    shutil.copytree(out, folder / "again", ignore=shutil.ignore_patterns("final", "*3"))
    assert main([*again, "--resume", "--set", "run.steps=3"]) == 0
    resumed = load(folder / "again" / "final").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
