"""The native checkpoint folder: writing whole or not at all, reading lazily, loading and saving models."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from longrecall.errors import UserError
from longrecall.models import checkpoint as checkpoint_module
from longrecall.models.checkpoint import Checkpoint, CheckpointWriter, check_finite, open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.formats.native import model_card
from longrecall.models.formats.weights import SafetensorsWeights
from longrecall.models.loading import load, materialise, parse_dtype
from longrecall.models.recurrent_lm import RecurrentLM

GLA = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 6}
MAMBA2 = {"type": "mamba2", "inner_dim": 16, "head_dim": 4, "state_dim": 3}
HANDOVER = {"type": "handover", "old": MAMBA2, "new": {**MAMBA2, "state_dim": 5}}
RECORD = {
    "method": "grow_state",
    "init": "preserve",
    "layers": [1],
    "seed": 0,
    "longrecall_version": "0.1.0",
    "touched": ["model.layers.1.mixer.in_proj.weight"],
    "state_size": {"before": 48, "after": 96},
}


def config_of(*mixers: dict[str, Any], tied: bool = False) -> RecurrentConfig:
    layers = [{"mixer": mixer, "mlp_size": 8 if mixer["type"] == "gla" else 0} for mixer in mixers or (GLA, MAMBA2)]
    return RecurrentConfig(vocab_size=17, hidden_size=8, layers=layers, tie_word_embeddings=tied)


def model_of(*mixers: dict[str, Any], tied: bool = False) -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(config_of(*mixers, tied=tied)).eval()


def logits(model: RecurrentLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(1, -1)).logits


def filled(config: RecurrentConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `config`, with numbers of its own."""
    for index, (name, shape) in enumerate(config.tensor_shapes().items()):
        yield name, torch.full(shape, float(index))


def write(out: Path, config: RecurrentConfig, **options: Any) -> None:
    with CheckpointWriter(out, **options) as writer:
        writer.set_config(config)
        for name, tensor in filled(config):
            writer.add(name, tensor)


# Reading and writing -------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(SafetensorsWeights, "read", lambda self, name: asked.append(name) or read(self, name))
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


def test_model_card_joins_equal_layers() -> None:
    card = model_card(config_of(GLA, MAMBA2, MAMBA2), 1234, "bfloat16", [RECORD])
    assert card.startswith("---\nlibrary_name: longrecall\n")
    assert "- mamba2" in card
    assert "| 0 | gla | 48 | 8 |" in card
    assert "| 1-2 | mamba2 | 48 | - |" in card
    assert "| parameters | 1,234 (bfloat16) |" in card
    assert "`grow_state` (init `preserve`, seed 0) in layers 1; state 48 -> 96; longrecall 0.1.0" in card


# Whole or not at all -------------------------------------------------------------------------------------------------


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), CheckpointWriter(tmp_path / "out", max_shard_bytes=1) as writer:
        writer.set_config(config_of())
        for name, tensor in filled(config_of()):
            writer.add(name, tensor)
        raise KeyError("surgery went wrong")
    assert left_behind(tmp_path) == []


