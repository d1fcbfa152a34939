"""The training loop: transformers' Trainer, with state as a value, exact resume and token-weighted losses.

The Trainer drives (accumulation, autocast, clipping, data parallelism, reporting); what it would do in its own way is
ours: the data (one stream per process, positioned exactly), the loss (every label of a step counts the same, whatever
micro-batch and process it is in), the initial states, the logs and the checkpoints (no pickle, whole or absent).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from longrecall.models.losses import label_count
from longrecall.training.captured_passes import NO_GPU, SWITCHED_OFF, CapturedPasses, Inputs, Passed, why_eager
from longrecall.training.checkpoints import ProcessState, SavedRun, Saver, restore_optimizer
from longrecall.training.checkpoints.saved_run import CARRIED, random_tensors, restore_random
from longrecall.training.data import Batch
from longrecall.training.evaluation_steps import evaluate_after
from longrecall.training.initial_states import InitialState
from longrecall.training.job import Job
from longrecall.training.leash import LeashedBatch
from longrecall.training.logs import Bar, Stopwatch
from longrecall.training.loss_sums import LossSums
from longrecall.training.optimizer import make_optimizer
from longrecall.training.parallel.shard import as_sharded, average_replicated, clip_gradients
from longrecall.training.recipe_states import LearnedRecipe
from longrecall.training.schedule import rate_factor
from longrecall.training.segments import Segments, read_batch
from longrecall.training.sending import send
from longrecall.training.watch import describe_place


class RecurrentTrainer(Trainer):
    """Trainer whose batches start from the state that an intervention chooses."""

    def __init__(self, job: Job, arguments: TrainingArguments, callbacks: list[TrainerCallback]) -> None:
        had_use_cache = "use_cache" in job.model.config.__dict__
        super().__init__(model=job.model, args=arguments, callbacks=callbacks)
        # Trainer writes use_cache=False into the config, which would be saved and switch off the state in generate().
        if not had_use_cache:
            job.model.config.__dict__.pop("use_cache", None)
        self.remove_callback(PrinterCallback)
        # Our loss is scaled here; Trainer must neither count labels nor divide.
        self.model_accepts_loss_kwargs = False
        self.job = job
        if job.processes.sharded:
            # Already sharded: Accelerate only adds autocast, and wraps it no second time. Transformers does the same.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.micro_batches_left = 0
        """Of the step that is running."""
        self.sums = LossSums()
        self.gradient_norm: Tensor | None = None
        self._place = ""
        self._why_eager = why_eager(job, self.args.device)
        self._passes = CapturedPasses.of(job, self.args.device, self._why_eager is not None)
        if job.processes.first and job.show_progress and self._why_eager not in (None, NO_GPU, SWITCHED_OFF):
            print(f"steps are launched one by one: {self._why_eager}", file=sys.stderr, flush=True)
        prepare = self.accelerator.prepare_model

        def prepared(*arguments: Any, **options: Any) -> Any:
            # DDP binds what it does with gradients to the stream that it is made on.
            with self._passes.on_stream():
                return prepare(*arguments, **options)

        self.accelerator.prepare_model = prepared

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """The process's own stream; Accelerate would shard or move it a second time."""
        # A generator of its own: DataLoader would otherwise draw from the global one when it starts.
        keep: Any = _as_it_is
        return DataLoader(self.job.stream, batch_size=None, collate_fn=keep, generator=torch.Generator())

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with the groups of the recipe."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.job.model, self.job.groups, self.job.recipe.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning rate as a function of the step."""
        if self.lr_scheduler is None:
            job = self.job
            self.lr_scheduler = LambdaLR(
                optimizer or self.active_optimizer, lambda step: rate_factor(step, job.steps, job.recipe.optimizer)
            )
        return self.lr_scheduler

    @property
    def active_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, once training has begun."""
        if self.optimizer is None:
            raise RuntimeError("the optimizer is made when training begins")
        return self.optimizer

    @property
    def active_scheduler(self) -> LambdaLR:
        """The scheduler, once training has begun."""
        if self.lr_scheduler is None:
            raise RuntimeError("the scheduler is made when training begins")
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: Any) -> Any:
        """Return the micro-batches of one step and the number of their labels, over all processes."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        self.micro_batches_left = num_batches
        labels = send(torch.stack([label_count(batch["labels"]) for batch in batches]).sum(), torch.device(device))
        place = self.job.processes
        if place.world > 1:
            # The processes of a context group have the same rows.
            labels = self.accelerator.reduce(labels, "sum") // place.context_world
        return batches, labels

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the loss of the step."""
        job = self.job
        if not model.training:
            model.train()
        leash = None if job.leash is None else job.leash.of_batch(inputs)
        origin = inputs.pop("origin")
        step = self.state.global_step + 1
        text, starts = inputs.pop("text"), inputs.pop("starts")
        self._place = describe_place(origin, inputs.pop("first"), job.processes.data_rank)
        batch = {name: send(inputs[name], self.args.device) for name in ("input_ids", "labels")}
        apart = job.recipe.data.reset_documents or job.initial.continues
        segments = Segments.of(starts, batch["input_ids"].shape[1]) if apart else None
        items = num_items_in_batch.clamp(min=1)
        self.micro_batches_left -= 1
        last = self.micro_batches_left == 0

        def work(tensors: Inputs, initial: InitialState) -> Passed:
            return self._pass(model, tensors, text, initial, segments, leash, last)

        if self._why_eager is None:
            done = self._passes.run(work, batch | {"items": items}, job.initial, text, last)
        else:
            with self._passes.on_stream():
                done = work(batch | {"items": items}, job.initial)
        job.watch.see("loss", step, self._place, done.mean)
        self.sums.add(done.counted, loss=done.mean, **done.parts)
        shown: Tensor = done.mean * done.counted
        return shown

    def _pass(
        self,
        model: nn.Module,
        tensors: Inputs,
        text: Tensor,
        initial: InitialState,
        segments: Segments | None,
        leash: LeashedBatch | None,
        last: bool,
    ) -> Passed:
        """Forward and backward of a micro-batch, the `last` one of its step or not."""
        place, parts = self.job.processes, dict[str, Tensor]()
        ids, labels = tensors["input_ids"], tensors["labels"]
        with self.compute_loss_context_manager():
            mean = read_batch(model, ids, labels, text, initial, segments, parts, place.context, leash)
        # The model returns a mean over the labels of this micro-batch; gradients are averaged over all processes. Those
        # of a context group have one loss, each with the gradient of its own piece.
        # Without labels it is a mean over one: a leash may hold such rows too, and its sum is divided likewise.
        share = label_count(labels).clamp(min=1) * place.world / tensors["items"]
        self._backward(mean * share, last)
        return Passed(mean.detach(), share / place.context_world, parts)

    @property
    def why_eager(self) -> str | None:
        """Why steps on a GPU are launched one by one, in words; None = they are recorded, or there is no GPU."""
        return None if self._why_eager == NO_GPU else self._why_eager or self._passes.given_up

    def release_recordings(self) -> None:
        """Give back the memory of recorded passes, which the next steps record anew."""
        self._passes.release()

    def _backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients; after the `last` micro-batch of a step they are those of all processes."""
        job = self.job
        if job.processes.sharded:
            # Copies of the weights agree once a step; within a copy gradients stay sharded, or they would not fit.
            as_sharded(job.model).set_requires_all_reduce(last)
        self.accelerator.backward(loss)
        if job.processes.sharded and last:
            average_replicated(job.model.parameters())

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip to the recipe's norm, over all shards; return the norm before."""
        place = self.job.processes
        if place.sharded:
            return clip_gradients(self.job.model.parameters(), self.args.max_grad_norm, place)
        parent: Any = super()
        return parent._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Keep the norm (before clipping) for the log and for the watch."""
        parent: Any = super()
        if grad_norm is None and self.job.processes.sharded:
            grad_norm = clip_gradients(self.job.model.parameters(), math.inf, self.job.processes)
        norm = parent._get_grad_norm(model, grad_norm=grad_norm)
        self.gradient_norm = torch.as_tensor(norm).detach()
        # Under fp16 an overflow is expected now and then: the scaler skips that step.
        if self.job.recipe.run.precision != "fp16":
            self.job.watch.see("gradient norm", self.state.global_step + 1, self._place, self.gradient_norm)
        return norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: Trainer would walk through the modules of the model in every step."""
        return 0


