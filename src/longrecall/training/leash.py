"""The leash of a training run: a frozen teacher reads the same batch, and what the model predicts is kept close to it.

"Learning without Forgetting" (Li and Hoiem 2016): the teacher is the model as it was, so no data of its own is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from longrecall.context import ContextGroup
from longrecall.errors import UserError
from longrecall.models.checkpoint import Checkpoint, open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.distillation import Closeness, Predictions, divergence, relative_error
from longrecall.models.logits import LogitScale
from longrecall.models.output import RecurrentOutput
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.borders import sum_of_pieces
from longrecall.training.data import Batch
from longrecall.training.encoding import tokenizer_fingerprint
from longrecall.training.recipe import Recipe
from longrecall.training.sending import send

COMPUTED = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""run.precision -> the type that autocast multiplies in; None = no autocast."""
_ELSE = "name another checkpoint in leash.teacher"


def find_teacher(recipe: Recipe, source: Checkpoint, tokenizer: Any) -> tuple[Recipe, Checkpoint | None]:
    """Return the recipe with the teacher's place in it, and the open teacher; None without a leash.

    Args:
        recipe: of the run.
        source: the checkpoint that is trained; its records of surgery may know the teacher.
        tokenizer: of `source`.

    Raises:
        UserError: no teacher is named and no surgery tells of one, or it is not there; another vocabulary or another
            tokenizer; layers that cannot be compared.
    """
    leash = recipe.leash
    if leash is None:
        return recipe, None
    place = leash.teacher or teacher_of(source.surgery)
    try:
        teacher = open_checkpoint(place)
    except UserError as error:
        if leash.teacher is not None:
            raise
        raise UserError(
            f"{error}; it is the teacher, because surgery started from it. Say in leash.teacher where it is"
        ) from None
    own, other = source.config, teacher.config
    if own.vocab_size != other.vocab_size:
        raise UserError(
            f"the teacher {place} predicts {other.vocab_size:,} tokens and the model {own.vocab_size:,}; {_ELSE}"
        )
    if tokenizer_fingerprint(load_tokenizer(teacher.path, other.vocab_size)) != tokenizer_fingerprint(tokenizer):
        raise UserError(f"the teacher {place} has another tokenizer than the model; {_ELSE}")
    shape, wanted = ((len(config.layers), config.hidden_size) for config in (other, own))
    if leash.hidden and shape != wanted:
        raise UserError(
            "leash.hidden compares residual streams layer by layer, but the model has {} layers of width {} and the "
            "teacher {} of {}; set leash.hidden=0".format(*wanted, *shape)
        )
    return replace(recipe, leash=replace(leash, teacher=place)), teacher


def teacher_of(surgery: list[dict[str, Any]]) -> str:
    """Return the place of the checkpoint that the last surgery started from, by the records of surgery.json.

    Raises:
        UserError: there was no surgery, or its record does not know.
    """
    place = (surgery[-1].get("source") or {}).get("path") if surgery else None
    if not place:
        raise UserError(
            "leash.teacher is missing, and the checkpoint has no record of surgery that names its original; set "
            "leash.teacher to a checkpoint"
        )
    return str(place)


def teacher_digest(recipe: Recipe, teacher: Checkpoint, surgery: list[dict[str, Any]]) -> str:
    """Return the SHA-256 of the teacher's files, all of which are read.

    Raises:
        UserError: the recipe, or the record of the surgery that started from this place, says another one.
    """
    digest = teacher.sha256()
    leash = recipe.leash
    if leash is not None and leash.sha256 not in (None, digest):
        raise UserError(
            f"the teacher {leash.teacher} does not match leash.sha256 {str(leash.sha256)[:12]}: its files "
            f"have {digest[:12]}; {_ELSE} or leave leash.sha256 out"
        )
    record = surgery[-1].get("source") or {} if surgery else {}
    if leash is not None and leash.teacher == record.get("path") and record.get("sha256") not in (None, digest):
        raise UserError(
            f"{leash.teacher} has changed since the surgery that started from it, so it is no longer the same model; "
            f"{_ELSE}"
        )
    return digest


