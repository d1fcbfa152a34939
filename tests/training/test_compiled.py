"""run.compile and eval --compile: the same losses and answers, exact resume, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation.checkpoint import evaluate_checkpoint
from longrecall.models import compiling
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.compiling import check_compiler, compiled_layers
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.recipe import Recipe
from tests.training.conftest import GLA, MAMBA
from tests.training.runs import Killed, equal, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace, and run what was traced: no C++ compiler is needed, and it takes seconds less."""
    torch.compiler.reset()
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    yield
    torch.compiler.reset()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each piece of code that the tracer hands over to be compiled."""
    found: list[str] = []

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        found.append(str(graph.graph))
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", counting)
    return found


@pytest.fixture
def make_short(make_recipe: MakeRecipe, make_model: Callable[..., RecurrentLM], tmp_path: Path) -> MakeRecipe:
    """As `make_recipe`: three steps of one GLA layer, because tracing takes a second or more for each layer."""
    save(make_model(GLA), tmp_path / "one", byte_tokenizer())
    return lambda *options: make_recipe(f"model.checkpoint={tmp_path / 'one'}", "run.steps=3", *options)


def same_losses(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    # The same operations; the traced backward adds float32 gradients in another order, over the steps of AdamW.
    return all(x["loss"] == pytest.approx(y["loss"], rel=1e-4) for x, y in zip(a, b, strict=True))


# Traced forwards of a whole run, with checkpointing too, are those of the next test; traced backwards of every
# recurrence are compared, gradient for gradient, in tests/models/test_compile.py.
@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "checkpointing"), [(GLA, "true"), (MAMBA, "false")], ids=["checkpointing", "plain"])
def test_a_compiled_run_trains_the_same(
    make_recipe: MakeRecipe,
    make_model: Callable[..., RecurrentLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mixer: dict[str, Any],
    checkpointing: str,
) -> None:
    """With state passing (a first batch without a state, the others with one) and gradient accumulation."""
    # The one of the two that traces the backward too, as the real compiler does.
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    save(make_model(mixer), tmp_path / "one", byte_tokenizer())
    options = (
        f"model.checkpoint={tmp_path / 'one'}", "run.steps=2", f"run.gradient_checkpointing={checkpointing}",
        "data.context_length=24", "data.sources.1.pairs=[1, 1]",
    )  # fmt: skip
    plain = train(make_recipe(*options, f"run.output={tmp_path / 'plain'}"))
    assert len(plain) == 2 and same_losses(plain, train(make_recipe(*options, "run.compile=true")))
    assert weights(tmp_path / "plain" / "final").keys() == weights(tmp_path / "out" / "final").keys()


@pytest.mark.long
def test_a_compiled_run_resumes_exactly_and_goes_on_without_the_compiler(
    make_short: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    options = ("run.compile=true", "run.save_every=1", "run.gradient_checkpointing=true")
    whole = train(make_short(*options, f"run.output={tmp_path / 'whole'}"))
    # Once for each way to call a layer: without and with a state, in a piece or two; nothing new after two batches.
    assert 2 <= len(compilations) <= 4
    with monkeypatch.context() as patch:
        kill_after(patch, 3)
        with pytest.raises(Killed):
            train(make_short(*options))
    shutil.copytree(tmp_path / "out", tmp_path / "plain")
    assert train(make_short(*options), resume=True) == whole
    assert equal(weights(tmp_path / "whole" / "final"), weights(tmp_path / "out" / "final"))
    made = len(compilations)
    changed = (f"run.output={tmp_path / 'plain'}", "run.compile=false")
    assert same_losses(train(make_short(*options, *changed), resume=True), whole)
    assert len(compilations) == made


@pytest.mark.parametrize(
    "apart", ["data.reset_documents=true", "initial_state={kind: truncated_bptt}"], ids=["reset", "tbptt"]
)
def test_batches_of_changing_shape_are_refused(make_recipe: MakeRecipe, apart: str) -> None:
    with pytest.raises(UserError, match=r"run\.compile needs batches of one shape"):
        make_recipe("run.compile=true", apart)


@torch.no_grad()
def test_more_shapes_than_the_tracers_own_limit_and_the_model_is_as_before_after_the_block(
    make_model: Callable[..., RecurrentLM], compilations: list[str]
) -> None:
    model = make_model(GLA)
    with torch._dynamo.config.patch(recompile_limit=1):
        with pytest.raises(ZeroDivisionError), compiled_layers(model):
            for length in (5, 6):
                before = len(compilations)
                model(torch.zeros(1, length, dtype=torch.long))
                assert len(compilations) > before, length
            raise ZeroDivisionError
        seen = len(compilations)
        model(torch.zeros(1, 7, dtype=torch.long))
        assert len(compilations) == seen and torch._dynamo.config.recompile_limit == 1


def test_evaluation_gives_the_same_answers(base: Path, tmp_path: Path, compilations: list[str]) -> None:
    def entries(**options: Any) -> list[dict[str, Any]]:
        result = evaluate_checkpoint(base, ["passkey"], [128], 4, device="cpu", progress=False, **options)
        return [{key: row[key] for key in ("cell", "metric", "value", "count")} for row in result["results"]]

    plain = entries()
    assert not compilations
    assert entries(compile_layers=True) == plain
    assert compilations


def test_without_a_compiler_the_error_says_what_to_do(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    monkeypatch.setenv("CXX", "no-such-compiler")
    command = ["eval", str(base), "--tasks", "passkey", "--lengths", "128", "--samples", "4", "--device", "cpu"]
    assert main([*command, "--compile"]) == 2
    error = capsys.readouterr().err.strip()
    assert 'needs a C++ compiler on a CPU, and "no-such-compiler" is not found' in error and "\n" not in error
    with pytest.raises(UserError, match="CXX"):
        check_compiler(torch.device("cpu"))


def test_a_growing_search_is_not_compiled(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(base), "--tasks", "passkey", "--search", "1k", "--compile"]) == 2
    assert "--compile makes new code for every length" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_compiler_trains_the_same(
    make_short: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    try:
        check_compiler(torch.device("cpu"))
    except UserError as error:
        pytest.skip(str(error))
    plain = train(make_short(f"run.output={tmp_path / 'plain'}"))
    assert same_losses(plain, train(make_short("run.compile=true")))
