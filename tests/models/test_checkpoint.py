"""The native checkpoint folder: what is written is what is read, lazily."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from longrecall.errors import UserError
from longrecall.models.checkpoint import CheckpointWriter, open_checkpoint, save
from longrecall.models.formats.native import model_card
from longrecall.models.formats.weights import SafetensorsWeights
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from tests.hybrids import hybrid_config
from tests.models.checkpoints import (
    GLA,
    HANDOVER,
    MAMBA2,
    RECORD,
    config_of,
    filled,
    logits,
    model_of,
    write,
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_model_loads_as_it_was(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(tied=tied).to(dtype)
    save(model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.dtype == dtype
    assert not again.training
    assert again.fingerprint() == model.fingerprint()
    assert torch.equal(logits(again), logits(model))
    assert (again.lm_head.weight is again.model.embeddings.weight) == tied
    assert all(parameter.requires_grad for parameter in again.parameters())


@settings(max_examples=25, deadline=None)
@given(
    mixers=st.lists(st.sampled_from([GLA, MAMBA2, HANDOVER]), min_size=1, max_size=3),
    tied=st.booleans(),
    limit=st.integers(1, 20_000),
)
def test_any_shard_size_gives_the_same_tensors(
    mixers: list[dict[str, Any]], tied: bool, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out, config = tmp_path_factory.mktemp("shards") / "out", config_of(*mixers, tied=tied)
    write(out, config, max_shard_bytes=limit)
    found = open_checkpoint(out)
    assert found.config.to_dict()["layers"] == config.to_dict()["layers"]
    assert found.names() == list(config.tensor_shapes())
    for name, tensor in filled(config):
        assert torch.equal(found.read(name), tensor)
        assert (found.shape(name), found.dtype(name)) == (tuple(tensor.shape), torch.float32)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit


def test_index_of_shards_is_what_other_tools_expect(tmp_path: Path) -> None:
    config = config_of()
    write(tmp_path / "out", config, max_shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(shards)
    assert set(index["weight_map"]) == set(config.tensor_shapes())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in filled(config))
    with safe_open(tmp_path / "out" / shards[0], framework="pt") as shard:
        assert shard.metadata() == {"format": "pt"}


def test_transformers_reads_and_writes_the_same_folder(tmp_path: Path) -> None:
    model = model_of(tied=True)
    save(model, tmp_path / "ours")
    assert torch.equal(logits(RecurrentLM.from_pretrained(tmp_path / "ours").eval()), logits(model))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    assert torch.equal(logits(load(tmp_path / "theirs")), logits(model))


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", config_of())
    monkeypatch.setattr(SafetensorsWeights, "read", lambda *a: pytest.fail("read a tensor"))
    found = open_checkpoint(tmp_path / "out")
    assert found.shape("model.norm.weight") == (8,)
    assert len(found.sha256()) == 64


def test_reading_one_tensor_reads_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", config_of())
    read, asked = SafetensorsWeights.read, []
    monkeypatch.setattr(SafetensorsWeights, "read", lambda self, names: asked.extend(names) or read(self, names))
    open_checkpoint(tmp_path / "out").read("model.norm.weight")
    assert asked == ["model.norm.weight"]


def test_read_tensor_is_a_copy(tmp_path: Path) -> None:
    write(tmp_path / "out", config_of())
    found = open_checkpoint(tmp_path / "out")
    before = found.sha256()
    found.read("model.norm.weight").zero_()
    assert found.read("model.norm.weight").any()
    assert found.sha256() == before


def test_writer_keeps_what_it_was_given(tmp_path: Path) -> None:
    # The caller's buffer is reused and is a view of one storage; neither may show in the file.
    config, buffer = config_of(), torch.zeros(4096)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.set_config(config)
        for index, (name, shape) in enumerate(config.tensor_shapes().items()):
            view = buffer[: torch.Size(shape).numel()].view(shape)
            writer.add(name, view.fill_(index).t().contiguous().t() if len(shape) == 2 else view.fill_(index))
    found = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(found.read(name), tensor) for name, tensor in filled(config))


def test_unknown_name_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path / "out", config_of())
    with pytest.raises(UserError, match=r'Did you mean "model\.norm\.weight"'):
        open_checkpoint(tmp_path / "out").read("model.norms.weight")


def test_hash_changes_with_weights_and_config_only(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, config_of())
    first, second = (open_checkpoint(tmp_path / name).sha256() for name in ("one", "two"))
    assert first == second
    (tmp_path / "one" / "README.md").write_text("another card")
    assert open_checkpoint(tmp_path / "one").sha256() == first
    content = bytearray((tmp_path / "one" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "one" / "model.safetensors").write_bytes(content)
    raw = json.loads((tmp_path / "two" / "config.json").read_text()) | {"norm_eps": 1e-3}
    (tmp_path / "two" / "config.json").write_text(json.dumps(raw))
    assert len({first, *(open_checkpoint(tmp_path / name).sha256() for name in ("one", "two"))}) == 3


def test_surgery_and_companions_travel(tmp_path: Path) -> None:
    write(tmp_path / "source", config_of())
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "LICENSE",
        "notes.txt",
        "modeling.py",
    ):
        (tmp_path / "source" / name).write_text(name)
    source = open_checkpoint(tmp_path / "source")
    assert source.surgery == []
    assert not (tmp_path / "source" / "surgery.json").exists()
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.set_config(source.config)
        for name in source.names():
            writer.add(name, source.read(name))
        writer.set_surgery([RECORD])
        writer.add_companions(source.companion_files())
    found = open_checkpoint(tmp_path / "out")
    assert found.surgery == [RECORD]
    assert [path.name for path in found.companion_files()] == [
        "LICENSE",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert "grow_state" in (tmp_path / "out" / "README.md").read_text()


def test_tokenizer_is_saved_beside_the_model(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")

    save(model_of(), tmp_path / "out", tokenizer=Tokenizer(), surgery=[RECORD])
    names = {path.name for path in open_checkpoint(tmp_path / "out").companion_files()}
    assert names == {"tokenizer.json", "generation_config.json"}
    assert open_checkpoint(tmp_path / "out").surgery == [RECORD]


def test_model_card_of_a_hybrid() -> None:
    """Every block has its name, and equal layers are one row."""
    cards = {name: model_card(hybrid_config(name), 1, "float32", []) for name in ("nemotron", "falcon", "kimi", "rwkv")}
    assert "| 0,2 | mamba2 | 256 | - |" in cards["nemotron"] and "| 1 | moe | 0 | - |" in cards["nemotron"]
    assert "| 3 | mlp | 0 | - |" in cards["nemotron"] and "- moe" in cards["nemotron"]
    assert "| 0-1 | parallel (attention, mamba2) | 256 | 24 |" in cards["falcon"] and "- mamba2" in cards["falcon"]
    assert "| 1 | kda + moe | 180 | - |" in cards["kimi"] and "- mla" in cards["kimi"]
    assert "| 0 | rwkv7 + rwkv7_channel | 256 | - |" in cards["rwkv"]


def test_model_card_joins_equal_layers() -> None:
    card = model_card(config_of(GLA, MAMBA2, MAMBA2), 1234, "bfloat16", [RECORD])
    assert card.startswith("---\nlibrary_name: longrecall\n")
    assert "- mamba2" in card
    assert "| 0 | gla | 48 | 8 |" in card
    assert "| 1-2 | mamba2 | 48 | - |" in card
    assert "| parameters | 1,234 (bfloat16) |" in card
    assert "`grow_state` (init `preserve`, seed 0) in layers 1; state 48 -> 96; longrecall 0.1.0" in card