class Leash:
    """What keeps a model close to a teacher in every batch.

    The teacher has no gradients and carries nothing from batch to batch: a resumed run needs no state of it.

    Args:
        recipe: with a leash.
        teacher: in memory, with the vocabulary of the model that is trained. It is changed: it gives hidden states in
            place of logits from now on.
        model: that is trained.
        sharded: processes hold parts of the teacher, so that all of them read together.
    """

    def __init__(self, recipe: Recipe, teacher: RecurrentLM, model: RecurrentLM, sharded: bool) -> None:
        if recipe.leash is None:
            raise ValueError("the recipe has no leash")
        self.recipe, self.sharded = recipe.leash, sharded
        self._sources = recipe.leash.chosen(recipe.data.sources)
        self._dtype = COMPUTED[recipe.run.precision]
        self._how = Closeness(recipe.leash.temperature, recipe.leash.top_k)
        self._teacher, self._model = teacher.eval().requires_grad_(False), model
        self._head, self._scale = teacher.lm_head, teacher.logit_scale
        # Its logits are formed a few tokens at a time, from what its head would have read; in one pass, as training is.
        teacher.set_output_embeddings(nn.Identity())
        teacher.logit_scale, teacher.text_reader = LogitScale(), None  # type: ignore[misc]

    def of_batch(self, batch: Batch) -> LeashedBatch:
        """Say what of a batch, on the CPU, is held."""
        labels: Tensor = batch["labels"]
        rows, length = labels.shape
        end = min(length, self.recipe.length or length) - 1
        held = torch.zeros((rows, length), dtype=torch.bool)
        held[:, :end] = torch.tensor([self._sources[number] for number in batch["source"]])[:, None]
        if self.recipe.tokens == "labelled":
            held[:, :-1] &= labels[:, 1:] != -100
        return LeashedBatch(self, held)

    def divergence(self, out: RecurrentOutput, read: Mapping[str, Tensor], rows: Tensor | None, held: Tensor) -> Tensor:
        """Weigh and add up what all held tokens differ by, float32 ``[]``.

        Args:
            out: of the model, with hidden states.
            read: the arguments that it was given.
            rows: int64 ``[R]``, on the CPU: the rows that the teacher reads; None = all.
            held: bool, on the CPU, of the shape of ``input_ids``.
        """
        device = read["input_ids"].device
        streams = cast(tuple[Tensor, ...], out.hidden_states)
        given = {name: tensor for name, tensor in read.items() if name != "labels"}
        own = send(held.flatten().nonzero().flatten(), device)
        aim = own
        if rows is not None:
            given["input_ids"] = given["input_ids"][send(rows, device)]
            aim = send(held[rows].flatten().nonzero().flatten(), device)
        with torch.autocast(device.type, self._dtype, enabled=self._dtype is not None):
            with torch.no_grad():
                whole = bool(self.recipe.hidden)
                seen = self._teacher(**given, use_cache=False, output_hidden_states=whole)
            total = torch.zeros((), device=device)
            if self.recipe.weight:
                student = Predictions(_chosen(streams[-1], own), self._model.lm_head, self._model.logit_scale)
                teacher = Predictions(_chosen(seen.logits, aim), self._head, self._scale)
                total = total + self.recipe.weight * divergence(student, teacher, self._how)
        if self.recipe.hidden:
            # Not the first: the embeddings, before any layer.
            before, now = ([_chosen(x, index) for x in each[1:]] for each, index in (
                (seen.hidden_states, aim), (streams, own)
            ))  # fmt: skip
            total = total + self.recipe.hidden * relative_error(now, before)
        return total


@dataclass(frozen=True)
class LeashedBatch:
    """A leash, and where it holds in one batch: bool `held` ``[B, T]``, on the CPU, by the token that predicts."""

    leash: Leash
    held: Tensor

    def left(self, labels: Tensor) -> Tensor:
        """Return the labels ``[B, T]`` that have a loss beside the leash: all, or with `instead` the others."""
        if not self.leash.recipe.instead:
            return labels
        predicted = torch.cat([torch.zeros_like(self.held[:, :1]), self.held[:, :-1]], 1)
        return labels.masked_fill(send(predicted, labels.device), -100)

    def pull(self, out: RecurrentOutput, read: Mapping[str, Tensor], context: ContextGroup | None) -> Tensor:
        """Return what the leash adds to the summed loss of the batch, float32 ``[]``.

        Inside `context_parallel` it is that of whole rows, with the gradient of this process's part.

        Args:
            out: of the model, with hidden states, for the arguments `read`: rows, rows packed into one, or a piece.
            context: the processes that share the rows.
        """
        packed = "cu_seqlens" in read
        chosen = self.held.any(1)
        if not bool(chosen.any()) and not self.leash.sharded:
            return torch.zeros((), device=read["input_ids"].device)
        held = self.held.reshape(1, -1) if packed else self.held
        if context is not None:
            held = held.chunk(context.world, dim=1)[context.rank]
        rows = None
        if not packed and not bool(chosen.all()):
            # Weights that are shared are gathered by all together: each process reads something.
            chosen[0] |= not bool(chosen.any())
            rows = chosen.nonzero().flatten()
        return sum_of_pieces(self.leash.divergence(out, read, rows, held))


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    """The vectors ``[N, d]`` of ``[B, T, d]`` at int64 `index` ``[N]`` of its B x T places."""
    return x.flatten(0, 1).index_select(0, index)
