"""How large a checkpoint may say that it is, in one table: looked at before any work that grows with what a file says.

Every limit is far above what models have (the deepest have some hundred layers, the widest residual streams some
20,000 channels), and low enough that a config.json of a few bytes cannot keep a machine busy or fill its memory, and
that no tensor of such sizes has more numbers than 64 bits count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longrecall.errors import UserError
from longrecall.units import format_bytes

if TYPE_CHECKING:
    import torch

LAYERS = 4096
VOCABULARY = 2**24
WIDTH = 2**18
"""Channels: of the residual stream, of a head, of a state, of an MLP; ranks of projections."""
HEADS = 2**14
"""Heads, groups, chunks chosen, experts."""
PARTS = 2**10
"""What a layer has several of, each as large as a mixer's: memories, depths of a filter's network."""
TAPS = 2**16
"""Taps of a convolution, tokens learnt in front of a context."""
LENGTH = 2**31 - 1
"""Tokens; also the limit of every count without one of its own."""

NUMBERS = 2**44
"""Numbers in all tensors of a checkpoint, or in the state of one sequence: 64 TiB in float32."""
MIXERS = 4 * LAYERS
"""Mixers and MLPs of a model, those inside others included."""
TENSORS = 2**20
SHARDS = 2**14
DESCRIPTION_BYTES = 2**25
"""Bytes of a JSON file, and of the header of a safetensors file."""
NESTING = 48
"""Brackets around brackets in a JSON file."""

MOST: Mapping[str, int] = {
    name: most
    for most, names in {
        LAYERS: "num_hidden_layers n_layer layers repeat full_attention_interval decoder_sparse_step "
        "attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset first_k_dense_replace weights_of",
        VOCABULARY: "vocab_size pad_vocab_size_multiple",
        WIDTH: "hidden_size d_model intermediate_size mlp_size inner_size inner_dim head_dim headdim "
        "key_dim value_dim state_dim state_size d_state dt_rank time_step_rank mix_rank "
        "decay_rank rate_rank gate_rank encoder_dim input_dim channels filter_width filter_bands "
        "expand value_rank latent_size shared_size output_dim mamba_dt_rank moe_intermediate_size moe_latent_size "
        "moe_shared_expert_intermediate_size shared_expert_intermediate_size "
        "shared_intermediate_size kv_rank q_rank nope_dim rope_dim input_size linear_key_head_dim "
        "linear_value_head_dim ssm_state_size mamba_head_dim mamba_d_head mamba_d_ssm "
        "mamba_d_state mamba_expand lru_width attention_hidden_size decay_low_rank_dim "
        "a_low_rank_dim v_low_rank_dim gate_low_rank_dim proj_low_rank_dim expand_ratio "
        "mamba_dt_rank linear_head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "adapter_rank",
        HEADS: "num_heads value_heads num_v_heads kv_heads num_kv_heads groups n_groups ngroups top_k "
        "active num_experts num_local_experts n_routed_experts n_shared_experts "
        "num_experts_per_tok num_experts_per_token active_groups n_group topk_group "
        "num_attention_heads num_key_value_heads linear_num_key_heads linear_num_value_heads "
        "mamba_num_heads mamba_n_heads mamba_n_groups topk "
        "linear_num_heads num_shared_experts num_expert_group n_mamba_heads mamba_ngroups",
        PARTS: "memories filter_depth steps bound_rows bound_row num_memories num_householder num_mem_blocks",
        TAPS: "conv_width conv_kernel conv_size d_conv kernel shift_dim meta_tokens memory_tokens num_memory_tokens "
        "linear_conv_kernel_dim mamba_d_conv conv1d_width short_conv_kernel_size",
        LENGTH: "context_length max_position_embeddings window window_size chunk max_length attention_window_size "
        "model_max_length",
    }.items()
    for name in names.split()
}
"""Name of a count, in a config.json of any format or in a description -> the largest value that it may have."""


def check_count(name: str, value: int) -> None:
    """Raise UserError when the count `name` is above its limit."""
    most = MOST.get(name, LENGTH)
    if value > most:
        raise UserError(f'"{name}" is {value}; it must be at most {most}')


def check_mixers(layers: Iterable[object]) -> None:
    """Raise UserError when descriptions of layers hold more mixers, one inside another, than any model has."""
    mixers = 0
    for index, layer in enumerate(layers):
        waiting: list[tuple[object, int]] = [(layer, 0)]
        while waiting:
            value, depth = waiting.pop()
            if not isinstance(value, Mapping | list):
                continue
            mixers += isinstance(value, Mapping) and "type" in value
            if depth > NESTING:
                raise UserError(f"layer {index}: mixers lie more than {NESTING} deep inside one another")
            if mixers > MIXERS:
                raise UserError(f"layers 0 to {index} have more than {MIXERS} mixers, those inside others included")
            inner = value.values() if isinstance(value, Mapping) else value
            waiting += [(item, depth + 1) for item in inner]


def check_numbers(shapes: Iterable[Sequence[int]], what: str) -> int:
    """Return how many numbers tensors of these shapes have; UserError when more than any machine holds."""
    total = sum(math.prod(shape) for shape in shapes)
    if total > NUMBERS:
        raise UserError(f"{what} would have {total:.1e} numbers; longrecall works with at most {NUMBERS:.1e}")
    return total


def check_nesting(value: object, where: str) -> None:
    """Raise UserError when parsed JSON is nested deeper than `NESTING`."""
    level, depth = [value], 0
    while level:
        if depth > NESTING:
            raise UserError(f"{where} has more than {NESTING} nested brackets; no checkpoint needs so many")
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        depth += 1


def read_description_text(path: Path) -> str:
    """Return the text of a JSON file.

    Raises:
        UserError: the file is larger than `DESCRIPTION_BYTES`, or no file but a device or a pipe.
        OSError, UnicodeDecodeError: as for every file.
    """
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise UserError(f"{path} is not an ordinary file; a checkpoint needs one there")
    with path.open("rb") as file:
        data = file.read(DESCRIPTION_BYTES + 1)
    if len(data) > DESCRIPTION_BYTES:
        raise UserError(f"{path} is larger than {format_bytes(DESCRIPTION_BYTES)}; a checkpoint's is never that large")
    return data.decode("utf-8")


def check_memory(needed: int, what: str, device: torch.device | str = "cpu") -> None:
    """Raise UserError when `needed` bytes are more than the whole memory of the machine or of the GPU."""
    import torch

    place = torch.device(device)
    there = machine_memory()
    if place.type == "cuda":
        there = int(torch.cuda.get_device_properties(place).total_memory)
    if there is not None and needed > there:
        raise UserError(f"{what} needs {format_bytes(needed)} of memory, but {place} has {format_bytes(there)} in all")


def machine_memory() -> int | None:
    """Return the bytes of memory that this machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
