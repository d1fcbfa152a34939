"""One layer of a model: residual blocks, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.access import visitable
from longrecall.layers.descriptions.block import BlockConfig
from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.layers.mixers.base import LayerState, state_under
from longrecall.layers.norm import Norm, build_norm, operand_dtype
from longrecall.layers.passed import Carried, given, taken_arguments, taken_names, wanted
from longrecall.layers.tokens import TokenContext, token_argument
from longrecall.models.sizes import LayerConfig


class RecurrentLayer(nn.Module):
    """x + multiplier * post_norm(module(norm(x))) for each block; mostly a token mixer and an MLP, after RMS norms.

    The module of a block has the block's name here, its norms ``{name}_norm`` and ``{name}_post_norm``.
    """

    def __init__(self, config: LayerConfig, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.blocks = config.blocks
        self.mixer_config = config.mixer
        # Looked up once: every token comes here.
        self.taken = {block.name: taken_names(block.module) for block in config.blocks}
        for block in config.blocks:
            before, after = block.norm, block.post_norm
            norm = None if before is None else build_norm(before, hidden_size, norm_eps)
            self.register_module(f"{block.name}_norm", norm)
            self.register_module(block.name, block.module.build(hidden_size))
            if after is not None:
                self.register_module(f"{block.name}_post_norm", build_norm(after, hidden_size, norm_eps))
        if "mlp" not in self._modules:
            self.register_module("mlp_norm", None)
            self.register_module("mlp", None)

    def module_of(self, block: BlockConfig) -> nn.Module:
        """What a block computes."""
        module: nn.Module = getattr(self, block.name)
        return module

    def norm_of(self, block: BlockConfig) -> Norm | None:
        """The norm before it."""
        norm: Norm | None = getattr(self, f"{block.name}_norm")
        return norm

    def post_norm_of(self, block: BlockConfig) -> Norm | None:
        """The norm after it."""
        norm: Norm | None = getattr(self, f"{block.name}_post_norm", None)
        return norm

    @visitable
    def forward(
        self,
        x: Tensor,
        update: Tensor | None,
        state: LayerState | None,
        mask: Tensor | None,
        position: Tensor,
        dtype: torch.dtype,
        context: TokenContext | None = None,
        carried: Carried | None = None,
    ) -> tuple[Tensor, Tensor | None, LayerState]:
        """The residual stream as x ``[B, T, d]`` (any float dtype) and what is yet to be added to it, and a state.

        Returns the same three. The next norm makes the sum in the same pass over memory. Computed in `dtype`.
        `carried`: values of this pass that earlier layers have given.
        """
        new_state: LayerState = {}
        for index, block in enumerate(self.blocks):
            # What goes into the products of an MLP alone may be rounded to their dtype at once.
            kind = operand_dtype(x, dtype) if isinstance(block.module, MLPConfig) else dtype
            norm = self.norm_of(block)
            if norm is not None:
                x, normed = norm(x, kind, update=update, of_stream=True)
            else:
                x = x if update is None else x + update
                normed = x.to(kind)
            path = f"{block.name}." if index else ""
            before = state_under(state, block.name) if index else state
            y, after = self._run(block, normed, before, mask, position, context, carried)
            new_state.update({f"{path}{name}": tensor for name, tensor in after.items()} if path else after)
            post_norm = self.post_norm_of(block)
            y = y if post_norm is None else post_norm(y)
            update = y if block.multiplier == 1.0 else y * block.multiplier
        return x, update, new_state

    def _run(
        self,
        block: BlockConfig,
        x: Tensor,
        state: LayerState | None,
        mask: Tensor | None,
        position: Tensor,
        context: TokenContext | None,
        carried: Carried | None,
    ) -> tuple[Tensor, LayerState]:
        module, config = self.module_of(block), block.module
        taken = taken_arguments(self.taken[block.name], carried)
        if config.positionwise:
            found = module(x, **({"mask": mask} if "mask" in config.takes else {}))
            return found if isinstance(found, tuple) else (found, {})
        both: tuple[Tensor, LayerState] = module(
            x, state, mask=mask, position=position, **token_argument(config, context), **taken
        )
        return both

    @property
    def passes_on(self) -> bool:
        """Whether a module takes values of earlier layers, or gives some to later ones."""
        return any(wanted(block.module) or given(block.module) for block in self.blocks)
