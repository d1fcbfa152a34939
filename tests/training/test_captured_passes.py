"""Passes of training steps that are recorded as CUDA graphs: the same numbers, and when they are not recorded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longrecall.layers.experts import Experts
from longrecall.layers.mixers.mom import MoM
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training import captured_passes
from longrecall.training.parallel.place import Place
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from tests.conftest import MIXERS

ZERO = "initial_state={kind: zero}"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all steps and the final weights."""
    run_recipe(recipe, force=True, show_progress=False)
    output = Path(recipe.run.output)
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    final = open_checkpoint(output / "final")
    return [line["loss"] for line in lines if "loss" in line], {name: final.read(name) for name in final.names()}


def both_ways(make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Assert that recorded steps change nothing; return how many recordings were made."""
    made: list[Any] = []
    recorded = captured_passes._recorded

    def counted(*arguments: Any) -> Any:
        made.append(None)
        return recorded(*arguments)

    monkeypatch.setattr(captured_passes.CapturedPasses.__init__, "__defaults__", (3, True, counted, bool))
    expected = run(make_recipe("run.steps=10", "run.cuda_graphs=false", *overrides))
    assert not made
    found = run(make_recipe("run.steps=10", *overrides))
    # The same kernels with the same arguments, none of which adds up in an order of chance.
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], x) for name, x in expected[1].items())
    return len(made)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("overrides", "recordings"),
    [
        # State passing: the first batch, without a state, comes once; with one, the first and the last micro-batch of
        # a step differ.
        ((), 2),
        ((ZERO, "run.gradient_accumulation=1"), 1),
        ((ZERO, "run.gradient_accumulation=3", "run.precision=bf16"), 3),
        (("initial_state={kind: noise, std: 0.1}", "run.gradient_checkpointing=true"), 2),
        # Batches with and without a state take turns within a step: as many kinds as are recorded at a time.
        (("initial_state={kind: state_passing, probability: 0.3}", "run.gradient_accumulation=3", "run.steps=24"), 4),
        # Evaluation takes the recordings' memory, and they are made anew.
        (
            (
                ZERO,
                "run.gradient_accumulation=1",
                "evaluation={every: 6, held_out: {tokens: 96, sources: [{kind: phonebook, pairs: [2, 2]}]}}",
            ),
            2,
        ),
        (("data.reset_documents=true",), 0),
        (("initial_state={kind: learned}",), 0),
        (("run.precision=fp16",), 0),
    ],
    ids=str,
)
def test_recorded_steps_are_the_same(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], recordings: int
) -> None:
    assert both_ways(make_recipe, monkeypatch, *overrides) == recordings


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", list(MIXERS))
def test_every_mixer_is_recorded(
    name: str, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[name], "mlp_size": 24}] * 2
    model = RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=32, layers=layers))
    save(model, tmp_path / "one", byte_tokenizer())
    options = (f"model.checkpoint={tmp_path / 'one'}", "run.gradient_accumulation=1", "optimizer.touched=1x")
    host = any(isinstance(module, (Experts, MoM)) for module in model.modules())
    assert both_ways(make_recipe, monkeypatch, *options) == (0 if host else 1)


class Tape(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: the operations of a work, repeated on the memory that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def tape_of(work: Callable[[], None], parameters: list[torch.nn.Parameter]) -> Tape:
    """The tape of a work that adds to gradients; as in a capture, nothing has been executed."""
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    with Tape() as tape:
        work()
    for parameter, old in zip(parameters, before, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(torch.full_like(parameter, torch.nan).detach() if old is None else old)
    return tape


class Toy:
    """A model of three parameters, one of them never used, and passes of it that are recorded with `Tape`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(3, generator=drawn)) for _ in range(3)]
        self.made = 0
        monkeypatch.setattr(captured_passes.CapturedPasses, "on_stream", lambda self: contextlib.nullcontext())
        options = {"warmups": 1, "recorder": self.record} | options
        self.passes = captured_passes.CapturedPasses(self.parameters, "a stream", **options)

    def record(self, work: Callable[[], None], stream: Any, pool: Any) -> tuple[Callable[[], None], Any]:
        self.made += 1
        return tape_of(work, self.parameters).replay, pool

    def work(self, tensors: dict[str, torch.Tensor], initial: Any) -> captured_passes.Passed:
        before = initial.before_batch(torch.ones(1, dtype=torch.bool))
        x, (used, of_states, _) = tensors["x"], self.parameters
        state = torch.zeros(1, 3) if before is None else before.layers[0]["recurrent"] * of_states
        state = (state + x * used).tanh()
        loss = state.square().sum()
        loss.backward()
        initial.after_batch(RecurrentState(({"recurrent": state},), torch.ones(1, dtype=torch.long)))
        return captured_passes.Passed(loss.detach(), x.sum(), {"part": (2 * loss).detach()})