def test_kill_leaves_no_checkpoint(tmp_path: Path) -> None:
    script = f"""
        import os, signal, torch
        from longrecall.models.checkpoint import CheckpointWriter
        from longrecall.models.config import RecurrentConfig
        layers = [{{"mixer": {GLA!r}, "mlp_size": 0}}]
        config = RecurrentConfig(vocab_size=17, hidden_size=8, layers=layers)
        with CheckpointWriter({str(tmp_path / "out")!r}, max_shard_bytes=1) as writer:
            writer.set_config(config)
            for name, shape in config.tensor_shapes().items():
                writer.add(name, torch.zeros(shape))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment(), timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.rglob("*.safetensors"))
    assert list(tmp_path.rglob("config.json")) == []


def environment() -> dict[str, str]:
    source = str(Path(checkpoint_module.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": source}


def test_non_empty_folder_is_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="--force"):
        write(tmp_path / "out", config_of())
    assert left_behind(tmp_path / "out") == ["thesis.txt"]
    assert left_behind(tmp_path) == ["out"]


def test_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", config_of())
    write(tmp_path / "a" / "b" / "out", config_of())
    assert open_checkpoint(tmp_path / "empty").sha256() == open_checkpoint(tmp_path / "a" / "b" / "out").sha256()


def test_force_replaces_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, config_of(GLA))
    before = open_checkpoint(out).sha256()
    with pytest.raises(UserError, match="never given"), CheckpointWriter(out, force=True) as writer:
        writer.set_config(config_of(MAMBA2))
    assert open_checkpoint(out).sha256() == before
    write(out, config_of(MAMBA2), force=True)
    assert open_checkpoint(out).config.layers[0]["mixer"]["type"] == "mamba2"
    assert left_behind(tmp_path) == ["out"]


def test_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(out, config_of(GLA))
    before, rename = open_checkpoint(out).sha256(), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="cannot be written"):
        write(out, config_of(MAMBA2), force=True, max_shard_bytes=1 << 30)
    assert open_checkpoint(out).sha256() == before
    assert left_behind(tmp_path) == ["out"]


def test_source_can_be_replaced_by_what_is_read_from_it(tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    source = open_checkpoint(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", force=True) as writer:
        writer.set_config(source.config)
        for name in source.names():
            writer.add(name, source.read(name) * 2)
    assert torch.equal(open_checkpoint(tmp_path / "out").read("model.norm.weight"), torch.full((8,), 2.0))


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "out", config_of(), force=True)
    assert (tmp_path / "out").read_text() == "a file"


def test_working_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError, match="--force does not replace"):
        write(tmp_path, config_of(), force=True)


def test_unwritable_output(tmp_path: Path) -> None:
    # A parent that is a file cannot be written into, whoever runs the tests.
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out cannot be written"):
        write(tmp_path / "file" / "out", config_of())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_while_saving(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save(model_of(), tmp_path / "out")
    assert left_behind(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_system_that_refuses_to_write_more(tmp_path: Path) -> None:
    # A limit on the file size makes the real write fail midway, as a full disk does.
    script = f"""
        import resource, signal, torch
        from longrecall.errors import UserError
        from longrecall.models.checkpoint import CheckpointWriter
        from longrecall.models.config import RecurrentConfig
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        layers = [{{"mixer": {GLA!r}, "mlp_size": 0}}]
        config = RecurrentConfig(vocab_size=5000, hidden_size=8, layers=layers)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            with CheckpointWriter({str(tmp_path / "out")!r}) as writer:
                writer.set_config(config)
                for name, shape in config.tensor_shapes().items():
                    writer.add(name, torch.zeros(shape))
        except UserError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert "out cannot be written: File too large" in done.stdout, done.stderr
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norms.weight", torch.ones(8), r'no place.*Did you mean "model\.norm\.weight"'),
        ("model.norm.weight", torch.ones(9), r'"model\.norm\.weight" has shape \[9\].*\[8\]'),
        ("model.embeddings.weight", torch.ones(17, 8), "given twice"),
    ],
)
def test_writer_refuses_what_the_config_has_no_place_for(
    name: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message), CheckpointWriter(tmp_path / "out") as writer:
        writer.set_config(config_of())
        writer.add("model.embeddings.weight", torch.ones(17, 8))
        writer.add(name, tensor)
    assert left_behind(tmp_path) == []


def test_writer_names_a_tensor_that_never_came(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r'never given: "lm_head\.weight"'),
        CheckpointWriter(tmp_path / "out") as writer,
    ):
        writer.set_config(config_of())
        for name, tensor in filled(config_of()):
            if name != "lm_head.weight":
                writer.add(name, tensor)
    assert left_behind(tmp_path) == []


def test_shard_size_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_shard_bytes"):
        CheckpointWriter(tmp_path / "out", max_shard_bytes=0)


# Loading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("auto", None),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("torch.float16", torch.float16),
        ("fp32", torch.float32),
        ("float64", torch.float64),
    ],
)
def test_dtype_names(given: Any, expected: torch.dtype | None) -> None:
    assert parse_dtype(given) == expected


@pytest.mark.parametrize("dtype", ["bfloat61", "int8", torch.int64, ""])
def test_unknown_dtype(dtype: Any, tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    with pytest.raises(UserError, match=r"^dtype"):
        load(tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "nowhere:0"])
def test_unusable_device(device: str, tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    with pytest.raises(UserError, match=f'device "{device}" cannot be used'):
        load(tmp_path / "out", device=device)


def test_dtype_changes_weights_but_not_progress(tmp_path: Path) -> None:
    model = model_of(HANDOVER, tied=True)
    progress = "model.layers.0.mixer.progress"
    model.get_buffer(progress).fill_(0.3)
    save(model, tmp_path / "out")
    again = load(tmp_path / "out", dtype="bf16")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    # 0.3 is no bfloat16 number: only an untouched float32 keeps it.
    assert torch.equal(again.get_buffer(progress), torch.tensor(0.3))


def test_loaded_model_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    save(model_of(), tmp_path / "out")
    model = load(tmp_path / "out")
    before = logits(model)
    write(tmp_path / "out", config_of(), force=True)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert open_checkpoint(tmp_path / "out").read("model.norm.weight").any()


def test_open_checkpoint_can_be_loaded_without_opening_again(tmp_path: Path) -> None:
    model = model_of()
    save(model, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert isinstance(found, Checkpoint)
    assert materialise(found).fingerprint() == model.fingerprint()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_tensor_is_named(value: float) -> None:
    tensor = torch.ones(3, 4, dtype=torch.bfloat16)
    check_finite("fine", tensor)
    tensor[1, 2] = value
    with pytest.raises(UserError, match=r'"model\.norm\.weight" holds 1 values that are NaN or infinite'):
        check_finite("model.norm.weight", tensor)
