"""export: stock checkpoints that transformers' own classes load strictly, padding that adds nothing, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaForCausalLM

import longrecall
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.export import export_checkpoint
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.formats.weights import open_weights
from longrecall.models.loading import load
from tests.models.checkpoints import GLA, model_of
from tests.models.round_trip import changed
from tests.models.test_formats_fla import CASES, VECTORS
from tests.models.test_formats_mamba2 import PADDED, TOLERANCE, mamba_ssm_folder, reference, tokens


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    stored = open_weights(folder, allow_torch=True)
    return dict(zip(stored.names(), stored.read(stored.names()), strict=True))


def assert_same_files(theirs: Path, out: Path) -> None:
    """Every tensor bit for bit, and the config equal but for defaults."""
    read, written = (json.loads((folder / "config.json").read_text()) for folder in (theirs, out))
    assert changed(read, written) == []
    old, new = weights_of(theirs), weights_of(out)
    assert old.keys() == new.keys()
    assert all(old[name].dtype == new[name].dtype and torch.equal(old[name], new[name]) for name in old)


def strict(kind: type, folder: Path) -> Any:
    """The stock model; nothing may be missing, left over, or of another shape."""
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype="auto")  # type: ignore[attr-defined]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_same_logits(stock: Any, folder: Path) -> None:
    with torch.no_grad():
        torch.testing.assert_close(stock(tokens(), use_cache=False).logits, load(folder)(tokens()).logits, **TOLERANCE)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A Mamba-2 of transformers, two groups and four layers, with a file beside it."""
    reference(2, num_hidden_layers=4).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    return tmp_path / "theirs"


@pytest.mark.parametrize("case", CASES)
def test_fla_checkpoints_come_back_as_they_were(case: str, tmp_path: Path) -> None:
    export_checkpoint(VECTORS / case, tmp_path / "out")
    assert_same_files(VECTORS / case, tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False])
def test_mamba_ssm_gets_the_file_that_it_loads(tied: bool, tmp_path: Path) -> None:
    folder = mamba_ssm_folder(reference(2, tied, vocabulary=PADDED), tmp_path / "theirs", torch_file=True)
    export_checkpoint(folder, tmp_path / "out")
    assert_same_files(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.suffix in (".bin", ".raw")] == [
        "pytorch_model.bin"
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_from_transformers_to_mamba_ssm_and_back(tied: bool, tmp_path: Path) -> None:
    reference(2, tied).save_pretrained(tmp_path / "theirs")
    export_checkpoint(tmp_path / "theirs", tmp_path / "ssm", "mamba_ssm")
    # Its loader is strict and knows no other names, nor a head that is only tied.
    assert {"backbone.embedding.weight", "lm_head.weight"} <= weights_of(tmp_path / "ssm").keys()
    assert "model_type" not in json.loads((tmp_path / "ssm" / "config.json").read_text())
    export_checkpoint(tmp_path / "ssm", tmp_path / "back", "mamba2")
    old, new = weights_of(tmp_path / "theirs"), weights_of(tmp_path / "back")
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    assert_same_logits(strict(Mamba2ForCausalLM, tmp_path / "back"), tmp_path / "theirs")


def test_a_state_that_grew_in_every_layer_is_a_stock_checkpoint(theirs: Path, tmp_path: Path) -> None:
    longrecall.expand(theirs, tmp_path / "big", method="grow_state", layers="all", state_dim=24)
    summary = export_checkpoint(tmp_path / "big", tmp_path / "out")
    assert (summary.format, summary.padded, summary.parameters_after) == (
        "transformers_mamba2", (), summary.parameters_before
    )  # fmt: skip
    stock = strict(Mamba2ForCausalLM, tmp_path / "out")
    assert stock.config.state_size == 24
    assert_same_logits(stock, tmp_path / "big")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**json.loads((theirs / "config.json").read_text()), "state_size": 24}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert "grow_state" in (tmp_path / "out" / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))


def test_mamba_loads_strictly(tmp_path: Path) -> None:
    model = model_of({"type": "mamba", "inner_dim": 16, "state_dim": 4, "dt_rank": 3}, tied=True)
    save(model, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out", "mamba")
    stock = strict(MambaForCausalLM, tmp_path / "out")
    x = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(stock(x, use_cache=False).logits, model(x).logits, **TOLERANCE)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.2, 0.6)])
def test_padded_layers_add_nothing(limit: tuple[float, float], tmp_path: Path) -> None:
    reference(2, num_hidden_layers=4, use_bias=True, time_step_limit=limit).save_pretrained(tmp_path / "theirs")
    longrecall.expand(tmp_path / "theirs", tmp_path / "big", method="grow_state", layers=[1, 3], state_dim=24)
    planned = export_checkpoint(tmp_path / "big", tmp_path / "out", pad_states=True, dry_run=True)
    assert not (tmp_path / "out").exists()
    done = export_checkpoint(tmp_path / "big", tmp_path / "out", pad_states=True)
    assert done.to_dict() == planned.to_dict() | {"written": True}
    assert done.padded == ((0, 6, 24), (2, 6, 24))
    stock = strict(Mamba2ForCausalLM, tmp_path / "out")
    # The limit as the class wants it, infinity included.
    assert tuple(stock.config.time_step_limit) == limit
    assert_same_logits(stock, tmp_path / "big")
    # Per layer: B and C have 2 groups of 18 channels more, each with a row and a bias of in_proj and 4 taps and a bias.
    assert done.parameters_after - done.parameters_before == 2 * (2 * 2 * 18) * (32 + 1 + 4 + 1)
    assert done.parameters_after == sum(tensor.numel() for tensor in weights_of(tmp_path / "out").values())
    assert done.weight_bytes_after == sum(tensor.nbytes for tensor in weights_of(tmp_path / "out").values())
    # 4 layers of 8 heads, 24 channels and 8 values in float32.
    assert done.state_bytes_after == 4 * 8 * 24 * 8 * 4
    # The padded rows are zeros, group by group: 64 of z, 64 of x, then B.
    rows = weights_of(tmp_path / "out")["backbone.layers.0.mixer.in_proj.weight"][128:]
    assert not rows[6:24].any() and not rows[30:48].any() and rows[24:30].all(dim=1).any()


