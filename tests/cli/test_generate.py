from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import longrecall
from longrecall.cli import generate
from longrecall.cli.main import main
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save

TEXT = "The lighthouse keeper counted seven ships, then eleven more."


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["generate", *map(str, words), "--json"]) == 0, capsys.readouterr().err
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("split", [1, 20, len(TEXT) - 1])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_kept_state_continues_like_the_whole_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: int, beams: int
) -> None:
    state = tmp_path / "state.safetensors"
    options = ("--max-new-tokens", 12, "--beams", beams)
    whole = answer(capsys, checkpoint, "--prompt", TEXT, *options)
    assert len(set(whole["text"])) > 1, "a model that repeats one character would pass whatever it read"
    read = answer(capsys, checkpoint, "--prompt", TEXT[:split], "--save-state", state)
    assert (read["new_tokens"], read["prompt_tokens"], read["state"]) == (0, split, str(state))
    # Twice from one file: asking changes nothing.
    for _ in range(2):
        rest = answer(capsys, checkpoint, "--prompt", TEXT[split:], "--load-state", state, *options)
        assert rest["text"] == whole["text"]
        assert rest["tokens_before"] == split


def test_beams_agree_with_generate_on_the_whole_prompt(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = longrecall.load(checkpoint), byte_tokenizer()
    ids = torch.tensor([tokenizer.encode(TEXT)])
    wanted = model.generate(ids, num_beams=3, do_sample=False, max_new_tokens=10, eos_token_id=256, pad_token_id=257)
    text = tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer(capsys, checkpoint, "--prompt", TEXT, "--beams", 3, "--max-new-tokens", 10)["text"] == text


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(segment=st.integers(1, 70), length=st.integers(0, 60))
def test_segments_do_not_show_in_the_state(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, segment: int, length: int
) -> None:
    model = longrecall.load(checkpoint)
    tokens = byte_tokenizer().encode(TEXT)[:length]
    whole = generate.read(model, tokens, None, progress=False)
    monkeypatch.setattr(generate, "SEGMENT", segment)
    parts = generate.read(model, tokens, None, progress=False)
    assert int(parts.position[0]) == len(tokens)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            # float32 sums in another order; the values are of size 1 to 100.
            torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-4)


def test_sampling_follows_its_seed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (checkpoint, "--prompt", TEXT, "--temperature", 1.5, "--top-p", 0.95, "--max-new-tokens", 16)
    texts = [answer(capsys, *options, "--seed", seed)["text"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_sampling_leaves_the_global_generator_alone(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.random.get_rng_state()
    answer(capsys, checkpoint, "--prompt", "a", "--temperature", 1, "--max-new-tokens", 2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_prompt_from_a_file_or_standard_input(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("naïve €", encoding="utf-8")
    wanted = answer(capsys, checkpoint, "--prompt", "naïve €", "--max-new-tokens", 4)
    assert answer(capsys, checkpoint, "--prompt-file", file, "--max-new-tokens", 4) == wanted
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert answer(capsys, checkpoint, "--prompt-file", "-", "--max-new-tokens", 4) == wanted


def test_plain_output_is_the_text_alone(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, checkpoint, "--prompt", TEXT, "--max-new-tokens", 6)["text"]
    state = tmp_path / "s.safetensors"
    words = ["generate", str(checkpoint), "--prompt", TEXT, "--max-new-tokens", "6", "--save-state", str(state)]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert str(state) in captured.err and state.is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "a", "--temperature", "0"], "--temperature"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p"),
        (["--prompt", "a", "--beams", "0"], "--beams"),
        (["--prompt", "a", "--seed", "-1"], "--seed"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "--max-new-tokens"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--save-state"),
        (["--prompt", "a", "--load-state", "missing.safetensors"], "missing.safetensors"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--prompt", "a", "--dtype", "float33"], "float33"),
        ([], "--prompt"),
    ],
)
def test_bad_input(checkpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["generate", str(checkpoint), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("options", [[], ["--temperature", "1"], ["--beams", "2"], ["--save-state", "kept"]])
def test_a_model_whose_logits_are_nan_writes_nothing(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = longrecall.load(checkpoint)
    with torch.no_grad():
        model.state_dict()["model.norm.weight"][0] = float("nan")
    save(model, "broken", byte_tokenizer())
    assert main(["generate", "broken", "--prompt", TEXT, *options]) == 2
    told = capsys.readouterr()
    assert "logits are NaN or infinite" in told.err and told.err.count("\n") == 1 and told.out == ""
    assert not Path("kept").exists()


def test_logits_that_overflow_while_sampling(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def overflow(*_: object, **__: object) -> None:
        # What torch.multinomial says on a CPU.
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    monkeypatch.setattr(longrecall.RecurrentLM, "generate", overflow)
    assert main(["generate", str(checkpoint), "--prompt", TEXT, "--temperature", "1"]) == 2
    assert "became NaN or infinite while sampling" in capsys.readouterr().err


def test_a_kept_state_is_as_readable_as_any_other_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x")
    assert main(["generate", str(checkpoint), "--prompt", TEXT, "--save-state", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "kept").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_prompt_that_is_not_utf8(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("naïve".encode("latin-1"))
    assert main(["generate", str(checkpoint), "--prompt-file", str(file)]) == 2
    assert "not UTF-8 (byte 2)" in capsys.readouterr().err


def test_a_state_of_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.safetensors"
    answer(capsys, checkpoint, "--prompt", "abc", "--save-state", state)
    other = longrecall.load(checkpoint)
    with torch.no_grad():
        other.lm_head.weight += 1
    other.save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    assert main(["generate", str(tmp_path / "other"), "--prompt", "d", "--load-state", str(state)]) == 2
    assert "state.safetensors" in capsys.readouterr().err


def test_a_state_that_cannot_be_written(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "state.safetensors"
    assert main(["generate", str(checkpoint), "--prompt", "a", "--save-state", str(place)]) == 2
    assert "state.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(("backend", "why"), [("flash_qa", 'Did you mean "flash_qla"?'), ("fla", "not installed")])
def test_a_backend_of_the_environment_that_cannot_serve(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: str, why: str
) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", backend)
    assert main(["generate", str(checkpoint), "--prompt", TEXT]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert why in said and "LONGRECALL_BACKEND names it; without it" in said


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_state_does_not_take_the_place_of_the_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Both are safetensors; not even a file of its own goes into the folder, which may be published as it is."""
    own = shutil.copytree(checkpoint, tmp_path / "own")
    before = (own / name).read_bytes()
    assert main(["generate", str(own), "--prompt", "a", "--save-state", str(own / name)]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert (own / name).read_bytes() == before
    assert main(["generate", str(own), "--prompt", "a", "--save-state", str(own / "state.safetensors")]) == 2
    assert "lies inside the checkpoint folder" in capsys.readouterr().err
    assert not (own / "state.safetensors").exists()