def _as_it_is(batch: Batch) -> Batch:
    return batch


class RunCallback(TrainerCallback):
    """What happens around the steps: resume, handover, log, checkpoints."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._trainer: RecurrentTrainer | None = None
        self._clock = Stopwatch()
        self._bar: Bar | None = None
        self._logged_step = 0
        self._saver = Saver(
            job.output, job.recipe.run.keep, job.source, job.tokenizer, job.model, job.processes, job.watch
        )

    def attach(self, trainer: RecurrentTrainer) -> None:
        """Name the trainer whose steps these are."""
        self._trainer = trainer

    @property
    def trainer(self) -> RecurrentTrainer:
        """The trainer."""
        if self._trainer is None:
            raise RuntimeError("attach comes before training")
        return self._trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue from the saved run, if there is one."""
        job, trainer = self._job, self.trainer
        if job.saved is not None:
            state.global_step = job.saved.step
            self._restore(job.saved)
        enabled = job.show_progress and job.processes.first
        self._bar = Bar(job.steps, state.global_step, job.tokens_per_step, enabled)
        self._clock = Stopwatch()
        if state.global_step == 0:
            evaluate_after(job, trainer, self._clock, 0, False, job.set_handover(0))

    def _restore(self, saved: SavedRun) -> None:
        job, trainer = self._job, self.trainer
        with job.processes.together():
            restore_optimizer(job.model, trainer.active_optimizer, saved.optimizer)
            own = saved.share_of(job.processes)
            job.stream.restore(own.data["position"])
        trainer.active_scheduler.load_state_dict(saved.state["scheduler"])
        rates = saved.state["scheduler"]["_last_lr"]
        for group, rate in zip(trainer.active_optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if trainer.accelerator.scaler is not None and saved.state["scaler"]:
            trainer.accelerator.scaler.load_state_dict(saved.state["scaler"])
        job.restore_initial(own)
        trainer.sums.restore(own.tensors, trainer.args.device)
        self._logged_step = int(own.data["logged_step"])
        restore_random(own.tensors)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the handover on."""
        self._job.set_handover(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log and save when it is time."""
        job, step = self._job, state.global_step
        self._clock.count(job.tokens_per_step)
        if self._bar is not None:
            self._bar.step()
        progress = job.set_handover(step)
        last = step >= job.steps
        if step % job.recipe.run.log_every == 0 or last:
            self._log(step, progress)
        if evaluate_after(job, self.trainer, self._clock, step, last, progress, self.trainer.release_recordings):
            last = control.should_training_stop = True
        if last and self._logged_step != step:
            self._log(step, progress)
        if last or (job.recipe.run.save_every and step % job.recipe.run.save_every == 0):
            self._save(step)

    def _log(self, step: int, progress: float) -> None:
        job, trainer = self._job, self.trainer
        job.watch.check()
        self._saver.settle(self._mean_of)
        losses = trainer.sums.take(step - self._logged_step, self._mean_of)
        loss = losses.pop("loss")
        self._logged_step = step
        factor = rate_factor(step - 1, job.steps, job.recipe.optimizer)
        row = {
            "step": step,
            "tokens": step * job.tokens_per_step,
            "loss": loss,
            "learning_rate": factor * job.recipe.optimizer.learning_rate,
            "touched_learning_rate": factor * job.recipe.optimizer.touched_rate,
            "gradient_norm": None if trainer.gradient_norm is None else float(trainer.gradient_norm),
            "tokens_per_second": round(self._clock.rate(), 1),
            "data_wait": round(job.stream.waited_share(), 4),
        }
        if isinstance(job.recipe.initial_state, LearnedRecipe):
            row["initial_state_learning_rate"] = factor * job.recipe.initial_state.learning_rate
        row |= losses
        if job.handovers:
            row["handover"] = progress
        if job.processes.first:
            job.log.add(row)
            if self._bar is not None:
                self._bar.show(loss, row["tokens_per_second"] or 0.0)
        # For TensorBoard and W&B, under the name of a loss during training.
        trainer.log({key: value for key, value in row.items() if value is not None and key != "step"})

    def _mean_of(self, total: Tensor) -> float:
        """The mean of a number that every process has."""
        if self._job.processes.world > 1:
            own = total.to(self.trainer.args.device, copy=True)
            total = self.trainer.accelerator.reduce(own, "mean")
        return float(total)

    def _save(self, step: int) -> None:
        """Begin to write a resumable checkpoint."""
        job, trainer = self._job, self.trainer
        job.watch.check()
        scaler = trainer.accelerator.scaler
        state = {
            "schema": 1,
            "steps": job.steps,
            "tokens": step * job.tokens_per_step,
            "recipe": job.recipe.to_dict(),
            "scheduler": trainer.active_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else {},
            "evaluation": None if job.evaluation is None else job.evaluation.state(),
        }
        own = ProcessState(
            {
                **random_tensors(),
                **{CARRIED + name: tensor for name, tensor in job.initial.state_dict().items()},
                **trainer.sums.state(),
            },
            {"position": job.stream.position(), "logged_step": self._logged_step},
        )

        self._saver.save(step, trainer.active_optimizer, own, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last checkpoint; leave the progress bar as it is."""
        self.trainer.release_recordings()
        self._saver.wait()
        self.close()

    def close(self, patience: float | None = None) -> None:
        """Close the progress bar; wait, no longer than `patience` seconds, for the checkpoint that is being written."""
        self._saver.close(patience)
        if self._bar is not None:
            self._bar.close()
