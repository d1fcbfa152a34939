"""`consolidate`: from pieces of several processes to the native checkpoint, whole, in little memory, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.layers.handover import Handover
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import CheckpointWriter, open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.formats.pieces import StoredTensors
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints import checkpoint_fingerprint, consolidate
from tests.conftest import MIXERS
from tests.training.conftest import GLA, MAMBA, tiny_model
from tests.training.runs import equal, weights

RECORDS = [{"method": "merge_heads", "touched": ["model.layers.1.mixer.k_proj.weight"]}]


def write_sharded(run: Path, model: RecurrentLM, step: int = 3) -> Path:
    """A step as two processes leave it, written as docs/reference/files.md says: rows, the second process has more."""
    folder = run / "steps" / f"step-{step:08d}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    tensors = {name: state[name] for name in model.config.tensor_shapes()}
    with CheckpointWriter(folder) as writer:
        writer.set_config(model.config)
        writer.set_elsewhere({name: tensor.dtype for name, tensor in tensors.items()})
        writer.set_surgery(RECORDS)
        byte_tokenizer().save_pretrained(str(writer.folder))
    files: list[dict[str, Tensor]] = [{}, {}]
    index: dict[str, Any] = {"schema": 1, "files": [f"shard-0000{n}-000.safetensors" for n in (0, 1)], "tensors": {}}
    both = {f"model/{name}": tensor for name, tensor in tensors.items()}
    both |= {f"optimizer/{name}#exp_avg": tensor * 2 for name, tensor in list(tensors.items())[:2]}
    for name, tensor in both.items():
        pieces = []
        cut = len(tensor) // 3 if tensor.ndim else 0
        for number, part in enumerate((tensor[:cut], tensor[cut:]) if cut else (tensor,)):
            offset = [cut * number, *[0] * (tensor.ndim - 1)] if tensor.ndim else []
            files[number][f"{name}@{','.join(map(str, offset))}"] = part.contiguous()
            pieces.append([number, offset, list(part.shape)])
        index["tensors"][name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "pieces": pieces,
        }  # fmt: skip
    for file, parts in zip(index["files"], files, strict=True):
        save_file(parts, folder / file)
    (folder / "shards.json").write_text(json.dumps(index))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "training_state.json").write_text(json.dumps({"step": step, "world": 2, "files": sizes}))
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "run", tiny_model())


def test_a_consolidated_step_is_the_checkpoint_that_one_process_writes(step: Path, tmp_path: Path) -> None:
    model = tiny_model()
    save(model, tmp_path / "whole", byte_tokenizer(), RECORDS)
    assert equal(weights(step), weights(tmp_path / "whole"))
    checkpoint = open_checkpoint(step)
    # A part of a tensor, across the place where it was cut.
    key = "model.embeddings.weight"
    assert torch.equal(checkpoint.read_rows(key, 80, 99), model.state_dict()[key][80:99])
    summary = consolidate(tmp_path / "run", tmp_path / "one")
    assert (summary.step, summary.processes, summary.source) == (3, 2, str(step))
    left, there = (
        {path.name: path.read_bytes() for path in (tmp_path / place).iterdir() if path.name != "generation_config.json"}
        for place in ("one", "whole")
    )
    assert left == there and {"config.json", "model.safetensors", "surgery.json", "README.md"} <= left.keys()
    assert checkpoint_fingerprint(open_checkpoint(tmp_path / "one")) == load(tmp_path / "one").fingerprint()
    assert load(step).fingerprint() == model.fingerprint()


def test_the_verb(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["consolidate", str(step), "--to", str(tmp_path / "one")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert main(words) == 2
    assert "is not empty; choose another folder or use --force to replace it" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert f"wrote {tmp_path / 'one'}" in capsys.readouterr().out
    assert main(["consolidate", str(tmp_path / "one"), "--to", str(tmp_path / "two")]) == 2
    told = capsys.readouterr().err
    assert "one holds no complete resumable checkpoint; name the output folder of a run" in told
    assert main(["consolidate", str(tmp_path / "none"), "--to", str(tmp_path / "two")]) == 2
    assert "none is not a folder" in capsys.readouterr().err
    assert main(["consolidate", str(step), "--to", str(step / "inside")]) == 2
    assert main(["info", str(step)]) == 0
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("progress", [1.0, 0.5])
def test_a_complete_handover_is_finished_and_another_kept(
    make_model: Callable[..., RecurrentLM], tmp_path: Path, progress: float
) -> None:
    model = make_model(MIXERS["handover"], GLA)
    for module in model.modules():
        if isinstance(module, Handover):
            module.progress.fill_(progress)
    step = write_sharded(tmp_path / "run", model)
    summary = consolidate(step, tmp_path / "one")
    kinds = [layer["mixer"]["type"] for layer in open_checkpoint(tmp_path / "one").config.layers]
    if progress == 1.0:
        assert summary.finished == (0,) and summary.handing_over == () and "handover" not in kinds
        assert "handover finished  layers 0" in summary.table()
    else:
        assert summary.handing_over == (0,) and summary.finished == () and kinds[0] == "handover"
        assert equal(weights(tmp_path / "one"), weights(step))


def edit(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((step / "shards.json").read_text())
    change(index)
    (step / "shards.json").write_text(json.dumps(index))
    state = json.loads((step / "training_state.json").read_text())
    state["files"]["shards.json"] = (step / "shards.json").stat().st_size
    (step / "training_state.json").write_text(json.dumps(state))


EMBEDDINGS = "model/model.embeddings.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "elsewhere": (lambda index: index["files"].__setitem__(0, "../x.safetensors"), "not a .safetensors file beside it"),
    "missing": (lambda index: index["files"].__setitem__(0, "x.safetensors"), "does not exist; the checkpoint is inc"),
    "gap": (lambda index: index["tensors"][EMBEDDINGS]["pieces"].pop(), "do not make up"),
    "type": (lambda index: index["tensors"][EMBEDDINGS].__setitem__("dtype", "float16"), "as shards.json describes it"),
    "kind": (lambda index: index["tensors"][EMBEDDINGS].__setitem__("dtype", "system"), "has the unknown type system"),
    "outside": (lambda index: index["tensors"][EMBEDDINGS]["pieces"][1][1].__setitem__(0, 200), "is outside of it"),
    "negative": (lambda index: index["tensors"][EMBEDDINGS]["pieces"][1][1].__setitem__(0, -1), "are no sizes"),
    "nowhere": (lambda index: index["tensors"][EMBEDDINGS]["pieces"][1].__setitem__(0, 9), "has no place"),
    "empty": (lambda index: index.pop("tensors"), "is damaged"),
    "weight": (lambda index: index["tensors"].pop(EMBEDDINGS), "model.embeddings.weight"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_written(step: Path, tmp_path: Path, kind: str) -> None:
    change, line = DAMAGE[kind]
    edit(step, change)
    with pytest.raises(UserError) as caught:
        consolidate(step, tmp_path / "one")
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@contextmanager
def most_memory(found: list[int]) -> Iterator[None]:
    """Put into `found` by how many bytes this process has grown at most inside the block, mapped files aside."""

    def now() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    done, begun = threading.Event(), now()
    sizes = [begun]

    def look() -> None:
        while not done.wait(0.001):
            sizes.append(now())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(max(sizes) - begun)


def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    """A model of 38 MB in tensors of 1 MB: some of them are there at once, in the file that is made and beside it."""
    mixer = {**MAMBA, "inner_dim": 256, "head_dim": 32}
    layers = [{"mixer": mixer, "mlp_size": 1024} for _ in range(12)]
    model = RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=256, layers=layers))
    step = write_sharded(tmp_path / "run", model)
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    assert sum(sizes) > 36 * max(sizes) > 36_000_000
    del model
    consolidate(step, tmp_path / "warm")
    grown: list[int] = []
    with pytest.MonkeyPatch.context() as patch, most_memory(grown):
        patch.setattr("longrecall.training.checkpoints.consolidating.FEWEST_BYTES", 0)
        consolidate(step, tmp_path / "one")
    # Four in the file that is made, four in the bytes that safetensors writes, one being read; and what is freed late.
    assert grown[0] < 14 * max(sizes)
    assert equal(weights(tmp_path / "one"), weights(step))


def test_only_what_is_asked_for_is_read(step: Path) -> None:
    stored = StoredTensors.of_shards(step)
    whole = stored.read(EMBEDDINGS)
    assert torch.equal(stored.read(EMBEDDINGS, (80, 3), (20, 5)), whole[80:100, 3:8])
    assert stored.read(EMBEDDINGS, (80, 3), (0, 5)).shape == (0, 5)
    with pytest.raises(UserError, match=r'no tensor "model/embedings"\. Did you mean "model/model\.embeddings\.w'):
        stored.read("model/embedings")
