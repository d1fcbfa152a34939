"""What the launcher of the processes says: `accelerate launch` has settings of its own, honoured or refused here.

Accelerate hands its config file on in environment variables. What means the same as `parallel` in the recipe is taken
over (FSDP2, a parallelism config); what means the same as another key has to agree with it. The rest is refused with a
line that names the key and says what to write into the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from longrecall.errors import RefusedTogether, UserError
from longrecall.training.recipe import ParallelRecipe, Recipe

LAYER = "RecurrentLayer"

_NONE = frozenset({"", "no", "none", "false", "0"})


@dataclass(frozen=True)
class _Fixed:
    """A setting of which one value alone is what longrecall does."""

    variable: str
    key: str
    allowed: tuple[str, ...]
    advice: str


_FSDP = (
    _Fixed("FSDP_VERSION", "fsdp_version", ("2",), "set fsdp_version: 2; longrecall shards with FSDP2"),
    _Fixed(
        "FSDP_SHARDING_STRATEGY",
        "fsdp_sharding_strategy",
        ("full_shard", "1", "none"),
        "leave it out; parallel.shard and parallel.replicate in the recipe say how weights are sharded",
    ),
    _Fixed(
        "FSDP_RESHARD_AFTER_FORWARD",
        "fsdp_reshard_after_forward",
        ("true", "full_shard", "1", "none"),
        "set it to true; every layer drops its weights after its forward pass",
    ),
    _Fixed("FSDP_OFFLOAD_PARAMS", "fsdp_offload_params", ("false",), "raise parallel.shard in the recipe instead"),
    _Fixed(
        "FSDP_AUTO_WRAP_POLICY",
        "fsdp_auto_wrap_policy",
        ("transformer_based_wrap", "none"),
        "set TRANSFORMER_BASED_WRAP or leave it out; every layer is a unit",
    ),
    _Fixed(
        "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "fsdp_transformer_layer_cls_to_wrap",
        (LAYER.lower(), "none", ""),
        f"set {LAYER} or leave it out; every layer is a unit",
    ),
    _Fixed("FSDP_BACKWARD_PREFETCH", "fsdp_backward_prefetch", ("backward_pre", "1", "none"), "leave it out"),
    _Fixed("FSDP_USE_ORIG_PARAMS", "fsdp_use_orig_params", ("true", "none"), "leave it out; FSDP2 has no other way"),
    _Fixed(
        "FSDP_STATE_DICT_TYPE",
        "fsdp_state_dict_type",
        ("sharded_state_dict", "none"),
        "set SHARDED_STATE_DICT or leave it out; longrecall consolidate makes one checkpoint of the shards",
    ),
    _Fixed(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "fsdp_activation_checkpointing_offload",
        ("false", "none"),
        "leave it out; run.gradient_checkpointing in the recipe recomputes activations",
    ),
    _Fixed("FSDP_IGNORED_MODULES", "fsdp_ignored_modules", ("", "none"), "leave it out"),
)
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed_config", "set parallel.shard in the recipe, which does what ZeRO 3 does"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm_config", "set parallel.shard and parallel.context in the recipe"),
    "ACCELERATE_USE_SAGEMAKER": ("sagemaker", "start the processes with torchrun"),
}
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables of launchers that start several processes; one of them is there even where it is a single one."""
_MESH = "PARALLELISM_CONFIG_"
_ACTS = (*_ENGINES, "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_DYNAMO_BACKEND")
"""Variables from which Accelerate would wrap or compile the model itself."""


