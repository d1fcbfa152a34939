"""Everything a training loop works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longrecall.layers.handover import Handover
from longrecall.models.checkpoint import Checkpoint
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints import ProcessState, SavedRun
from longrecall.training.checkpoints.saved_run import CARRIED
from longrecall.training.data import BatchStream
from longrecall.training.evaluation import TrainingEvaluation
from longrecall.training.initial_states import InitialState
from longrecall.training.leash import Leash
from longrecall.training.logs import RunLog
from longrecall.training.optimizer import ParameterGroup
from longrecall.training.parallel.place import Place
from longrecall.training.recipe import Recipe
from longrecall.training.schedule import handover_progress
from longrecall.training.watch import FiniteWatch


@dataclass
class Job:
    """Everything a training loop works with."""

    recipe: Recipe
    steps: int
    output: Path
    model: RecurrentLM
    source: Checkpoint
    """What the run started from: its surgery records and tokenizer files travel on."""
    tokenizer: Any
    stream: BatchStream
    initial: InitialState
    groups: tuple[ParameterGroup, ...]
    log: RunLog
    processes: Place
    saved: SavedRun | None = None
    """Where to continue."""
    evaluation: TrainingEvaluation | None = None
    leash: Leash | None = None
    show_progress: bool = True
    watch: FiniteWatch = field(default_factory=FiniteWatch)

    def __post_init__(self) -> None:
        self.handovers = [module for module in self.model.modules() if isinstance(module, Handover)]
        if self.saved is not None:
            self.watch.last_good = str(self.saved.folder)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of all processes."""
        return self.recipe.tokens_per_step(self.processes.data_world)

    def restore_initial(self, own: ProcessState) -> None:
        """Put the intervention back to where this process had saved it."""
        carried = {name.removeprefix(CARRIED): t for name, t in own.tensors.items() if name.startswith(CARRIED)}
        self.initial.load_state_dict(carried)

    def set_handover(self, step: int) -> float:
        """Set the handover layers to where they stand in 0-based `step`; return their progress."""
        progress = handover_progress(step, self.steps, self.recipe.handover)
        for layer in self.handovers:
            layer.progress.fill_(progress)
        return progress
