"""Forward and backward passes of training steps as CUDA graphs: launched at once instead of kernel by kernel.

A step of a model of some hundred million parameters has thousands of launches, and FSDP's and DDP's own work for every
layer on top. A process that prepares them one by one may take longer than the GPU that executes them. Micro-batches of
a run have one shape, so a pass is recorded once and replayed: the same kernels with the same arguments, collectives of
FSDP and DDP among them. Only what is in the recording's inputs changes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from longrecall.errors import first_line, first_process
from longrecall.layers.experts import Experts
from longrecall.layers.mixers.mom import MoM
from longrecall.layers.recording import record, recording_stream
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states import InitialState
from longrecall.training.job import Job
from longrecall.training.parallel.shard import local
from longrecall.training.recipe_states import LearnedRecipe, ZeroState

WARMUPS = 3
"""Eager passes of a kind before it is recorded: kernels are compiled and libraries choose theirs in them."""

WARMUPS_OF_DDP = 11
"""With DDP, which lays its buckets anew after the first backward pass and times others: torch asks for so many."""

MOST_KINDS = 4
"""Recordings at a time: with and without a state, the first micro-batch of a step and the others."""

SHARE_OF_MEMORY = 0.8
"""Of a GPU that eager passes may take at most: a recording keeps its memory between passes."""

Inputs = dict[str, Tensor]
Recorder = Callable[[Callable[[], None], Any, Any], tuple[Callable[[], None], Any]]
"""Takes work without arguments, a stream and a pool of memory; returns what repeats the work, and the pool."""


@dataclass(frozen=True)
class Passed:
    """What a forward and backward pass has found, without gradients of its own.

    Attributes:
        mean: float32 ``[]``: the loss over the labels of the micro-batch.
        counted: float32 ``[]``: the share of the loss of the step that they are.
        parts: name -> float32 ``[]``: what the mean has beside the loss of the labels.
    """

    mean: Tensor
    counted: Tensor
    parts: dict[str, Tensor]


Work = Callable[[Inputs, InitialState], Passed]
"""Reads a micro-batch from the state that is given, and adds to the gradients of the parameters."""


class _Given:
    """An initial state that is known already; keeps the final one."""

    by_row: ClassVar[bool] = True
    continues: ClassVar[bool] = False

    def __init__(self, before: RecurrentState | None) -> None:
        self._before = before
        self.final: RecurrentState | None = None

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        return self._before

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        self.final = final.detach()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        pass


@dataclass
class _Recording:
    """A recorded pass: the buffers that it reads, what it finds, and the gradients that it adds to and leaves."""

    replay: Callable[[], None]
    inputs: Inputs
    passed: Passed
    final: RecurrentState
    added: list[tuple[nn.Parameter, Tensor]]
    gradients: list[tuple[nn.Parameter, Tensor]]

    def repeat(self, inputs: Inputs) -> None:
        """Read these inputs, and add to the gradients that are there."""
        for name, buffer in self.inputs.items():
            buffer.copy_(inputs[name], non_blocking=True)
        # A pass of another kind, or one that was not recorded, has left its gradients elsewhere.
        moved = [(own, cast(Tensor, p.grad)) for p, own in self.added if p.grad is not own]
        if moved:
            torch._foreach_copy_([local(own) for own, _ in moved], [local(there) for _, there in moved])
        self.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


NO_GPU = "there is no GPU"
SWITCHED_OFF = "run.cuda_graphs is false"


def why_eager(job: Job, device: torch.device) -> str | None:
    """Why the passes of a run are not recorded, in words; None = they are."""
    recipe, run, place = job.recipe, job.recipe.run, job.processes
    if device.type != "cuda":
        return NO_GPU
    if not run.cuda_graphs:
        return SWITCHED_OFF
    if run.precision == "fp16":
        return "the scale of the loss of fp16 is changed by the host"
    if run.compile:
        return "run.compile makes code for shapes as they come"
    if recipe.data.reset_documents or recipe.continues:
        return "documents that are kept apart have other lengths in every batch"
    if isinstance(recipe.initial_state, LearnedRecipe):
        return "the initial state is trained"
    if not isinstance(recipe.initial_state, ZeroState) and _has_memory_tokens(job.model):
        return "initial states are made of memory tokens, which are trained"
    if job.leash is not None:
        return "a leash holds other tokens in every batch"
    if place.context is not None:
        return "pieces of a row are handed from rank to rank"
    if place.sharded and place.replicate > 1 and run.gradient_accumulation > 1:
        return "torch's FSDP has the sums of a step's gradients in memory of its own until copies of weights agree"
    if any(isinstance(module, (Experts, MoM)) for module in job.model.modules()):
        return "the host reads back how many tokens each expert has"
    return None


def _has_memory_tokens(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "memory_tokens" for name, _ in model.named_parameters())


def _recorded(work: Callable[[], None], stream: Any, pool: Any) -> tuple[Callable[[], None], Any]:
    graph = record(work, 0, stream, pool=pool)
    return graph.replay, graph.pool()


class CapturedPasses:
    """Runs passes on a stream of its own: eagerly at first, then by replaying their recording.

    Args:
        parameters: whose gradients the passes add to. They must not be replaced.
        stream: of all passes; None = every pass is eager, on the current stream.
        warmups: eager passes of a kind before it is recorded.
        alone: whether no other process takes part. A recording that fails is then given up with a warning; where
            others take part in its collectives it is an error.
        agree: whether something holds in all processes; all of them ask. They record the same passes or none: a
            collective of a graph meets those of the same graph in the others.
        recorder: to be replaced in tests.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        stream: Any,
        warmups: int = WARMUPS,
        alone: bool = True,
        recorder: Recorder = _recorded,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._parameters = list(parameters)
        self._stream = stream
        self._warmups, self._alone, self._recorder, self._agree = warmups, alone, recorder, agree
        self.given_up: str | None = None
        """Why passes that were to be recorded are not, in words."""
        self._begun: Counter[Hashable] = Counter()
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._pool: Any = None

    @classmethod
    def of(cls, job: Job, device: torch.device, eager: bool) -> CapturedPasses:
        """The passes of a run on `device`."""
        place = job.processes
        ddp = place.world > 1 and not place.sharded
        stream = None if eager else recording_stream(device)
        return cls(
            job.model.parameters(),
            stream,
            WARMUPS_OF_DDP if ddp else WARMUPS,
            place.world == 1,
            agree=lambda own: all(place.gather(own)),
        )

    def run(self, work: Work, tensors: Inputs, initial: InitialState, text: Tensor, last: bool) -> Passed:
        """Return what `work` finds, after which the gradients are what it has made them.

        Args:
            work: does the same whatever the values of its tensors are, and does not wait for the GPU.
            tensors: of the micro-batch, on the GPU.
            initial: chooses the state to start from, and sees the final one: of a replayed pass, lent to it.
            text: bool ``[B]``: the rows of running text.
            last: it is the last micro-batch of a step, after which gradients are those of all processes.
        """
        before = initial.before_batch(text)
        with self.on_stream():
            passed, final, replayed = self._run(work, tensors, before, last)
        # What a recording finds lies in its memory, which the next replay overwrites.
        initial.after_batch(final, lent=replayed)
        parts = {name: part.clone() for name, part in passed.parts.items()}
        return Passed(passed.mean.clone(), passed.counted.clone(), parts)

    def _run(
        self, work: Work, tensors: Inputs, before: RecurrentState | None, last: bool
    ) -> tuple[Passed, RecurrentState, bool]:
        """What the pass has found, its final state, and whether both lie in the memory of a recording."""
        inputs = tensors | _tensors_of(before)

        def whole(given: Inputs) -> tuple[Passed, RecurrentState]:
            state = _Given(None if before is None else _with_tensors(before, given))
            passed = work({name: given[name] for name in tensors}, state)
            assert state.final is not None
            return passed, state.final

        # A first micro-batch writes gradients, later ones add to them.
        adds = tuple(p.grad is not None for p in self._parameters)
        look = tuple((name, tuple(x.shape), x.dtype) for name, x in inputs.items())
        key = (last, None if before is None else before.length, look, adds)
        found = self._recordings.get(key)
        if found is None and self._may_record(key, adds, inputs):
            found = self._record(whole, inputs, key)
        if found is None:
            return *whole(inputs), False
        found.repeat(inputs)
        return found.passed, found.final, True

    def _may_record(self, key: Hashable, adds: tuple[bool, ...], inputs: Inputs) -> bool:
        if self.given_up is not None or self._stream is None or any(x.requires_grad for x in inputs.values()):
            return False
        self._begun[key] += 1
        if self._begun[key] <= self._warmups or len(self._recordings) >= MOST_KINDS:
            return False
        if any(adds) and not any(self._are_of(first) for first in self._recordings.values()):
            return False
        # What eager passes have taken at most only rises.
        if not self._agree(_leaves_room(self._stream)):
            self._give_up(f"a pass takes more than {SHARE_OF_MEMORY:.0%} of a GPU's memory")
        return self.given_up is None

    def _give_up(self, reason: str) -> None:
        """Launch all further passes one by one, and say so."""
        self.given_up = reason
        if first_process():
            warnings.warn(f"training steps run without a CUDA graph: {reason}", stacklevel=3)

    def _are_of(self, recording: _Recording) -> bool:
        """Whether the gradients that are there are those that this recording leaves: they stay where they are."""
        kept = {id(parameter): gradient for parameter, gradient in recording.gradients}
        return all(p.grad is kept.get(id(p)) for p in self._parameters if p.grad is not None)

    def _record(
        self, work: Callable[[Inputs], tuple[Passed, RecurrentState]], inputs: Inputs, key: tuple[Any, ...]
    ) -> _Recording | None:
        before = [p.grad for p in self._parameters]
        buffers = {name: x.clone() for name, x in inputs.items()}
        found: list[tuple[Passed, RecurrentState]] = []

        def recorded() -> None:
            found[:] = [work(buffers)]

        try:
            replay, self._pool = self._recorder(recorded, self._stream, self._pool)
        except RuntimeError as error:
            if not self._alone:
                raise RuntimeError(
                    f"a training step could not be recorded as a CUDA graph ({first_line(error)}); "
                    "set run.cuda_graphs=false"
                ) from error
            # The passes go on eagerly, which takes the memory that recordings keep.
            self.release()
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            self._give_up(f"recording one failed ({first_line(error)})")
            return None
        added = [(p, gradient) for p, gradient in zip(self._parameters, before, strict=True) if gradient is not None]
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._recordings[key] = _Recording(replay, buffers, *found[0], added, gradients)
        return self._recordings[key]

    def release(self) -> None:
        """Give back the memory of all recordings, which are made anew when passes go on; gradients keep theirs."""
        self._recordings.clear()
        self._pool = None

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Enqueue the block's work on the stream of all passes, in order with the current one's before and after it."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def _tensors_of(state: RecurrentState | None) -> Inputs:
    """The tensors of a state, by names that no input of a model has."""
    if state is None:
        return {}
    found = {f"state.{i}.{name}": x for i, layer in enumerate(state.layers) for name, x in layer.items()}
    found["state.position"] = state.position
    return found if state.context is None else found | {"state.context": state.context}


def _with_tensors(state: RecurrentState, tensors: Mapping[str, Tensor]) -> RecurrentState:
    """The state with the tensors of `_tensors_of` in the place of its own."""
    layers = tuple({name: tensors[f"state.{i}.{name}"] for name in layer} for i, layer in enumerate(state.layers))
    return replace(state, layers=layers, position=tensors["state.position"], context=tensors.get("state.context"))


def _leaves_room(stream: Any) -> bool:
    """Whether the eager passes have left enough of the GPU's memory for what runs between recorded ones."""
    if not isinstance(stream, torch.cuda.Stream):
        return True
    total = torch.cuda.get_device_properties(stream.device).total_memory
    return torch.cuda.max_memory_allocated(stream.device) <= SHARE_OF_MEMORY * total