def launched(recipe: Recipe, world: int, said: Mapping[str, str]) -> Recipe:
    """Return the recipe with what the launcher says about it.

    Args:
        recipe: as the user wrote it.
        world: number of processes.
        said: the environment variables of this process.

    Raises:
        UserError: a setting that contradicts the recipe, or has no counterpart.
    """
    for variable, (key, advice) in _ENGINES.items():
        if _is_on(said, variable):
            raise UserError(f"accelerate launch: {key} is not supported; leave it out and {advice}")
    # Accelerate leaves CPUs to mpirun: without it there is one process, and a place to meet that nobody else comes to.
    meeting = "ACCELERATE_MIXED_PRECISION" in said and "MASTER_ADDR" in said and "MASTER_PORT" in said
    if world == 1 and meeting and not any(name in said for name in _COUNTS):
        raise UserError(
            "accelerate launch: num_processes is above 1, but a single process was started. distributed_type "
            "MULTI_CPU without mpirun does that. Set distributed_type: MULTI_GPU, also on CPUs, or start the "
            "processes with torchrun. If one process is meant, leave MASTER_ADDR out of the environment"
        )
    _check_agreement(recipe, said)
    asked = None
    if _is_on(said, "ACCELERATE_USE_FSDP"):
        _check_fsdp(recipe, said)
        asked = ParallelRecipe(shard=world)
    if _is_on(said, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        asked = _mesh(said)
    if asked is None or _same_mesh(asked, recipe.parallel, world):
        return recipe
    if recipe.parallel != ParallelRecipe():
        raise UserError(
            f"accelerate launch asks for {_written(asked)}, but the recipe for {_written(recipe.parallel)}; "
            "leave it out of one of them"
        )
    return replace(recipe, parallel=asked)


@contextmanager
def apart_from_launcher() -> Iterator[Mapping[str, str]]:
    """Keep Accelerate from acting on the launcher's settings inside the block; yields all variables, for `launched`."""
    said = dict(os.environ)
    for name in _ACTS:
        os.environ.pop(name, None)
    try:
        yield said
    finally:
        os.environ.update({name: said[name] for name in _ACTS if name in said})


def on_cpu() -> bool:
    """Whether the launcher wants the processes on CPUs although there may be GPUs."""
    return _is_on(os.environ, "ACCELERATE_USE_CPU")


def world_size() -> int:
    """Number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_devices(visible: int, environment: Mapping[str, str] | None = None) -> None:
    """Refuse a machine with fewer GPUs than processes; its first process says so.

    Args:
        visible: GPUs that this process sees.
        environment: variables; None = this process's.

    Raises:
        RefusedTogether: two processes would have to share a GPU.
    """
    said = os.environ if environment is None else environment
    local = int(said.get("LOCAL_WORLD_SIZE", "1"))
    if visible < local:
        raise RefusedTogether(
            f"{local} processes were started on this machine, but it has {visible} visible GPU"
            f"{'' if visible == 1 else 's'}; start as many processes as GPUs (--nproc-per-node {visible}), or look at "
            "CUDA_VISIBLE_DEVICES",
            told_here=said.get("LOCAL_RANK", "0") == "0",
        )


def _check_agreement(recipe: Recipe, said: Mapping[str, str]) -> None:
    """What the launcher says outside of its mesh must be what the recipe says."""
    precision = said.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    ours = {"fp32": "no"}.get(recipe.run.precision, recipe.run.precision)
    # "no" is also what a launcher says that was told nothing.
    if precision not in _NONE and precision != ours:
        change = f"set run.precision={precision} in the recipe" if precision in ("bf16", "fp16") else "leave it out"
        raise UserError(
            f"accelerate launch: mixed_precision is {precision}, but run.precision is {recipe.run.precision}; {change}"
        )
    compiler = said.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if compiler not in _NONE and not (compiler == "inductor" and recipe.run.compile):
        raise UserError(
            f"accelerate launch: dynamo_backend is {compiler}; leave it out and set run.compile=true in the recipe"
        )
    steps = said.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if steps.isdigit() and int(steps) not in (1, recipe.run.gradient_accumulation):
        raise UserError(
            f"accelerate launch: gradient_accumulation_steps is {steps}, but run.gradient_accumulation is "
            f"{recipe.run.gradient_accumulation}; set run.gradient_accumulation={steps} in the recipe"
        )


def _check_fsdp(recipe: Recipe, said: Mapping[str, str]) -> None:
    for rule in _FSDP:
        # Without a word about it Accelerate takes version 1.
        value = said.get(rule.variable, "1" if rule.variable == "FSDP_VERSION" else rule.allowed[0])
        if value.lower() not in rule.allowed:
            raise UserError(f"accelerate launch: {rule.key} is {value}, which is not supported; {rule.advice}")
    if _is_on(said, "FSDP_ACTIVATION_CHECKPOINTING") and not recipe.run.gradient_checkpointing:
        raise UserError(
            "accelerate launch: fsdp_activation_checkpointing is true, but run.gradient_checkpointing is false; set "
            "run.gradient_checkpointing=true in the recipe"
        )


def _mesh(said: Mapping[str, str]) -> ParallelRecipe:
    """The parallelism config as a section of the recipe."""
    for name, key in (("TP_SIZE", "tp_size"), ("SP_SIZE", "sp_size")):
        if int(said.get(_MESH + name, "1")) > 1:
            raise UserError(
                f"accelerate launch: parallelism_config_{key} is {said[_MESH + name]}, which is not supported; set "
                "parallel.shard or parallel.context in the recipe"
            )
    sizes = [int(said.get(_MESH + name, "1")) for name in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "CP_SIZE")]
    if sizes[2] > 1 and (strategy := said.get(_MESH + "CP_COMM_STRATEGY", "allgather")) != "allgather":
        raise UserError(
            f"accelerate launch: parallelism_config_cp_comm_strategy is {strategy}, which is not supported; leave it "
            "out: recurrent layers pass their states on, attention gathers keys"
        )
    return ParallelRecipe(*sizes)


def _same_mesh(one: ParallelRecipe, other: ParallelRecipe, world: int) -> bool:
    def sizes(recipe: ParallelRecipe) -> tuple[int, int, int]:
        pieces = recipe.shard * recipe.context
        return recipe.replicate or max(1, world // pieces), recipe.shard, recipe.context

    return sizes(one) == sizes(other)


def _written(recipe: ParallelRecipe) -> str:
    copies = "" if recipe.replicate is None else f"replicate {recipe.replicate} x "
    return f"{copies}shard {recipe.shard} x context {recipe.context}"


def _is_on(said: Mapping[str, str], variable: str) -> bool:
    return said.get(variable, "false").lower() not in _NONE