class Given:
    """An initial state that is there or not, as a test says; it keeps the final one."""

    by_row, continues = True, False

    def __init__(self, state: torch.Tensor | None) -> None:
        self.state, self.final, self.lent = state, torch.empty(0), False

    def before_batch(self, text: torch.Tensor, row: torch.Tensor | None = None) -> RecurrentState | None:
        if self.state is None:
            return None
        return RecurrentState(({"recurrent": self.state},), torch.zeros(1, dtype=torch.long))

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        state, self.lent = final.layers[0]["recurrent"], lent
        self.final = state.clone() if lent else state


def step_of(toy: Toy, passes: list[tuple[torch.Tensor, torch.Tensor | None]], eager: bool) -> list[torch.Tensor | None]:
    """All that a step finds: of every pass its numbers and its final state, then the gradients, clipped in place."""
    found: list[torch.Tensor | None] = []
    text = torch.ones(1, dtype=torch.bool)
    for index, (x, state) in enumerate(passes):
        initial: Any = Given(state)
        if eager:
            done = toy.work({"x": x}, initial)
        else:
            done = toy.passes.run(toy.work, {"x": x}, initial, text, index == len(passes) - 1)
        found += [done.mean, done.counted, done.parts["part"], initial.final.detach()]
    with torch.no_grad():
        for parameter in toy.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
            found.append(parameter.grad)
            parameter.grad = None
    return [None if x is None else x.clone() for x in found]


def steps(count: int) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Steps of three passes each, every pass with a state or without as it comes."""
    drawn = torch.Generator().manual_seed(1)

    def one() -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.randn(1, 3, generator=drawn)
        return torch.randn(1, 3, generator=drawn), state if torch.rand((), generator=drawn) < 0.5 else None

    return [[one() for _ in range(3)] for _ in range(count)]


def same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    # The same operations on the same numbers.
    both = zip(found, expected, strict=True)
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in both)


def test_passes_with_and_without_a_state_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of one kind of pass are added to by another, recorded or not, and by recordings made anew."""
    monkeypatch.setattr(captured_passes, "MOST_KINDS", 7)
    toy, plain = Toy(monkeypatch), Toy(monkeypatch)
    for number, passes in enumerate(steps(40)):
        if number == 25:
            assert toy.made == 7
            toy.passes.release()
        assert same(step_of(toy, passes, False), step_of(plain, passes, True)), number
    assert toy.made > 7 and toy.parameters[2].grad is None


def test_only_what_a_recording_finds_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched passes leave states that are kept as they are; the memory of replayed ones is overwritten."""
    toy, text = Toy(monkeypatch, warmups=2), torch.ones(1, dtype=torch.bool)
    lent = []
    for _ in range(4):
        initial: Any = Given(None)
        toy.passes.run(toy.work, {"x": torch.ones(1, 3)}, initial, text, True)
        lent.append(initial.lent)
        for parameter in toy.parameters:
            parameter.grad = None
    assert lent == [False, False, True, True] and toy.made == 1


def test_a_recording_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is given up with one warning, and the memory of others with it; with other processes it is an error."""
    toy, plain = Toy(monkeypatch), Toy(monkeypatch)
    recordings = toy.passes._recordings

    def fails(work: Callable[[], None], stream: Any, pool: Any) -> Any:
        if recordings:
            toy.record(work, stream, pool)
            toy.made -= 1
            raise RuntimeError("not permitted\nwhile capturing")
        return toy.record(work, stream, pool)

    toy.passes._recorder = fails
    every = [[(x, None) for x, _ in passes] for passes in steps(6)]
    with pytest.warns(UserWarning, match=r"without a CUDA graph: recording one failed \(not permitted\)$") as said:
        for passes in every:
            assert same(step_of(toy, passes, False), step_of(plain, passes, True))
    assert len(said) == 1 and toy.made == 1 and not recordings
    assert toy.passes.given_up == "recording one failed (not permitted)"

    toy = Toy(monkeypatch, alone=False)
    toy.passes._recorder, recordings = fails, {None: None}  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match=r"not permitted.*set run\.cuda_graphs=false"):
        for passes in every:
            step_of(toy, passes, False)


