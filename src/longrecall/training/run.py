"""run_recipe: from a checked recipe to a trained checkpoint, or to a table that says what would happen."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from longrecall.errors import UserError
from longrecall.files import cannot_write, expand_home, remove_temporary
from longrecall.models.checkpoint import Checkpoint, open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.compiling import compiled_layers
from longrecall.models.loading import materialise, materialise_sharded, parse_dtype
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.new_folder import clear_remains
from longrecall.outputs import claim_folder
from longrecall.training.arguments import trainer_arguments
from longrecall.training.checkpoints import (
    STEPS_FOLDER,
    SavedRun,
    clear_partial,
    find_saved_runs,
)
from longrecall.training.data import BatchStream
from longrecall.training.evaluation import described, ended, prepare_evaluation, resumed
from longrecall.training.evaluation_steps import BEST_FOLDER, clear_best
from longrecall.training.finishing import FINAL_FOLDER, LEARNED_STATE_FILE, finish
from longrecall.training.initial_states import make_initial_state, sum_of
from longrecall.training.job import Job
from longrecall.training.leash import Leash, find_teacher, teacher_digest
from longrecall.training.logs import LOG_FILE, RESULT_FILE, RunLog, Stopwatch
from longrecall.training.optimizer import freeze_parameters
from longrecall.training.parallel.agreement import check_same_files, check_same_run, check_shared_folder
from longrecall.training.parallel.launcher import apart_from_launcher, check_devices, launched, on_cpu, world_size
from longrecall.training.parallel.place import Place, make_place, naming_the_dead, replicas
from longrecall.training.parallel.shard import own_rows, shard_model
from longrecall.training.recipe import Recipe
from longrecall.training.summary import TrainingSummary, plan, recipe_groups
from longrecall.training.trainer import RecurrentTrainer, RunCallback
from longrecall.version import __version__

TENSORBOARD_FOLDER = "tensorboard"
_MARKS = (STEPS_FOLDER, FINAL_FOLDER, LOG_FILE, RESULT_FILE)
"""A folder with any of these holds a run."""
_OF_A_RUN = (*_MARKS, BEST_FOLDER, LEARNED_STATE_FILE, TENSORBOARD_FOLDER)
_ELSEWHERE = "choose another run.output"
_PATIENCE = 5.0
"""Seconds that a failed process of several waits for the checkpoint that is being written."""


def run_recipe(
    recipe: Recipe, resume: bool = False, dry_run: bool = False, show_progress: bool = True, force: bool = False
) -> TrainingSummary:
    """Train as the recipe says; under torchrun every process calls this.

    Args:
        recipe: see `longrecall.training.recipe`.
        resume: continue the newest complete checkpoint in the output folder, exactly; without one, begin.
        dry_run: check everything, draw the first batch, read no weights and write nothing.
        show_progress: a bar on stderr.
        force: begin anew; the run that the output folder holds is removed once everything has been checked.

    Returns:
        What was done. The trained checkpoint is ``<output>/final``, without handover layers.

    Raises:
        UserError: bad data, checkpoint or output; an output that another process writes; a loss that is NaN or
            infinite; no space left while saving (earlier checkpoints stay); a resume with another recipe, or with a
            number of processes that cannot share the rows of a batch.
    """
    output = expand_home(recipe.run.output)
    with _threads(recipe.run.threads), apart_from_launcher() as said:
        if dry_run:
            recipe = launched(recipe, world_size(), said)
            source, tokenizer = _source(recipe, output)
            recipe, _ = find_teacher(recipe, source, tokenizer)
            # Alone it stands for as many processes as the recipe asks for.
            world = world_size() if world_size() > 1 else recipe.parallel.least()
            readers = replicas(recipe.parallel, world) * recipe.parallel.shard
            stream = BatchStream(
                recipe.data, tokenizer, recipe.run.batch_size, data_world=readers, continued=recipe.continues
            )
            summary = plan(recipe, source, world, stream, output / FINAL_FOLDER, dry_run=True)
            return described(summary, prepare_evaluation(recipe, tokenizer))
        if torch.cuda.is_available() and not on_cpu():
            check_devices(torch.cuda.device_count())
        arguments = trainer_arguments(recipe, output)
        processes = Place(arguments.process_index, arguments.world_size)
        with naming_the_dead(processes):
            with processes.together():
                recipe = launched(recipe, processes.world, said)
            place = make_place(recipe.parallel, processes.rank, processes.world, arguments.device)
        with naming_the_dead(place):
            return _run_together(recipe, arguments, output, place, resume, show_progress, force)


def _run_together(
    recipe: Recipe,
    arguments: TrainingArguments,
    output: Path,
    place: Place,
    resume: bool,
    show_progress: bool,
    force: bool,
) -> TrainingSummary:
    """The run itself, in each of its processes."""
    check_same_run(place, recipe.to_dict(), resume=resume, force=force, version=__version__)
    with place.together():
        source, tokenizer = _source(recipe, output)
        recipe, teacher = find_teacher(recipe, source, tokenizer)
        # Of a large model this takes minutes: one process reads the files.
        digest = teacher_digest(recipe, teacher, source.surgery) if teacher is not None and place.first else None
    if recipe.leash is not None:
        recipe = replace(recipe, leash=replace(recipe.leash, sha256=place.gather(digest)[0]))
    with _claimed(output, resume, force, source.path, place):
        check_shared_folder(place, output)
        with place.together():
            saved = next(reversed(find_saved_runs(output)), None) if resume else None
            if saved is not None:
                recipe = saved.fit(recipe, place.data_world)
            stream = BatchStream(
                recipe.data,
                tokenizer,
                recipe.run.batch_size,
                place.data_rank,
                place.data_world,
                continued=recipe.continues,
            )
            arguments.max_steps = recipe.steps(place.data_world)
            summary = plan(recipe, source, place.world, stream, output / FINAL_FOLDER, dry_run=False)
            evaluation = prepare_evaluation(recipe, tokenizer)
        check_same_files(place, source, [kind["amount"] for kind in stream.position()["sources"]])
        with place.together():
            job = _job(
                recipe, arguments, output, source, teacher, tokenizer, stream, place, saved, show_progress, force
            )
        job.evaluation = resumed(evaluation, saved.state if saved is not None else {})
        clock = Stopwatch()
        if saved is None or not ended(saved.state, saved.step, job.steps):
            summary = replace(summary, why_eager=_train(job, arguments))
        else:
            with place.together():
                job.restore_initial(saved.share_of(place))
        return finish(job, summary, clock.seconds())


def _source(recipe: Recipe, output: Path) -> tuple[Checkpoint, Any]:
    """The checkpoint that is trained, and its tokenizer."""
    source = open_checkpoint(recipe.model.checkpoint)
    tokenizer = _tokenizer(source)
    _check_apart(output, source.path)
    return source, tokenizer


def _tokenizer(source: Checkpoint) -> Any:
    """Return the checkpoint's tokenizer, of which every token must be one of the model's: training may meet them all.

    Raises:
        UserError: as `load_tokenizer`, or it has more tokens than the model.
    """
    tokenizer = load_tokenizer(source.path, source.config.vocab_size)
    if len(tokenizer) > source.config.vocab_size:
        raise UserError(
            f"the tokenizer in {source.path} has {len(tokenizer)} tokens, but the model only {source.config.vocab_size}"
        )
    return tokenizer


def _check_apart(output: Path, source: Path) -> None:
    """Refuse a run that would write its files among those of the checkpoint that it trains."""
    place, folder = output.resolve(), source.resolve()
    if folder in (place, *place.parents):
        where = "is" if place == folder else "lies inside"
        raise UserError(f"run.output {output} {where} the checkpoint that is trained; name another folder")


@contextmanager
def _claimed(output: Path, resume: bool, force: bool, source: Path, place: Place) -> Iterator[None]:
    """Be the only run that writes into `output` inside the block; the first process holds it for all."""
    with ExitStack() as held:
        refusal = None
        if place.first:
            try:
                held.enter_context(claim_folder(output, _ELSEWHERE))
                _prepare_output(output, resume, force, source)
            except UserError as error:
                refusal = str(error)
        place.refuse_together(refusal)
        yield


def _prepare_output(output: Path, resume: bool, force: bool, source: Path) -> None:
    """Refuse a folder that holds another run; clear what killed runs have left half-written."""
    if force and resume:
        raise UserError("--force starts over and --resume continues; give one of them")
    ours = [name for name in _MARKS if (output / name).exists()]
    if ours and not (resume or force):
        raise UserError(
            f"{output} holds a run already ({ours[0]}); continue it with --resume, start over with --force, "
            f"or {_ELSEWHERE}"
        )
    place, folder = output.resolve(), source.resolve()
    if ours and force and any(place / name in (folder, *folder.parents) for name in (*ours, BEST_FOLDER)):
        raise UserError(f"run.output {output} holds the checkpoint that is trained, which --force would remove")
    try:
        clear_partial(output)
        clear_remains(output / FINAL_FOLDER)
        clear_best(output)
        for name in _OF_A_RUN:
            remove_temporary(output / name)
    except OSError as error:
        raise cannot_write(output, error, _ELSEWHERE) from error


def _remove_run(output: Path) -> None:
    """Remove the run that `output` holds, if it holds one; other files stay."""
    for name in _OF_A_RUN if any((output / mark).exists() for mark in _MARKS) else ():
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _job(
    recipe: Recipe,
    arguments: TrainingArguments,
    output: Path,
    source: Checkpoint,
    teacher: Checkpoint | None,
    tokenizer: Any,
    stream: BatchStream,
    place: Place,
    saved: SavedRun | None,
    show_progress: bool,
    force: bool,
) -> Job:
    weights = open_checkpoint(saved.folder) if saved is not None else source
    model = _model(recipe, weights, place, arguments.device)
    model.config.context_length = recipe.data.context_length
    if recipe.run.gradient_checkpointing:
        # 5.23 renamed it; 5.17 knows only the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        # No layer draws random numbers, so there is nothing of theirs to keep. To keep it, the host waits for the GPU.
        enable({"use_reentrant": False, "preserve_rng_state": False})
    first_row = place.data_rank * recipe.run.batch_size
    initial = make_initial_state(recipe.initial_state, model, recipe.run.seed, first_row, sum_of(place.world))
    names = freeze_parameters(model, recipe.optimizer)
    groups = recipe_groups(recipe, source, names)
    leash = _leash(recipe, teacher, model, place, arguments.device)
    if force and place.first:
        _remove_run(output)  # here at last: all that can be wrong with the new run has been checked
    return Job(
        recipe=recipe,
        steps=recipe.steps(place.data_world),
        output=output,
        model=model,
        source=source,
        tokenizer=tokenizer,
        stream=stream,
        initial=initial,
        groups=groups,
        log=RunLog(output / LOG_FILE, saved.step if saved is not None else 0, place.first),
        processes=place,
        saved=saved,
        leash=leash,
        show_progress=show_progress,
    )


def _model(recipe: Recipe, weights: Checkpoint, place: Place, device: torch.device) -> RecurrentLM:
    """The weights in memory: all of them, or this process's part."""
    dtype = parse_dtype(recipe.model.dtype)
    if not place.sharded or dtype is None:
        return materialise(weights, dtype, device)
    shard = partial(shard_model, place=place, precision=recipe.run.precision)
    return materialise_sharded(weights, dtype, device, shard, own_rows, place.shard * place.context_world)


