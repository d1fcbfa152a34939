"""Whatever a file says that it holds, no work begins that grows with it: one line, at once, in little memory."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.layers.mixers.registry import MIXERS as TYPES
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models import limits, value_checks
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.formats import FORMATS, detect
from longrecall.models.formats.fields import Fields
from longrecall.models.initialising import initialise
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

MAMBA_SSM: tuple[dict[str, Any], ...] = ({"ssm_cfg": {}}, {"ssm_cfg": {"layer": "Mamba2"}})
FOREIGN = [
    # Further names of a model type are read by the same functions.
    {"model_type": kind}
    for entry in FORMATS.values()
    if entry.name != "native"
    for kind in entry.model_types[:1]
] + list(MAMBA_SSM)


def plain(value: Any) -> Any:
    """A description as JSON has it, every default written out."""
    value = value.to_dict() if hasattr(value, "to_dict") else value
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@contextmanager
def at_once(seconds: float = 3.0, memory: int = 1 << 29) -> Iterator[None]:
    """Fail what computes longer than refusing may, and stop what takes much memory: a refusal needs hardly any.

    The slowest, of 4,096 layers, takes under a second. The processor's time counts: machines are shared.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, start = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - start < seconds


def refused(folder: Path, raw: dict[str, Any], seconds: float = 3.0) -> str:
    """The one line about a folder whose config.json is `raw`, and which has no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught, at_once(seconds):
        open_checkpoint(folder)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line
    return line


@functools.cache
def keys_read(method: str, index: int) -> list[tuple[str, ...]]:
    """Paths of the keys that the format of `FOREIGN[index]` reads by a method of `Fields`."""
    found: list[tuple[str, ...]] = []
    original = getattr(Fields, method)

    def record(self: Fields, name: str, *rest: Any, **options: Any) -> Any:
        # A section of the file is named in the place: config.json: "text_config".
        found.append((*re.findall(r'"(\w+)"', self.where), name))
        return original(self, name, *rest, **options)

    raw = FOREIGN[index]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fields, method, record)
        detect(raw, "").layout({**raw, **attention(raw)}, "config.json")
    # `optional_integer` asks for what is there, so that it has to be named here.
    optional = [("num_kv_heads",), ("num_v_heads",), ("intermediate_size",)] if attention(raw) else []
    optional += [] if "ssm_cfg" in raw else [("max_position_embeddings",)]
    return list(dict.fromkeys([*found, *(optional if method == "integer" else [])]))


def attention(raw: dict[str, Any]) -> dict[str, Any]:
    """A hybrid layer, where the format has them."""
    fla = detect(raw, "").name.startswith("fla_")
    return {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 8}} if fla else {}


def put(raw: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    """`raw` with another value at a path."""
    if len(path) == 1:
        return {**raw, path[0]: value}
    return {**raw, path[0]: put(raw.get(path[0], {}), path[1:], value)}


FORMATS_READ = [
    pytest.param(index, id=f"{raw.get('model_type', 'mamba_ssm')}-{index}") for index, raw in enumerate(FOREIGN)
]


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "at_their_limit"])
@pytest.mark.parametrize("index", FORMATS_READ)
def test_every_count_of_every_format_has_a_limit(index: int, everything: bool, tmp_path: Path) -> None:
    raw = {**FOREIGN[index], **attention(FOREIGN[index])}
    for path in keys_read("integer", index):
        most = limits.MOST[path[-1]]
        for value in (most + 1, 10**300):
            line = refused(tmp_path, put(raw, path, value))
            # A key that this format does not know is refused for that.
            assert f'"{path[-1]}" is {value}; it must be at most {most}' in line or "does not know the key" in line
        # For its missing weights, if for nothing else, and as quickly: work grows with layers and with experts.
        if everything or "expert" in path[-1]:
            refused(tmp_path, put(raw, path, most))
        elif most == limits.LAYERS:
            # An eighth of the layers in a sixth of the time: what grows faster than the layers takes far longer.
            refused(tmp_path, put(raw, path, most // 8), seconds=0.5)


@pytest.mark.parametrize("index", FORMATS_READ)
def test_no_number_of_any_format_is_a_bug(index: int, tmp_path: Path) -> None:
    raw = {**FOREIGN[index], **attention(FOREIGN[index])}
    for path in [*keys_read("number", index), *keys_read("limits", index)]:
        for value in (1e308, 1e18, 1e-308, 10**400, float("nan"), float("inf"), {"__float__": "x"}):
            refused(tmp_path, put(raw, path, value))
            refused(tmp_path, put(raw, path, [0.0, value]))


@pytest.mark.parametrize("ratio", [1e308, float("nan"), float("inf"), 10**400])
def test_widths_that_follow_from_a_ratio(ratio: float, tmp_path: Path) -> None:
    assert '"hidden_ratio" is ' in refused(tmp_path, {"model_type": "gla", "hidden_ratio": ratio})


def paths_of(description: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of the counts in a mixer's description, inner mixers included."""
    for key, value in description.items():
        if isinstance(value, dict):
            yield from ((key, *path) for path in paths_of(value))
        elif key in limits.MOST:
            yield (key,)


