"""Damaged and foreign folders: every one ends in a single clear error that names the file or the tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.formats import FORMATS, detect, native, registry
from longrecall.models.formats.format import Format
from longrecall.models.formats.hub import locate
from longrecall.models.formats.unread import missing_part
from longrecall.models.formats.weights import listed
from longrecall.models.recurrent_lm import RecurrentLM

VECTORS = Path(__file__).parent / "vectors"
MIXER = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good native checkpoint to damage."""
    config = RecurrentConfig(
        vocab_size=17, hidden_size=8, layers=[{"mixer": MIXER, "mlp_size": 8}], tie_word_embeddings=False
    )
    torch.manual_seed(0)
    save(RecurrentLM(config), tmp_path / "good")
    return tmp_path / "good"


def edit_config(folder: Path, **change: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))


def edit_tensors(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def shard(folder: Path, **change: str) -> dict[str, str]:
    """Split the weights into two shards with an index; `change` overwrites entries of the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part} | change
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe{}", b"null", b"[" * 100_000])
def test_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json"):
        open_checkpoint(folder)


def test_unknown_model_type(folder: Path) -> None:
    edit_config(folder, model_type="gated_deltanets")
    with pytest.raises(UserError, match=r'gated_deltanets.*Did you mean "gated_deltanet"'):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("llama", ": every layer is softmax attention, so it has no recurrent state to enlarge"),
        ("lfm2", ": gated short convolution blocks are missing; they remember the last few tokens only"),
        ("somebodys_model", ""),
        (["gla"], ""),
        (3, ""),
    ],
)
def test_other_kinds_of_model_are_told_what_is_missing(folder: Path, kind: object, missing: str) -> None:
    edit_config(folder, model_type=kind)
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder)
    assert (
        f'config.json: model_type "{kind}" is not a kind of model that longrecall reads{missing}. longrecall reads'
        in str(caught.value)
    )
    assert "Did you mean" not in str(caught.value)
    for entry in FORMATS.values():
        assert all(known in str(caught.value) for known in entry.model_types or [entry.name])


def test_what_is_read_is_not_said_to_be_missing() -> None:
    kinds = [kind for entry in FORMATS.values() for kind in (*entry.model_types, *entry.nested_types)]
    assert [kind for kind in kinds if missing_part(kind) is not None] == []


def test_no_model_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="model_type"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": "all"}, "layers"),
        ({"layers": [3]}, "layers"),
        ({"layers": [{"mixer": {"type": "gla"}}]}, "layer 0"),
        ({"layers": [{"mixer": {**MIXER, "num_head": 3}}]}, 'num_head".*Did you mean'),
        ({"layers": [{"mixer": {"type": "glb"}}]}, "glb"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 10**12}, '"hidden_size" is 1000000000000; it must be at most'),
        ({"context_length": "512"}, "\"context_length\" is '512'; it must be a positive whole number"),
        ({"context_length": 0}, "context_length"),
        ({"norm_eps": "small"}, "norm_eps"),
        ({"norm_eps": -1.0}, '"norm_eps" is -1.0; it must be a finite number above 0'),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"initializer_range": -1}, "initializer_range"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"residual_in_fp32": 1}, "residual_in_fp32"),
        ({"dtype": "float99"}, "\"dtype\" is 'float99'; it must be a floating-point type"),
        ({"dtype": "int64"}, "\"dtype\" is 'int64'; it must be a floating-point type"),
        ({"torch_dtype": 7}, "torch_dtype"),
        ({"layers": [{"mixer": MIXER, "mlp_size": -3}]}, 'layer 0: "mlp_size" is -3; it must be a whole number from 0'),
        ({"layers": [{"mixer": MIXER, "mlp_size": True}]}, "mlp_size"),
        ({"layers": [{"mixer": {"type": ["gla"]}}]}, 'layer 0: the "type" of a mixer is'),
        ({"layers": [{"mixer": {"type": "hymba", "attention": {"type": {}}, "ssm": MIXER}}]}, '"type" of a mixer'),
    ],
)
def test_native_config_with_a_bad_value(folder: Path, change: dict[str, Any], named: str) -> None:
    edit_config(folder, **change)
    with pytest.raises(UserError, match=f"config.json.*{named}"):
        open_checkpoint(folder)


def test_native_config_without_layers(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "longrecall", "vocab_size": 4, "hidden_size": 4}')
    with pytest.raises(UserError, match="layers"):
        open_checkpoint(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or not a safetensors file"):
        open_checkpoint(folder)


# The file system fixture is the same for every example on purpose: each one overwrites the same file.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_weights_that_are_something_else(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors|missing"):
        open_checkpoint(folder)


def test_missing_tensor(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.0.mixer.q_proj.weight": None})
    with pytest.raises(UserError, match=r'"model\.layers\.0\.mixer\.q_proj\.weight" is missing'):
        open_checkpoint(folder)


def test_renamed_tensor_names_both(folder: Path) -> None:
    tensor = load_file(folder / "model.safetensors")["model.norm.weight"]
    edit_tensors(folder, {"model.norm.weight": None, "model.norms.weight": tensor})
    with pytest.raises(UserError, match=r'"model\.norm\.weight" is missing.*"model\.norms\.weight"'):
        open_checkpoint(folder)


def test_extra_tensor(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.1.mixer.q_proj.weight": torch.ones(8, 8)})
    with pytest.raises(UserError, match=r'unknown tensors.*"model\.layers\.1\.mixer\.q_proj\.weight"'):
        open_checkpoint(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, {"model.norm.weight": torch.ones(9)})
    with pytest.raises(UserError, match=r'"model\.norm\.weight" has shape \[9\].*\[8\]'):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool])
def test_tensor_that_is_no_float(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, {"model.norm.weight": torch.ones(8).to(dtype)})
    with pytest.raises(UserError, match=r'"model\.norm\.weight" has type'):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("where", "method", "named"),
    [
        ({}, {"quant_method": "fp8"}, r'"quantization_config" says .* \(fp8\); .*FineGrainedFP8Config\(dequantize'),
        (
            {},
            {"quant_method": "bitsandbytes_4bit"},
            r"\(bitsandbytes_4bit\); .*from_pretrained\(\.\.\.\)\.dequantize\(\)",
        ),
        ({}, {"quant_method": "gptq", "bits": 4}, r"\(gptq\); .* bfloat16 or float16, or dequantise it with the tool"),
        (
            {},
            {"quant_method": "torchao"},
            r"\(torchao\); .*open it with transformers: .*as it is loaded \(--quantize\)",
        ),
        ({"text_config": {}}, {"quant_method": "awq"}, r'"text_config\.quantization_config" says'),
        ({}, {"bits": 8}, "the weights are quantised; longrecall"),
    ],
)
def test_quantised_weights_are_named_from_the_config(
    folder: Path, where: dict[str, Any], method: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change = {"quantization_config": method}
    edit_config(folder, **({"text_config": change} if where else change))
    with pytest.raises(UserError, match=named):
        open_checkpoint(folder)
    assert main(["info", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ({"q_proj.weight_scale_inv": torch.ones(1)}, r'q_proj\.weight_scale_inv" shows .* \(fp8\)'),
        ({"q_proj.weight.absmax": torch.ones(1), "q_proj.weight.quant_map": torch.ones(16)}, r"\(bitsandbytes\)"),
        ({"q_proj.qweight": torch.ones(1, dtype=torch.int32)}, r"q_proj\.qweight.*\(GPTQ or AWQ\)"),
        (
            {"q_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)},
            r"type F8_E4M3;.*If the weights are quantised",
        ),
    ],
)
def test_quantised_weights_are_named_from_the_file(folder: Path, added: dict[str, torch.Tensor], named: str) -> None:
    edit_tensors(folder, {f"model.layers.0.mixer.{name}": tensor for name, tensor in added.items()})
    with pytest.raises(UserError, match=named):
        open_checkpoint(folder)


def test_code_of_an_unknown_model_is_never_run(folder: Path) -> None:
    edit_config(folder, model_type="somebodys_model", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text("raise SystemExit('was run')")
    with pytest.raises(UserError, match=r"The Python code that comes with it is never run\. longrecall reads"):
        open_checkpoint(folder)


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_one_tensor_wrong_in_a_foreign_file(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(VECTORS / "gla", tmp_path / "theirs")
    file, name = tmp_path / "theirs" / "model.safetensors", "model.layers.1.attn.o_proj.weight"
    tensors = load_file(file)
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["model.layers.1.attn.r_proj.weight"] = torch.ones(2)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file)
    assert main(["export", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 2
    said = {
        "missing": f'"{name}" is missing',
        "extra": 'has no place for: "model.layers.1.attn.r_proj.weight"',
        "shape": f'"{name}" has shape',
    }
    error = capsys.readouterr().err
    assert said[change] in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sharded_weights_are_read(folder: Path) -> None:
    before = open_checkpoint(folder)
    expected = {name: before.read(name) for name in before.names()}
    shard(folder)
    after = open_checkpoint(folder)
    assert all(torch.equal(after.read(name), tensor) for name, tensor in expected.items())


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors does not exist"):
        open_checkpoint(folder)


def test_truncated_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-3])
    with pytest.raises(UserError, match=r"b\.safetensors is truncated"):
        open_checkpoint(folder)


@pytest.mark.parametrize("place", ["b.safetensors", "../a.safetensors", "/etc/passwd", "a.bin", "c.safetensors"])
def test_index_that_lies(folder: Path, place: str) -> None:
    shard(folder, **{"lm_head.weight": place})
    with pytest.raises(UserError, match=r"lm_head\.weight|c\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_damaged(folder: Path, content: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json"):
        open_checkpoint(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    names = shard(folder)
    first = next(name for name, file in names.items() if file == "a.safetensors")
    tensors = load_file(folder / "b.safetensors") | {first: torch.ones(1)}
    save_file(tensors, folder / "b.safetensors")
    with pytest.raises(UserError, match=f'"{first}" is already in a.safetensors'):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "{}", "[3]", "\udcff"])
def test_surgery_record_that_is_damaged(folder: Path, content: str) -> None:
    (folder / "surgery.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"surgery\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"layers": 3}, '"layers" is 3; it must be a list of layers'),
        ({"layers": ["0"]}, "layers"),
        ({"touched": 5}, '"touched" is 5; it must be a list of tensor names'),
        ({"touched": [None]}, "touched"),
        ({"state_size": []}, "state_size"),
        ({"state_size": {"before": "64"}}, "state_size"),
        ({"parameters": {"before": None}}, "parameters"),
    ],
)
def test_surgery_record_with_a_bad_field(folder: Path, record: dict[str, Any], named: str) -> None:
    (folder / "surgery.json").write_text(json.dumps([{}, record]))
    with pytest.raises(UserError, match=f"surgery.json: record 1: .*{named}"):
        open_checkpoint(folder)


def test_folder_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint("no/such/folder/anywhere")


def test_path_that_is_a_file(folder: Path) -> None:
    with pytest.raises(UserError, match="is a file"):
        open_checkpoint(folder / "config.json")


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("name resolution failed\nand a long trace")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"somebody/some-model.*name resolution failed\)") as caught:
        open_checkpoint("somebody/some-model")
    assert "\n" not in str(caught.value)


def test_hub_download_asks_for_safetensors_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_checkpoint("somebody/some-model").path == folder
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0])
    (folder / "model.safetensors").unlink()
    assert locate("somebody/some-model") == folder
    assert any("pytorch_model.bin" in patterns for patterns in asked[1:])


def test_existing_folder_wins_over_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert open_checkpoint(f"{folder.parent.name}/{folder.name}").source_format == "native"


def test_format_registry_refuses_duplicates() -> None:
    one = Format("one", ("kind",), native.layout, nested_types=("text",), mark="key")
    for other in (
        Format("two", ("other", "kind"), native.layout),
        Format("one", ("other",), native.layout),
        Format("two", ("other",), native.layout, nested_types=("text",)),
        Format("two", (), native.layout, mark="key"),
    ):
        with pytest.raises(ValueError, match="twice"):
            registry([one, other])


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2), st.lists, max_leaves=4)
)
def test_any_model_type_is_refused_or_known(value: object) -> None:
    with pytest.raises(UserError):
        detect({"model_type": value}, "config.json")


def test_long_lists_are_cut() -> None:
    assert listed(["c", "a", "b", "d", "e"]) == '"a", "b", "c" and 2 more'