def _leash(
    recipe: Recipe, teacher: Checkpoint | None, model: RecurrentLM, place: Place, device: torch.device
) -> Leash | None:
    """The recipe's leash with its teacher in memory, sharded as the model is; None without one."""
    if teacher is None or recipe.leash is None:
        return None
    own = replace(recipe, model=replace(recipe.model, dtype=recipe.leash.dtype or recipe.model.dtype))
    return Leash(recipe, _model(own, teacher, place, device), model, place.sharded)


def _train(job: Job, arguments: TrainingArguments) -> str | None:
    """Do the steps; return why they were launched one by one (see `TrainingSummary.why_eager`)."""
    around = RunCallback(job)
    callbacks: list[TrainerCallback] = [around]
    if job.recipe.run.report_to in ("auto", "tensorboard") and job.processes.first:
        callbacks += _tensorboard(job.output)
    trainer = RecurrentTrainer(job, arguments, callbacks)
    around.attach(trainer)
    try:
        with warnings.catch_warnings(), compiled_layers(job.model, wanted=job.recipe.run.compile):
            # FSDP would not see a change in place of views among what a layer returns; nobody makes one.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
            # Newer torch has another name for an argument that the Trainer hands on; every process would say so.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            trainer.train()
    except RuntimeError:
        # Another process may have died: what writes a checkpoint with it would wait for ever, and others for this one.
        around.close(patience=None if job.processes.world == 1 else _PATIENCE)
        raise
    finally:
        around.close()
    return trainer.why_eager


def _tensorboard(output: Path) -> list[TrainerCallback]:
    """TensorBoard's callback with its files in the output folder; nothing when it is not installed."""
    if not importlib.util.find_spec("tensorboard"):
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    with warnings.catch_warnings():
        # TensorBoard's own protobuf code warns about itself.
        warnings.simplefilter("ignore")
        return [TensorBoardCallback(SummaryWriter(log_dir=str(output / TENSORBOARD_FOLDER)))]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use so many CPU threads inside the block."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
