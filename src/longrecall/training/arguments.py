"""The settings of transformers' Trainer for a recipe."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import TrainingArguments

from longrecall.errors import UserError
from longrecall.installing import install_command
from longrecall.training.parallel.launcher import on_cpu
from longrecall.training.recipe import Recipe


def trainer_arguments(recipe: Recipe, output: Path) -> TrainingArguments:
    """Return what the Trainer may do itself; logs and checkpoints are ours. It joins the process group.

    Raises:
        UserError: a reporter that is not installed, or fp16 without a GPU.
    """
    run = recipe.run
    report_to = run.report_to
    if report_to == "auto":
        report_to = "tensorboard" if importlib.util.find_spec("tensorboard") else "none"
    elif report_to != "none" and not importlib.util.find_spec(report_to):
        raise UserError(
            f"run.report_to is {report_to}, which is not installed; install it with: {install_command(report_to)}, "
            "or set run.report_to=none"
        )
    gpu = torch.cuda.is_available() and not on_cpu()
    if run.precision == "fp16" and not gpu:
        raise UserError("run.precision fp16 needs a GPU; use fp32, or bf16")
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=1,
        per_device_train_batch_size=run.batch_size,
        gradient_accumulation_steps=run.gradient_accumulation,
        max_grad_norm=recipe.optimizer.clip,
        learning_rate=recipe.optimizer.learning_rate,
        bf16=run.precision == "bf16",
        fp16=run.precision == "fp16",
        seed=run.seed,
        report_to=[] if report_to in ("none", "tensorboard") else [report_to],
        run_name=output.name,
        use_cpu=not gpu,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
    # One process drives one device: with several visible GPUs Trainer would split batches and lose the states.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments
