"""What each process of test_sharded_weights.py does: models under FSDP2 against the same models in one process.

Started as a script with a kind of device. On CPUs the processes are forked, which saves imports; CUDA cannot be
forked, so there every process is started with its RANK.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from longrecall import RecurrentConfig, RecurrentLM
from longrecall.errors import UserError
from longrecall.inference.step import DecodingStep
from longrecall.ops.norms.op import rms_norm
from tests.conftest import MIXERS
from tests.layers import test_shared_block
from tests.models import test_memory_tokens
from tests.processes import on_processes

ROWS = 2
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
MOE = {"type": "moe", "num_experts": 4, "top_k": 2, "inner_size": 8, "balance": 0.1, "shared_size": 6}
WIDE: list[dict[str, Any]] = [
    {"type": "gated_delta_net", "num_heads": 2, "key_dim": 64, "value_dim": 64},
    {"type": "gla", "num_heads": 2, "key_dim": 64, "value_dim": 64, "conv_width": 4},
    {"type": "mamba2", "inner_dim": 256, "head_dim": 64, "state_dim": 64},
    {"type": "delta_net", "num_heads": 2, "key_dim": 64, "value_dim": 64},
]
MIXED = ("gla_conv", "gated_delta_net", "delta_net", "mamba", "mamba2", "rwkv7", "kda", "hyena")


def model_of(*layers: dict[str, Any], **more: Any) -> RecurrentLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "vocab_size": 61, "initializer_range": 0.1, "tie_word_embeddings": False}
    return RecurrentLM(RecurrentConfig(**sizes | more, layers=list(layers)))


def shared_block(**more: Any) -> RecurrentLM:
    """Two layers borrow the weights of the first: under checkpointing both bring them back in the backward."""
    layer = test_shared_block.layer
    torch.manual_seed(0)
    config = test_shared_block.config(layer(), layer(weights_of=0), layer(weights_of=0))
    return RecurrentLM(config)


MODELS: dict[str, Callable[[], RecurrentLM]] = {
    "mixers": lambda: model_of(*({"mixer": MIXERS[name], "mlp_size": 16} for name in MIXED)),
    "hybrid, tied": lambda: model_of(
        *({"mixer": MIXERS[name], "mlp_size": 16} for name in ("gla", "attention", "retrieval")),
        tie_word_embeddings=True,
    ),
    "experts": lambda: model_of(
        {"blocks": [{"name": "mixer", "module": MIXERS["mla"]}, {"name": "mlp", "module": MOE}]}
    ),
    "shared_block": shared_block,
    "memory tokens": lambda: test_memory_tokens.build("hymba").float(),
    # As wide as the kernels are built for; on GPUs alone.
    "wide": lambda: model_of(*({"mixer": mixer, "mlp_size": 256} for mixer in WIDE), hidden_size=128),
}


def by_layers(model: RecurrentLM, reshard: bool) -> None:
    """As most people do: the layers, and the model for the rest."""
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)


def by_accelerate(model: RecurrentLM, reshard: bool) -> None:
    """As accelerate does: embeddings, and the last norm with the head, are units too."""
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    inner, tail = model.model, [model.model.norm, model.lm_head]
    if model.config.tie_word_embeddings:
        tail.insert(1, inner.embeddings)
    else:
        fully_shard(inner.embeddings, reshard_after_forward=reshard)
    fully_shard(tail, reshard_after_forward=False)
    fully_shard(model)


def by_module(model: RecurrentLM, reshard: bool) -> None:
    """Every module that has weights is a unit; the root has those that are tied."""
    together = (model.model, model.model.embeddings, model.lm_head) if model.config.tie_word_embeddings else ()
    for module in reversed(list(model.modules())):
        if next(module.parameters(recurse=False), None) is not None and module not in together:
            fully_shard(module, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)


Way = tuple[Callable[[RecurrentLM, bool], None], bool, bool, bool]
"""How a model is wrapped, whether weights go after a forward pass, whether the loss is asked for alone, checkpoints."""

LAYERS: list[Way] = [(by_layers, True, False, False), (by_layers, False, True, False)]
OTHERS: dict[str, Way] = {
    "mixers": (by_module, True, True, True),
    "hybrid, tied": (by_accelerate, True, True, False),
    "experts": (by_accelerate, False, True, False),
    "shared_block": (by_layers, True, True, True),
    "memory tokens": (by_module, True, False, False),
}


def close(name: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-6))
    # float32: sums over two processes in another order. On a GPU a product may be cut up in another way too.
    assert error < (1e-4 if found.is_cuda else 1e-5), f"{name}: relative error {error}"


def step_of(model: RecurrentLM, parts: list[Tensor], alone: bool, optimizer: Any) -> Tensor:
    """One step over the mean of the losses of `parts`; its loss."""
    optimizer.zero_grad()
    total = torch.zeros((), device=parts[0].device)
    for ids in parts:
        loss = model(ids, labels=ids, loss_only=alone).loss / len(parts)
        loss.backward()
        total += loss.detach()
    return total


class Single(NamedTuple):
    """A model in one process after two steps over all rows, and what they found."""

    model: RecurrentLM
    start: RecurrentLM
    """The model before the steps."""
    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    """Of the first step."""


def rows(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    # Kernels leave short texts to plain torch.
    return torch.randint(1, 31, (ROWS, 130 if device.type == "cuda" else 20), generator=generator).to(device)


@functools.cache
def in_one_process(name: str, device: torch.device, world: int) -> Single:
    """Two steps of a model that nobody has cut: once for all ways to cut it."""
    model = MODELS[name]().to(device).train()
    start, losses, gradients = copy.deepcopy(model), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        losses.append(step_of(model, list(rows(device).split(ROWS // world)), False, optimizer))
        if not step:
            gradients = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
        optimizer.step()
    return Single(model.eval(), start, losses, gradients)


def check(name: str, way: Way, device: torch.device, rank: int, world: int) -> None:
    wrap, reshard, alone, checkpointed = way
    where = f"{name}, {wrap.__name__}, reshard {reshard}, loss_only {alone}, checkpointing {checkpointed}"
    found = in_one_process(name, device, world)
    single, sharded = found.model, copy.deepcopy(found.start)
    if checkpointed:
        sharded.gradient_checkpointing_enable()
    wrap(sharded, reshard)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    ids = rows(device)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    for step, expected in enumerate(found.losses):
        loss = step_of(sharded, [ids.split(ROWS // world)[rank]], alone, optimizer)
        dist.all_reduce(loss)
        close(f"{where}: loss {step}", loss / world, expected)
        for key, parameter in sharded.named_parameters() if not step else ():
            gradient = found.gradients[key]
            if gradient is None:
                assert parameter.grad is None or not parameter.grad.full_tensor().any(), (where, key)
                continue
            assert parameter.grad is not None, f"{where}: no gradient of {key}"
            close(f"{where}: gradient of {key}", parameter.grad.full_tensor(), gradient)
        optimizer.step()
    if not reshard:
        return
    sharded.eval()
    with torch.no_grad():
        # The loss of the second step has shown that the weights agree; equal tokens need exactly equal ones.
        for mine, theirs in zip(single.parameters(), sharded.parameters(), strict=True):
            mine.copy_(theirs.full_tensor())
        first = sharded(ids[:, :9])
        later = sharded(ids[:, 9:], past_key_values=first.past_key_values, logits_to_keep=1)
        close(f"{where}: logits", later.logits, single(ids, logits_to_keep=1).logits)
        start = sharded.zero_state(2)
        close(f"{where}: from zero_state", sharded(ids, past_key_values=start).logits, single(ids).logits)
    assert torch.equal(sharded.generate(ids[:, :9], **GREEDY), single.generate(ids[:, :9], **GREEDY)), where
    try:
        DecodingStep(sharded, 1, room=64)
    except UserError as error:
        assert "a decoding step reads weights without calling the modules" in str(error), error
    else:
        raise AssertionError(f"{where}: a step of weights that are elsewhere")


def refuse_shards(device: torch.device) -> None:
    """An op says of a DTensor what is wrong, on every backend."""
    x = torch.randn(64, 32, device=device)
    weight = distribute_tensor(
        torch.ones(32, device=device), dist.init_device_mesh(device.type, (dist.get_world_size(),))
    )
    try:
        rms_norm(x, nn.Parameter(weight), 1e-5)
    except UserError as error:
        assert "rms_norm: weight is a DTensor, not a tensor that is whole; a module's weights" in str(error), error
    else:
        raise AssertionError("a shard was read")


def run(device: torch.device, rank: int, world: int) -> None:
    refuse_shards(device)
    for name in MODELS if device.type == "cuda" else OTHERS:
        for way in [*LAYERS, OTHERS.get(name, (by_module, True, True, True))]:
            if device.type == "cpu" and way is LAYERS[1] and name != "hybrid, tied":
                continue  # weights that stay are what no module can miss; the others' loss alone is among `OTHERS`
            if device.type == "cpu" and way is LAYERS[0] and name == "memory tokens":
                continue  # with every module a unit, the weights are away between two uses all the more
            check(name, way, device, rank, world)


def main(kind: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    run(device, rank, world)
    dist.destroy_process_group()


def on_cpu() -> None:
    """Fork two processes that do it, and have what one process finds."""
    for name in OTHERS:
        in_one_process(name, torch.device("cpu"), 2)
    on_processes(2, partial(main, "cpu"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