@pytest.mark.parametrize("name", MIXERS)
def test_every_count_of_every_mixer_has_a_limit(name: str) -> None:
    full = plain(mixer_config(MIXERS[name]))
    for path in paths_of(full):
        most = limits.MOST[path[-1]]
        with pytest.raises(UserError, match=f'^layer 0: .*"{path[-1]}" is {most + 1}; it must be at most {most}$'):
            RecurrentConfig(hidden_size=32, layers=[{"mixer": put(full, path, most + 1)}])


@pytest.mark.parametrize("name", MIXERS)
def test_counts_at_their_limits_are_only_numbers(name: str) -> None:
    full = plain(mixer_config(MIXERS[name]))
    largest = full
    for path in paths_of(full):
        largest = put(largest, path, limits.MOST[path[-1]])
    built = 0
    for description in (largest, *(put(full, path, limits.MOST[path[-1]]) for path in paths_of(full))):
        with at_once():
            try:
                config = RecurrentConfig(vocab_size=2**24, hidden_size=2**18, layers=[{"mixer": description}])
                shapes = config.tensor_shapes()
            except UserError:  # one count must divide another
                continue
            built += 1
            assert shapes and config.state_size() >= 0
    assert built


def test_every_count_stands_in_the_table() -> None:
    mixers = {
        name
        for kind in TYPES
        for name, types in value_checks._field_types(kind).items()
        if int in types and bool not in types and float not in types
    }
    foreign = {path[-1] for index in range(len(FOREIGN)) for path in keys_read("integer", index)}
    own = {"vocab_size", "hidden_size", "context_length", "mlp_size", "layers", "repeat"}
    assert {"memories", "chunk", "groups", "conv_width"} <= mixers and {"num_hidden_layers", "d_conv"} <= foreign
    assert (mixers | foreign | own) - set(limits.MOST) == set()


NATIVE: dict[str, Any] = {"model_type": "longrecall", "vocab_size": 17, "hidden_size": 8}
LAYER = {"mixer": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 4}, "mlp_size": 8}


def nested(depth: int) -> dict[str, Any]:
    description: dict[str, Any] = LAYER["mixer"]  # type: ignore[assignment]
    for _ in range(depth):
        description = {"type": "handover", "old": description, "new": LAYER["mixer"]}
    return description