def test_dry_run_says_what_padding_costs(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longrecall.expand(theirs, tmp_path / "big", method="grow_state", layers=[1], state_dim=24)
    words = ["export", str(tmp_path / "big"), str(tmp_path / "out"), "--pad-states", "--dry-run"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "state_dim 6 -> 24 in layers 0,2-3" in out and "nothing was written" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("parameters")] == ["+7,992"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] is False
    assert not (tmp_path / "out").exists()


def test_unequal_layers_are_refused_with_the_way_out(theirs: Path, tmp_path: Path) -> None:
    longrecall.expand(theirs, tmp_path / "big", method="grow_state", layers=[1], state_dim=24)
    with pytest.raises(UserError, match=r"layer 1\.mixer\.state_dim is 24 here, and would be 6.* --pad-states gives"):
        export_checkpoint(tmp_path / "big", tmp_path / "out")
    longrecall.expand(tmp_path / "big", tmp_path / "looks", method="add_retrieval", layers=[0], chunk=4)
    with pytest.raises(UserError, match=r"layer 0\.mixer.*--to auto_map writes any model") as caught:
        export_checkpoint(tmp_path / "looks", tmp_path / "out", pad_states=True)
    assert "--pad-states gives" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "mamba3"], 'there is no checkpoint format "mamba3". Did you mean'),
        (["--to", "native"], 'export cannot write the format "native"; --to auto_map'),
        (["--to", "gla"], 'no layer of this model has a "gla" (there are: mamba2)'),
        (["--to", "auto_map", "--pad-states"], "keeps every layer as it is"),
        (["--to", "mamba2"], "is not empty; choose another folder or use --force"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["export", str(theirs), str(tmp_path / "out"), *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_force_replaces_and_the_source_is_never_the_output(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    export_checkpoint(theirs, tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "notes.txt").exists()
    for place in (theirs, theirs / "out", tmp_path):
        with pytest.raises(UserError, match=r"output folder"):
            export_checkpoint(theirs, place, force=True)


def test_a_native_model_names_the_formats_that_it_fits(tmp_path: Path) -> None:
    save(model_of(GLA), tmp_path / "ours")
    with pytest.raises(UserError, match=r"give --to FORMAT\. It fits fla_gla$"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out")
    summary = export_checkpoint(tmp_path / "ours", tmp_path / "out", "fla_gla")
    assert "residual stream" in summary.notes[0]
    # Its first config is made from nothing; read back it is the same model.
    assert open_checkpoint(tmp_path / "out").plain.layers == open_checkpoint(tmp_path / "ours").plain.layers


def test_shared_heads_that_came_apart(tmp_path: Path) -> None:
    case = VECTORS / "gla_conv_shared"
    model = load(case)
    longrecall.expand(case, tmp_path / "native", method="add_retrieval", layers=[0], chunk=4)
    origin = open_checkpoint(tmp_path / "native").origin
    assert origin is not None
    save(model, tmp_path / "trained")
    (tmp_path / "native" / "origin").rename(tmp_path / "trained" / "origin")
    tensors = load_file(tmp_path / "trained" / "model.safetensors")
    tensors["model.layers.0.mixer.k_proj.weight"][0] += 1
    save_file(tensors, tmp_path / "trained" / "model.safetensors")
    with pytest.raises(
        UserError, match=r'"model\.layers\.0\.mixer\.k_proj\.weight": heads 0 and 1 differ.*--new-config'
    ):
        export_checkpoint(tmp_path / "trained", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_checkpoint(tmp_path / "trained", tmp_path / "out", "gla", new_config=True)
    x = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(x).logits, load(tmp_path / "trained")(x).logits)


def test_the_storage_type_is_said(tmp_path: Path) -> None:
    reference(dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    # As older versions of transformers say it; the weights are float32.
    config = {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": "bfloat16"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    export_checkpoint(tmp_path / "theirs", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == "float32" and "dtype" not in written


def test_only_a_part_of_the_model_is_in_memory(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrecall.models.checkpoint.DEFAULT_SHARD_BYTES", 20_000)
    export_checkpoint(theirs, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same_files(theirs, tmp_path / "out")


def test_sizes_that_the_stock_config_does_not_take(tmp_path: Path) -> None:
    save(model_of({"type": "mamba2", "inner_dim": 12, "head_dim": 4, "state_dim": 3}), tmp_path / "ours")
    with pytest.raises(UserError, match=r"inner_dim is 12; Mamba2Config wants a multiple of 8"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out", "mamba2")
    # The class itself refuses it too.
    with pytest.raises(Exception, match=r"expand|hidden_size"):
        Mamba2Config(hidden_size=8, expand=1.5, num_heads=3, head_dim=4)
