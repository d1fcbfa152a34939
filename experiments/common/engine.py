"""Train many small models at once on one GPU: every training step is a CUDA graph on a stream of its own.

The step itself is `longrecall.training.captured`. The models of one experiment run side by side and read the same
batches in the same order, so arms of a comparison differ in nothing but themselves. Without a GPU the same code runs
the step eagerly, one model after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longrecall.layers.handover import Handover
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.captured import CapturedStep, capturable_adamw
from longrecall.training.initial_states import make_initial_state
from longrecall.training.recipe_states import AnyIntervention

NO_DECAY = ("norm.weight", "bias", "A_log", ".D", "dt_bias", "mixing", "conv.weight", "temperature")


@dataclass
class Plan:
    """How one model is trained."""

    name: str
    learning_rate: float
    touched: frozenset[str] = frozenset()
    touched_rate: float | None = None
    state_passing: float = 0.0
    """Probability, per row and step, that a row starts from the final state of the row before it."""
    handover_share: float = 0.5
    warmup: int = 100
    hold: float = 0.0
    """Share of the steps, after the warm-up, during which the peak is held before the cosine begins."""
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    initial: AnyIntervention | None = None
    """The intervention on the initial state, as a recipe names it; it takes the place of `state_passing`."""
    compiled: bool = False
    """Fuse the layers with torch.compile before the step is captured."""


def rate_factor(step: int, steps: int, plan: Plan) -> float:
    """Linear warm-up, a plateau, then a cosine to zero."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    start = max(plan.warmup, int(plan.hold * steps))
    if step < start:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, steps - start)))


class Run:
    """One model, its optimizer and its captured step; reads the batch from shared static buffers.

    `text` bool ``[B]``: the rows of running text, for interventions that treat them in their own way.
    """

    def __init__(
        self, model: RecurrentLM, plan: Plan, steps: int, ids: Tensor, labels: Tensor, text: Tensor | None = None
    ) -> None:
        self.model, self.plan, self.steps = model.train(), plan, steps
        self.ids, self.labels = ids, labels
        self.text = torch.zeros(len(ids), dtype=torch.bool) if text is None else text.cpu()
        self.initial = make_initial_state(plan.initial, model, plan.seed, 0) if plan.initial else None
        self.device = ids.device
        self.on_gpu = self.device.type == "cuda"
        self.loss = torch.zeros((), device=self.device)
        self.optimizer = self._optimizer()
        self.state = model.zero_state(ids.shape[0])
        self.passed = torch.zeros(ids.shape[0], dtype=torch.bool, device=self.device)
        self.generator = torch.Generator(device=self.device).manual_seed(plan.seed)
        self.handovers = [m for m in model.modules() if isinstance(m, Handover)]
        if plan.compiled and self.on_gpu:
            # Every shape of a layer is compiled once for all models; an experiment has more than the default of 8.
            torch._dynamo.config.recompile_limit = 128
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        self.captured = CapturedStep(self._step, self.optimizer, self.device, forget=self._forget)

    def _optimizer(self) -> torch.optim.AdamW:
        plan, groups = self.plan, {}
        for name, parameter in self.model.named_parameters():
            if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
                continue
            rate = plan.touched_rate if name in plan.touched and plan.touched_rate else plan.learning_rate
            decay = 0.0 if name.endswith(NO_DECAY) or "embeddings" in name else plan.weight_decay
            groups.setdefault((rate, decay), []).append(parameter)
        return capturable_adamw(groups, self.device)

    def _step(self) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False, enabled=self.on_gpu):
            out = self.model(self.ids, labels=self.labels, past_key_values=self.state)
        self.loss.copy_(out.loss.detach())
        self.final = out.past_key_values
        out.loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.plan.state_passing:
            for before, after in zip(self.state.layers, out.past_key_values.layers, strict=True):
                for name in before:
                    kept = self.passed.view(-1, *[1] * (before[name].dim() - 1))
                    before[name].copy_(torch.where(kept, after[name].detach(), 0.0))

    def _forget(self) -> None:
        for layer in self.state.layers:
            for tensor in layer.values():
                tensor.zero_()

    def advance(self, step: int) -> None:
        """Enqueue one training step."""
        progress = min(1.0, step / max(1.0, self.plan.handover_share * self.steps))
        self.captured.run(lambda: self._prepare(step, progress), self._after)

    def _after(self) -> None:
        """Show the final states to the intervention."""
        if self.initial is not None:
            self.initial.after_batch(self.final)

    def _prepare(self, step: int, progress: float) -> None:
        self.captured.set_rates(rate_factor(step, self.steps, self.plan))
        for module in self.handovers:
            module.progress.fill_(progress)
        if self.initial is not None:
            begin = self.initial.before_batch(self.text)
            for index, layer in enumerate(self.state.layers):
                for name, tensor in layer.items():
                    if begin is None:
                        tensor.zero_()
                    else:
                        tensor.copy_(begin.layers[index][name])
        if self.plan.state_passing:
            draw = torch.rand(self.passed.shape, generator=self.generator, device=self.device)
            self.passed.copy_(draw < self.plan.state_passing)


def train(
    runs: list[Run],
    steps: int,
    next_batch: Callable[[int], tuple[Tensor, Tensor]],
    ids: Tensor,
    labels: Tensor,
    on_step: Callable[[int], None] | None = None,
    first: int = 0,
) -> None:
    """Advance every run by `steps` - `first` steps over the same batches."""
    for step in range(first, steps):
        fresh_ids, fresh_labels = next_batch(step)
        if ids.is_cuda:
            for run in runs:
                torch.cuda.current_stream().wait_stream(run.captured.stream)
        ids.copy_(fresh_ids, non_blocking=True)
        labels.copy_(fresh_labels, non_blocking=True)
        for run in runs:
            run.advance(step)
        if on_step is not None:
            on_step(step)
    if ids.is_cuda:
        torch.cuda.synchronize()