def tree(depth: int) -> dict[str, Any]:
    description: dict[str, Any] = LAYER["mixer"]  # type: ignore[assignment]
    for _ in range(depth):
        description = {"type": "handover", "old": description, "new": description}
    return description


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": [LAYER] * 5000}, '"layers" is 5000; it must be at most 4096'),
        ({"layers": [{}] * 10**6}, '"layers" is 1000000; it must be at most 4096'),
        ({"layers": [LAYER], "vocab_size": 2**24 + 1}, '"vocab_size" is 16777217; it must be at most'),
        ({"layers": [LAYER], "hidden_size": 10**6}, '"hidden_size" is 1000000; it must be at most'),
        ({"layers": [{**LAYER, "mlp_size": 10**6}]}, 'layer 0: "mlp_size" is 1000000; it must be at most'),
        ({"layers": [{"mixer": tree(14)}] * 4}, "layers 0 to 0 have more than 16384 mixers"),
        ({"layers": [{"mixer": nested(60)}]}, "has more than 48 nested brackets"),
        ({"layers": [LAYER], "note": json.loads("[" * 500 + "]" * 500)}, "has more than 48 nested brackets"),
        (
            {"layers": [{"mixer": LAYER["mixer"], "mlp_size": 2**18}] * 4096, "hidden_size": 2**18},
            "the model would have 8.4e+14 numbers; longrecall works with at most 1.8e+13",
        ),
        (
            {"layers": [{"mixer": {"type": "gla", "num_heads": 2**10, "key_dim": 2**18, "value_dim": 2**18}}]},
            "the state of a sequence would have 7.0e+13 numbers",
        ),
    ],
    ids=lambda value: value[:40].replace("/", " ") if isinstance(value, str) else "",
)
def test_native_configs_are_bounded_too(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert f"config.json: {told}" in refused(tmp_path, NATIVE | change).replace(" has more", ": has more")


def test_mixers_inside_mixers_of_a_model_in_memory() -> None:
    with pytest.raises(UserError, match="layer 1: mixers lie more than 48 deep"), at_once():
        RecurrentConfig(hidden_size=8, layers=[LAYER, {"mixer": nested(5000)}])


def test_info_refuses_a_million_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "num_hidden_layers": 1000000}')
    with at_once():
        assert main(["info", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('config.json: "num_hidden_layers" is 1000000; it must be at most 4096')


def test_repeated_layers_of_a_description(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "big.json"
    for layers in ([{**LAYER, "repeat": 5000}], [{**LAYER, "repeat": 4096}] * 2):
        file.write_text(json.dumps({**NATIVE, "layers": layers}))
        with at_once():
            assert main(["info", str(file)]) == 2
        assert "4096" in capsys.readouterr().err
    file.write_text(json.dumps({**NATIVE, "layers": [{**LAYER, "repeat": 4096}]}))
    assert main(["info", str(file), "--json"]) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good native checkpoint."""
    torch.manual_seed(0)
    save(RecurrentLM(RecurrentConfig(vocab_size=17, hidden_size=8, layers=[LAYER])), tmp_path / "good")
    return tmp_path / "good"


def sparse(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def fifo(path: Path, _: int) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path, _: int) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["config.json", "surgery.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("make", "told"),
    [(sparse, "is larger than 32.0 MiB"), (fifo, "is not an ordinary file"), (device, "is not an ordinary file")],
)
def test_json_files_are_read_only_so_far(name: str, make: Callable[[Path, int], None], told: str, folder: Path) -> None:
    make(folder / name, 2**40)
    if name == "config.json" or make is sparse:
        with pytest.raises(UserError, match=f"{name} {told}"), at_once():
            open_checkpoint(folder)
    else:
        # As good as not there.
        with at_once():
            assert open_checkpoint(folder).names()


def test_an_index_of_countless_files(folder: Path) -> None:
    index = {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(2**14 + 1)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json names 16385 weight files; longrecall reads at most 16384"):
        open_checkpoint(folder)


def test_a_header_larger_than_any_model_has(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**26))
    sparse(folder / "model.safetensors", 2**27)
    with (
        pytest.raises(UserError, match=r"model\.safetensors has a header of 64\.0 MiB; .* at most 32\.0 MiB"),
        at_once(),
    ):
        open_checkpoint(folder)


def test_countless_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrecall.models.formats.weights.TENSORS", 4)
    with pytest.raises(UserError, match=r"model\.safetensors: the checkpoint has more than 4 tensors"):
        open_checkpoint(folder)


def test_shapes_that_no_tensor_can_have(folder: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UserError, match=r"model\.safetensors|missing"):
        open_checkpoint(folder)


class Large:
    """Unpickled, it takes a gibibyte; torch counts it among the harmless."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 30,)


def torch_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"ssm_cfg": {}, "d_model": 8, "n_layer": 1}))
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def test_a_torch_file_that_asks_for_memory(folder: Path) -> None:
    path = torch_folder(folder)
    torch.save({"a": torch.ones(2), "b": Large()}, path)
    with pytest.raises(UserError, match=r"pytorch_model\.bin .* \(it calls .*bytearray\)"), at_once():
        open_checkpoint(folder)


def test_a_torch_file_that_is_compressed(folder: Path) -> None:
    path = torch_folder(folder)
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(UserError, match="it has compressed parts"):
        open_checkpoint(folder)


def test_models_larger_than_the_memory_are_not_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(folder)
    config, needed = checkpoint.config, sum(4 * checkpoint.read(name).numel() for name in checkpoint.names())
    monkeypatch.setattr(limits, "machine_memory", lambda: needed + 4 * config.state_size() - 1)
    with pytest.raises(UserError, match=r"^the model in .*good, with the state of one sequence, needs .* but cpu has"):
        load(folder)
    load(folder, dtype="bf16")
    monkeypatch.setattr(limits, "machine_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"^the model needs .* of memory, but cpu has 1000 B in all$"):
        initialise(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_small_checkpoint_with_a_state_beyond_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2**33 numbers of state from 12 MB of weights.
    mixer = {"type": "mamba2", "inner_dim": 2**17, "head_dim": 2**17, "state_dim": 2**16, "conv_width": 1}
    config = RecurrentConfig(vocab_size=2, hidden_size=1, layers=[{"mixer": mixer}])
    save_file(
        {name: torch.zeros(shape) for name, shape in config.tensor_shapes().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "longrecall", **config.to_diff_dict()}))
    monkeypatch.setattr(limits, "machine_memory", lambda: 2**34)
    with pytest.raises(UserError, match=r"needs 32\.\d GiB of memory"), at_once():
        load(tmp_path)


def test_no_limit_is_near_a_real_model() -> None:
    """The largest that we know: PaLM's widths, Gemma's vocabulary, DeepNet's layers, DeepSeek's tensors and files."""
    known = {"hidden_size": 18432, "mlp_size": 73728, "vocab_size": 262144, "num_hidden_layers": 1000, "num_heads": 128}
    assert all(limits.MOST[name] >= 3 * size for name, size in known.items())
    assert limits.TENSORS > 10 * 91991 and limits.SHARDS > 10 * 163 and limits.DESCRIPTION_BYTES > 3 * 8_900_000
