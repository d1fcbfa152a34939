"""What several processes must compute, in one: a stream and an intervention for each of them, one gradient over all."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import longrecall
from longrecall.layers.handover import Handover
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint
from longrecall.training.data import BatchStream
from longrecall.training.initial_states import make_initial_state
from longrecall.training.leash import Leash
from longrecall.training.optimizer import make_optimizer
from longrecall.training.recipe import Recipe
from longrecall.training.schedule import handover_progress, rate_factor
from longrecall.training.segments import Segments, read_batch
from longrecall.training.summary import recipe_groups


@dataclass
class Trained:
    """A run step by step: losses, gradients before clipping; the interventions of all data ranks at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)


def train(recipe: Recipe, world: int) -> Trained:
    """Train as `world` data ranks would."""
    source = open_checkpoint(recipe.model.checkpoint)
    model = longrecall.load(recipe.model.checkpoint, dtype="float32").train()
    leash = None
    if recipe.leash is not None:
        leash = Leash(recipe, longrecall.load(str(recipe.leash.teacher)), model, sharded=False)
    one = recipe.initial_state.kind == "learned"
    made = [
        make_initial_state(recipe.initial_state, model, recipe.run.seed, rank * recipe.run.batch_size)
        for rank in range(1 if one else world)
    ]
    initial = made * world if one else made
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = recipe_groups(recipe, source, names)
    optimizer = make_optimizer(model, groups, recipe.optimizer)
    rows = recipe.run.batch_size
    streams = [
        BatchStream(recipe.data, byte_tokenizer(), rows, rank, world, continued=recipe.continues)
        for rank in range(world)
    ]
    handovers = [module for module in model.modules() if isinstance(module, Handover)]
    found, steps = Trained(), recipe.steps(world)
    for step in range(steps):
        for layer in handovers:
            layer.progress.fill_(handover_progress(step, steps, recipe.handover))
        total, labels = torch.zeros(()), 0
        for stream, state in zip(streams, initial, strict=True):
            for _ in range(recipe.run.gradient_accumulation):
                batch = stream.next_batch()
                segments = Segments.of(batch["starts"], recipe.data.context_length) if recipe.continues else None
                held = None if leash is None else leash.of_batch(batch)
                rows = (batch["input_ids"], batch["labels"], batch["text"])
                mean = read_batch(model, *rows, state, segments, leash=held)
                count = int((batch["labels"][:, 1:] != -100).sum())
                total, labels = total + mean * count, labels + count
        (total / labels).backward()
        found.losses.append((total / labels).item())
        named = model.named_parameters()
        found.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        for group, mine in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = mine.learning_rate * rate_factor(step, steps, recipe.optimizer)
        optimizer.step()
        optimizer.zero_grad()
    found.states = [state.state_dict() for state in initial]
    return found
