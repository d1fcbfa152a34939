"""RecurrentLM: any list of mixers as a causal language model of transformers, with generate()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from longrecall.errors import UserError
from longrecall.layers.lending import lend_weights
from longrecall.layers.mixers.base import LayerState, without_auxiliary_losses
from longrecall.layers.norm import build_norm
from longrecall.layers.passed import EMBEDDED, without_carried
from longrecall.layers.tokens import TokenContext, TokenEmbedding
from longrecall.models.captured_steps import CapturedSteps, forget_moved
from longrecall.models.config import RecurrentConfig
from longrecall.models.fingerprints import fingerprint
from longrecall.models.generation import NO_ATTENTIONS, DecodingOptions, RecurrentGeneration
from longrecall.models.logits import Head, LogitScale, logits_and_loss
from longrecall.models.long_texts import Read, Text, TextReader, Wanted
from longrecall.models.losses import label_count, predicted_labels
from longrecall.models.output import RecurrentOutput
from longrecall.models.packed_documents import PACKED, Fragments, find_fragments
from longrecall.models.pieces import (
    agreed_mask,
    count_tokens,
    find_all_documents,
    has_every_document,
    states_of_documents,
    states_of_last,
    with_next_label,
)
from longrecall.models.pretrained import RecurrentPreTrainedModel
from longrecall.models.recurrent_layer import RecurrentLayer as RecurrentLayer
from longrecall.models.sizes import norm_config
from longrecall.models.state import RecurrentState, apart_from_text, zero_state
from longrecall.models.token_ids import check_form, check_range, embedded, padding_mask
from longrecall.ops.borders import whole_sequences
from longrecall.ops.execution import as_states_are_read_now, shapes_are_fixed, with_row_pieces


class RecurrentModel(RecurrentPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.embeddings: nn.Embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            RecurrentLayer(layer, config.hidden_size, config.norm_eps) for layer in config.layer_configs()
        )
        lend_weights(list(self.layers))
        self.norm = build_norm(norm_config(config.final_norm), config.hidden_size, config.norm_eps)
        self.memory_tokens = None
        if config.memory_tokens:
            self.memory_tokens = nn.Parameter(torch.empty(config.memory_tokens, config.hidden_size))
        self.embedding_norm = None
        if config.embedding_norm is not None:
            self.embedding_norm = build_norm(norm_config(config.embedding_norm), config.hidden_size, config.norm_eps)
        # As they were built: reading the config takes longer than a layer.
        self.embedding_multiplier = config.embedding_multiplier
        self.passes_on = any(cast(RecurrentLayer, layer).passes_on for layer in self.layers)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = cast(nn.Embedding, value)

    def _memory_state(self, rows: int) -> RecurrentState:
        """The state of so many rows from which every text begins: after the memory tokens of the model, at position 0.

        It is computed anew, since it changes with the weights; gradients of what is read from it reach them.
        """
        assert self.memory_tokens is not None
        # Every rank reads all of them: they come before the first piece of a text that is cut over ranks.
        with whole_sequences():
            return self._after_memory_tokens(self.memory_tokens[None], rows)

    def _after_memory_tokens(self, x: Tensor, rows: int) -> RecurrentState:
        position = torch.full((1,), -x.shape[1], dtype=torch.long, device=x.device)
        context = None
        if any(cast(RecurrentLayer, layer).mixer_config.reads_tokens for layer in self.layers):
            # They are no words, and nobody looks them up.
            nobody = torch.zeros((1, 0), dtype=torch.int32, device=x.device)
            context = TokenContext.read(None, nobody, None, self.embeddings)
        layers, _, _, _ = self._through_layers(self._in_dtype_of_stream(x), x.dtype, None, None, position, context)
        kept = None if context is None else context.ids
        state = RecurrentState(tuple(layers), position + x.shape[1], 0, kept)
        return state.select_rows(torch.zeros(rows, dtype=torch.long, device=x.device))

    def _in_dtype_of_stream(self, x: Tensor) -> Tensor:
        return x.float() if self.config.residual_in_fp32 and x.dtype != torch.float64 else x

    def stream_of(self, x: Tensor) -> Tensor:
        """Embeddings ``[..., d]`` -> what the first layer reads, in the dtype of the residual stream."""
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self._in_dtype_of_stream(x)

    def forward(
        self,
        x: Tensor,
        state: RecurrentState | None,
        mask: Tensor | None,
        keep_hidden: bool = False,
        ids: Tensor | None = None,
        context: TokenContext | None = None,
    ) -> tuple[Tensor, RecurrentState, list[Tensor], list[Tensor]]:
        """Embeddings ``[B, T, d]``, a state -> normed stream ``[B, T, d]``, the new state, streams if asked for.

        The last of what is returned are the layers' own losses.

        `ids` ``[B, T]`` are the tokens that were embedded; layers that look up tokens need them (UserError without), or
        the `context` that they make with the state.
        """
        batch, length = x.shape[:2]
        if state is None and self.memory_tokens is not None:
            state = self._memory_state(batch)
            if not length:
                return x, state, [], []
        context = self._token_context(state, mask, ids) if context is None else context
        dtype = x.dtype
        position = x.new_zeros(batch, dtype=torch.long) if state is None else state.position
        stream, counts = self.stream_of(x), count_tokens(position, length, mask)
        new_layers, (x, update), hidden, losses = self._through_layers(
            stream, dtype, state, mask, counts.position, context, keep_hidden
        )
        _, x = self.norm(x, dtype, update=update, of_stream=True)
        if keep_hidden:
            hidden.append(x)
        x, new_layers = states_of_last(x, new_layers, self.config)
        columns = counts.columns + (0 if state is None else state.length)
        kept = None if context is None else context.ids
        return x, RecurrentState(tuple(new_layers), counts.after, columns, kept), hidden, losses

    def _through_layers(
        self,
        x: Tensor,
        dtype: torch.dtype,
        state: RecurrentState | None,
        mask: Tensor | None,
        position: Tensor,
        context: TokenContext | None,
        keep_hidden: bool = False,
    ) -> tuple[list[LayerState], tuple[Tensor, Tensor | None], list[Tensor], list[Tensor]]:
        """The stream ``[B, T, d]`` through all layers, computed in `dtype`.

        Returns their new states, the stream and what is yet to be added to it, streams if asked for, losses.
        """
        carried = {EMBEDDED: x.to(dtype)} if self.passes_on else None
        new_layers: list[LayerState] = []
        hidden: list[Tensor] = []
        losses: list[Tensor] = []
        update: Tensor | None = None
        apart = not (torch.is_grad_enabled() or shapes_are_fixed(x.device))
        for index, layer in enumerate(self.layers):
            checkpointed = self.gradient_checkpointing and self.training
            # A sum is made here where it is returned, or all that is kept of a layer; and for compiled layers, of which
            # the first one, without an update, would be compiled apart.
            if update is not None and (keep_hidden or checkpointed or layer._compiled_call_impl is not None):
                x, update = x + update, None
            if keep_hidden:
                hidden.append(x)
            inputs = (
                x,
                update,
                None if state is None else state.layers[index],
                mask,
                position,
                dtype,
                context,
                carried,
            )
            if checkpointed:
                x, update, after = self._gradient_checkpointing_func(as_states_are_read_now(layer.__call__), *inputs)
            else:
                x, update, after = layer(*inputs)
            after, own_losses = without_auxiliary_losses(after)
            if carried is not None:
                after, passed = without_carried(after)
                carried = {**carried, **passed}
            new_layers.append(apart_from_text(after) if apart else after)
            losses += own_losses
        return new_layers, (x, update), hidden, losses

    def _token_context(
        self, state: RecurrentState | None, mask: Tensor | None, ids: Tensor | None
    ) -> TokenContext | None:
        if not any(cast(RecurrentLayer, layer).mixer_config.reads_tokens for layer in self.layers):
            return None
        if ids is None:
            raise UserError(
                "this model has retrieval layers, which look up tokens by their ids: pass input_ids, not inputs_embeds"
            )
        return TokenContext.read(None if state is None else state.context, ids, mask, self.embeddings)


class RecurrentLM(RecurrentPreTrainedModel, RecurrentGeneration, GenerationMixin):
    """A causal language model whose layers are recurrences (or attention), each with its own sizes.

    >>> RecurrentLM(load(BASE).config).state_size()           # of its kind, with fresh weights
    3840
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012 (transformers' own protocol)

    model: RecurrentModel
    lm_head: nn.Linear
    text_reader: ClassVar[TextReader | None] = None

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.logit_scale = LogitScale(config.logits_multiplier, config.logits_soft_cap)
        self.decoding, self.captured_steps = DecodingOptions(), CapturedSteps()
        # By it transformers' Trainer knows that the first token of a row has no loss, when it counts labels.
        self.loss_type = "ForCausalLM"
        self.post_init()

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """`to()`, `half()` and the like; captured steps for weights that have moved give their memory back."""
        moved = cast(Any, super())._apply(*arguments, **options)
        # Before there are any, in the constructor, there is no attribute either.
        if getattr(self, "captured_steps", None):
            forget_moved(self.captured_steps, self)
        return moved

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = cast(nn.Linear, new_embeddings)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        loss_only: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> RecurrentOutput | tuple[Any, ...]:
        """Read tokens, starting from a state; nothing that was passed in is changed.

        Inside `context_parallel` every rank gives its piece of the sequences: the columns of `input_ids`, `labels`,
        `attention_mask` and `position_ids`, as many as each other rank. `past_key_values` is the state before the
        first piece, `cu_seqlens` are the boundaries in whole sequences; both are the same on all ranks. Logits are
        those of the piece. The loss is that of whole sequences and the returned state the one after the last piece,
        on every rank. Backward passes give each rank a part of the gradient: parameters' gradients, ADDED UP over the
        ranks of the group (not averaged), are those of one process. `num_items_in_batch` counts labels of whole rows.

        Args:
            input_ids: int64 ``[B, T]`` (or `inputs_embeds` ``[B, T, d]``).
            attention_mask: 0/1 ``[B, T]`` or longer (the last T columns count); 0 = padding, skipped as if not there.
            past_key_values: the RecurrentState to start from; None = zeros.
            labels: int64 ``[B, T]``, -100 = no loss; position t is predicted from the tokens before it, and has no loss
                where the column before is padding.
            cu_seqlens: int ``[N + 1]``: B = 1 holds N documents side by side, each read from its own (zero) state;
                the returned state then has one row per document.
            logits_to_keep: compute logits for the last so many positions only (or for the given ones); 0 = all.
            loss_only: return the loss of `labels` without logits, which need not all be in memory then.
            output_hidden_states: return the residual streams too; None = as the config says (no).
            return_dict: False returns a plain tuple of what there is; None = as the config says (True).
            position_ids: int ``[B, T]`` or ``[1, T]``; where they do not grow within a row, a new document begins,
                as if `cu_seqlens` said so of all rows one after the other. They have no other use: a state counts its
                tokens. `cu_seq_lens_q` and `seq_idx` of transformers' collators do the same.
            num_items_in_batch: labels of all the batches that a step of transformers' Trainer adds up; the loss is this
                batch's part of their mean, and of the mean auxiliary loss.
            kwargs: what else transformers' models are given; ignored.

        Raises:
            UserError: ids of another form, or (on a CPU) out of the vocabulary; `output_attentions`, which a recurrence
                has not.
            ValueError: arguments that do not fit each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise UserError(NO_ATTENTIONS)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if past_key_values is not None and not isinstance(past_key_values, RecurrentState):
            raise ValueError(
                "past_key_values must be a RecurrentState, as a forward pass returns it; got "
                f"{type(past_key_values).__name__}"
            )
        if inputs_embeds is None:
            check_form(cast(Tensor, input_ids))
        source = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        rows, columns = source.shape[:2]
        mask = None if attention_mask is None else padding_mask(attention_mask, rows, columns)
        given = {"labels": labels, "past_key_values": past_key_values, "attention_mask": attention_mask}
        packed = {name: kwargs.get(name) for name in PACKED} | {"cu_seqlens": cu_seqlens, "position_ids": position_ids}
        mask = agreed_mask(source, mask, given | packed, self.model.layers)
        if cu_seqlens is None:
            cu_seqlens = find_all_documents(rows, columns, mask, position_ids, kwargs)
        elif rows != 1 or mask is not None:
            raise ValueError("cu_seqlens packs documents into one row without padding: B must be 1 and no mask given")
        items = num_items_in_batch
        labels = None if labels is None else with_next_label(labels)
        if labels is not None and mask is not None:
            labels, items = predicted_labels(labels, mask, items)
        documents = None
        if cu_seqlens is not None:
            documents = find_fragments(cu_seqlens, rows, columns, has_every_document(self.config))
        text = Text(input_ids, inputs_embeds, mask, past_key_values, documents)
        wanted = Wanted(labels, items, logits_to_keep, loss_only, bool(output_hidden_states))
        try:
            (logits, loss, state, streams), losses = self._read(text, wanted)
        except IndexError:
            if labels is not None:
                check_range(labels[labels != -100], self.model.embeddings)
            raise
        auxiliary = torch.stack(losses).sum() if losses else None
        if loss is not None and labels is not None and auxiliary is not None and items is not None:
            loss = loss + auxiliary * label_count(labels) / items
        out = RecurrentOutput(
            loss=loss,
            logits=logits,
            past_key_values=state if use_cache is not False else None,
            hidden_states=tuple(streams) if output_hidden_states else None,
            auxiliary_loss=auxiliary,
        )
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def _read(self, text: Text, wanted: Wanted) -> tuple[Read, list[Tensor]]:
        """What is wanted of a text, and the layers' own losses."""
        reader = self.text_reader
        if reader is not None and not torch.compiler.is_compiling() and reader.may_cut(text.source):
            found = reader.read(self, text, wanted)
            if found is not None:
                return found, []
        ids, documents, keep_hidden = text.ids, text.documents, wanted.hidden_states
        x = embedded(cast(Tensor, ids), self.model.embeddings) if text.embeddings is None else text.embeddings
        if documents is None:
            hidden, state, streams, losses = self.model(x, text.state, text.mask, keep_hidden, ids)
        else:
            hidden, state, streams, losses = self._read_documents(x, text.state, documents, keep_hidden, ids)
        return Read(*logits_and_loss(self.lm_head, self.logit_scale, hidden, wanted), state, streams), losses

    def _read_documents(
        self, x: Tensor, state: RecurrentState | None, documents: Fragments, keep_hidden: bool, ids: Tensor | None
    ) -> tuple[Tensor, RecurrentState, list[Tensor], list[Tensor]]:
        """As `RecurrentModel.forward`, for documents side by side, each from a row of the state."""
        rows = x.shape[0]
        ids = None if ids is None else documents.apart(ids)
        read = (documents.mask, keep_hidden, ids)
        if documents.pieces is None:
            hidden, after, streams, losses = self.model(documents.apart(x), state, *read)
        else:
            begin = None if state is None else state.select_rows(documents.pieces.rows)
            with with_row_pieces(documents.pieces):
                hidden, after, streams, losses = self.model(documents.apart(x), begin, *read)
                hidden, after = states_of_documents(hidden, after)
        hidden, *streams = (documents.together(y, rows) for y in (hidden, *streams))
        after = replace(after, length=documents.longest + (0 if state is None else state.length))
        return hidden, after, streams, losses

    def zero_state(self, batch_size: int) -> RecurrentState:
        """The state before the first token: zeros, or what the model's memory tokens leave, on the model's device."""
        if self.model.memory_tokens is not None:
            # A forward pass over no tokens: weights are there only in one.
            nothing = torch.zeros((batch_size, 0, self.config.hidden_size), device=self.device, dtype=self.dtype)
            start: RecurrentState = self(
                inputs_embeds=nothing, return_dict=True, output_attentions=False
            ).past_key_values
            return start
        return zero_state(self.config, batch_size, self.device, self.dtype)

    def state_size(self) -> int:
        """Numbers in the recurrent state of one sequence."""
        return self.config.state_size()

    def fingerprint(self) -> str:
        """SHA-256 (hex) over the layer descriptions and every tensor: equal only for models that compute the same."""
        tensors = self.state_dict()
        return fingerprint(self.config, tensors, tensors.__getitem__)