def test_processes_record_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of a graph meet those of the same graph: where one has no room, nobody records, and asks once."""
    asked: list[bool] = []
    toy = Toy(monkeypatch, agree=lambda own: bool(asked.append(own)))
    with pytest.warns(UserWarning, match="without a CUDA graph: a pass takes more than 80% of a GPU's memory"):
        for passes in steps(6):
            step_of(toy, passes, False)
    assert asked == [True] and not toy.made
    assert str(toy.passes.given_up).startswith("a pass takes more than 80%")


def test_sums_that_fsdp_keeps_are_not_recorded(make_recipe: Callable[..., Recipe]) -> None:
    """Copies of sharded weights: until a step's last micro-batch torch has the sums, in memory of its own."""

    def why(*overrides: str, replicate: int = 2) -> str | None:
        place = Place(world=4, replicate=replicate, shard=4 // replicate, weights_mesh=object())  # type: ignore[arg-type]
        recipe = make_recipe(*overrides)
        job: Any = SimpleNamespace(recipe=recipe, leash=None, processes=place, model=torch.nn.Linear(1, 1))
        return captured_passes.why_eager(job, torch.device("cuda"))

    assert "FSDP" in str(why())
    assert why("run.gradient_accumulation=1") is None
    assert why(replicate=1) is None


KINDS = {
    "data.reset_documents=true": "documents that are kept apart",
    "initial_state={kind: truncated_bptt}": "documents that are kept apart",
    "initial_state={kind: learned}": "the initial state is trained",
    "run.precision=fp16": "fp16",
    "run.compile=true": "run.compile",
    "run.cuda_graphs=false": captured_passes.SWITCHED_OFF,
}


@pytest.mark.parametrize("override", KINDS)
def test_what_is_launched_one_by_one_says_why(make_recipe: Callable[..., Recipe], override: str) -> None:
    job = SimpleNamespace(recipe=make_recipe(override), leash=None, processes=Place(), model=torch.nn.Linear(1, 1))
    assert KINDS[override] in str(captured_passes.why_eager(job, torch.device("cuda")))  # type: ignore[arg-type]
    assert captured_passes.why_eager(job, torch.device("cpu")) == captured_passes.NO_GPU  # type: ignore[arg-type]


def test_memory_tokens_are_recorded_without_other_initial_states(make_recipe: Callable[..., Recipe]) -> None:
    model = RecurrentLM(RecurrentConfig(8, 32, [{"mixer": MIXERS["gla"]}], memory_tokens=2))
    for override, reason in ((ZERO, None), ("initial_state={kind: noise, std: 0.1}", "memory tokens")):
        job = SimpleNamespace(recipe=make_recipe(override), leash=None, processes=Place(), model=model)
        found = captured_passes.why_eager(job, torch.device("cuda"))  # type: ignore[arg-type]
        assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("reason", "line", "kept"),
    [
        ("pieces are handed on", "steps are launched one by one: pieces are handed on\n", "pieces are handed on"),
        (captured_passes.SWITCHED_OFF, "", captured_passes.SWITCHED_OFF),
        (captured_passes.NO_GPU, "", None),
    ],
)
def test_a_run_says_why_its_steps_are_launched_one_by_one(
    make_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    line: str,
    kept: str | None,
) -> None:
    """In one line at the start, unless the recipe has asked for it, and in training.json."""
    monkeypatch.setattr("longrecall.training.trainer.why_eager", lambda job, device: reason)
    recipe = make_recipe("run.steps=2", ZERO)
    summary = run_recipe(recipe)
    said = capsys.readouterr().err
    assert said.startswith(line) and ("one by one" in said) == bool(line)
    written = json.loads((Path(recipe.run.output) / "training.json").read_text())
    assert written["summary"]["why_eager"] == summary.why_eager == kept
    assert (f"recorded steps   none: {kept}" in summary.table()) == (kept is not None)


def test_a_whole_run_without_a_gpu(
    make_recipe: Callable[..., Recipe], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own passes, repeated on the memory that they had: clipping, states and logs stay the same."""
    options = (
        *("run.steps=8", "run.gradient_accumulation=3", "initial_state={kind: state_passing, probability: 0.3}"),
        # A row of text has labels everywhere: nothing has a length that the host would have to read back.
        f"data.sources=[{{kind: text, path: {text}}}]",
    )
    expected = run(make_recipe(*options))
    made: list[Any] = []

    def taped(job: Any, device: torch.device, eager: bool) -> captured_passes.CapturedPasses:
        parameters = list(job.model.parameters())

        def record(work: Callable[[], None], stream: Any, pool: Any) -> tuple[Callable[[], None], Any]:
            made.append(None)
            return tape_of(work, parameters).replay, pool

        return captured_passes.CapturedPasses(parameters, "a stream", 1, recorder=record)

    monkeypatch.setattr("longrecall.training.trainer.why_eager", lambda job, device: None)
    monkeypatch.setattr(captured_passes.CapturedPasses, "of", taped)
    monkeypatch.setattr(captured_passes.CapturedPasses, "on_stream", lambda self: contextlib.nullcontext())
    found = run(make_recipe(*options))
    assert len(made) == 4
    # The same operations on the same numbers.
    assert found[0] == expected[0] and all(torch.equal(found[1][name], x) for name, x in expected[1].items())
