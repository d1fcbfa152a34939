"""What `accelerate launch` says: taken over where it means the same, refused where it does not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import astuple

import pytest

from longrecall.errors import RefusedTogether, UserError
from longrecall.training.parallel.launcher import apart_from_launcher, check_devices, launched
from longrecall.training.recipe import Recipe

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "RecurrentLayer",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What `accelerate launch` with ``fsdp_version: 2`` sets when it is told nothing else."""
MESH = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "2",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
}
TAKEN: list[tuple[dict[str, str], tuple[str, ...], tuple[int | None, int, int]]] = [
    ({}, (), (None, 1, 1)),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, ("run.precision=bf16",), (None, 1, 1)),
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, ("run.precision=bf16",), (None, 1, 1)),
    (FSDP, (), (None, 8, 1)),
    (FSDP, ("parallel.shard=8",), (None, 8, 1)),
    (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, ("run.gradient_checkpointing=true",), (None, 8, 1)),
    (MESH, (), (2, 2, 2)),
    (FSDP | MESH, ("parallel.shard=2", "parallel.context=2"), (None, 2, 2)),
    ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ("run.compile=true",), (None, 1, 1)),
]
"""Variables, overrides of the recipe -> replicate, shard and context of the run on 8 processes."""
REFUSED: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, (), "mixed_precision is bf16, .*; set run.precision=bf16 in the recipe"),
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, (), "mixed_precision is fp8, but run.precision is fp32; leave it out"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, (), "deepspeed_config is not .* set parallel.shard in the recipe"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, (), "megatron_lm_config is not supported"),
    ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, (), "dynamo_backend is inductor; .* set run.compile=true"),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, (), "set run.gradient_accumulation=4 in the recipe"),
    ({"ACCELERATE_USE_FSDP": "true"}, (), "fsdp_version is 1, which is not supported; set fsdp_version: 2"),
    (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, (), "fsdp_reshard_after_forward is false"),
    (FSDP | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, (), "fsdp_sharding_strategy is HYBRID_SHARD.*replicate in the"),
    (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, (), "fsdp_offload_params is true"),
    (
        FSDP | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Other"},
        (),
        "layer_cls_to_wrap is Other.*RecurrentLayer",
    ),
    (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, (), "set run.gradient_checkpointing=true in the recipe"),
    (FSDP | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, (), "fsdp_state_dict_type is FULL_STATE_DICT.*SHARDED"),
    (FSDP, ("parallel.shard=4",), "asks for shard 8 x context 1, but the recipe for shard 4 x context 1"),
    (MESH | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, (), "parallelism_config_tp_size is 2, which is not supported"),
    (MESH | {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"}, (), "cp_comm_strategy is alltoall"),
]


def test_what_means_the_same_is_taken_over(make_recipe: Callable[..., Recipe]) -> None:
    for said, overrides, mesh in TAKEN:
        recipe = make_recipe("data.context_length=64", *overrides)
        found = launched(recipe, 8, said)
        assert astuple(found.parallel) == mesh, (said, overrides)


def test_the_rest_is_refused_by_its_key(make_recipe: Callable[..., Recipe]) -> None:
    for said, overrides, line in REFUSED:
        with pytest.raises(UserError, match=line) as refusal:
            launched(make_recipe("data.context_length=64", *overrides), 8, said)
        assert str(refusal.value).startswith("accelerate launch")


def test_one_process_where_several_were_asked_for_is_refused(make_recipe: Callable[..., Recipe]) -> None:
    """So Accelerate starts distributed_type MULTI_CPU without mpirun."""
    met, ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, {"ACCELERATE_MIXED_PRECISION": "no"}
    recipe = make_recipe()
    with pytest.raises(UserError, match="launch: num_processes is above 1, but a single process was started"):
        launched(recipe, 1, ours | met)
    for said in (met, ours, ours | met | {"WORLD_SIZE": "1"}):
        assert launched(recipe, 1, said) == recipe


def test_accelerate_does_not_wrap_what_was_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (FSDP | MESH).items():
        monkeypatch.setenv(name, value)
    with apart_from_launcher() as said:
        assert said["ACCELERATE_USE_FSDP"] == "true"
        assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"} & os.environ.keys()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_more_processes_than_gpus_are_refused_once_a_machine() -> None:
    line = "4 processes were started on this machine, but it has 1 visible GPU; start as many processes as GPUs"
    for rank, told in (("0", True), ("3", False)):
        with pytest.raises(RefusedTogether, match=re.escape(line)) as refusal:
            check_devices(1, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": rank})
        assert refusal.value.told_here is told
    check_devices(4, {"LOCAL_WORLD_SIZE": "4"})
    check_devices(1, {})
