"""Shared fixtures: one thread (tiny tensors, shared machines) and one description of every mixer."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests import warm
from tests.interpreter import quicken

# To ask the driver itself whether there is a GPU would keep forked processes from using it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    # Triton decides when it is imported whether kernels are interpreted, and any test may import it first.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Compiled files are kept, also where the environment is against it: pytest rewrites every assertion of the suite, which
# takes each worker half of its time to collect the tests.
sys.dont_write_bytecode = False

# Hypothesis would read every file of the project for numbers to try, in each worker of a new clone, for seconds. What
# it tries would depend on what else a worker has imported.
providers._get_local_constants = lambda: providers._local_constants

# On a busy machine any example may take long: a time says nothing there.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:
    # To take down what the tests have imported takes seconds, and nobody asks how a worker ends. This runs after all
    # that is registered from here on, such as the removal of temporary folders.
    atexit.register(os._exit, 0)

MIXERS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16},
    "gla_conv": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16, "conv_width": 4},
    "gla_merged": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16, "merged": True},
    "retnet": {"type": "retnet", "num_heads": 2, "key_dim": 8, "value_dim": 16},
    "retnet_merged": {"type": "retnet", "num_heads": 2, "key_dim": 8, "value_dim": 16, "merged": True},
    "delta_net": {"type": "delta_net", "num_heads": 2, "key_dim": 8, "value_dim": 8},
    "gated_delta_net": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8},
    "gla_subheads": {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16}
    | {"expansion": {"kind": "headwise", "factor": 2}},
    "delta_net_grafted": {"type": "delta_net", "num_heads": 2, "key_dim": 8, "value_dim": 8}
    | {"expansion": {"kind": "headwise", "factor": 3, "grafted": True}},
    "gated_delta_net_subheads": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 8}
    | {"value_dim": 8, "expansion": {"kind": "headwise", "factor": 2}},
    "mamba2": {"type": "mamba2", "inner_dim": 64, "head_dim": 16, "state_dim": 4},
    "mamba2_groups": {"type": "mamba2", "inner_dim": 64, "head_dim": 16, "state_dim": 4, "groups": 2},
    "hgrn2": {"type": "hgrn2", "num_heads": 3, "key_dim": 6, "value_dim": 10},
    "hgrn2_conv": {"type": "hgrn2", "num_heads": 2, "key_dim": 8, "value_dim": 8, "lower_bound": 0.6, "conv_width": 4},
    "mamba": {"type": "mamba", "inner_dim": 50, "state_dim": 3, "dt_rank": 5},
    "rwkv5": {"type": "rwkv5", "input_dim": 32, "num_heads": 2, "key_dim": 7, "value_dim": 9},
    "rwkv6": {"type": "rwkv6", "input_dim": 32, "num_heads": 3, "key_dim": 6, "value_dim": 10}
    | {"mix_rank": 5, "decay_rank": 7},
    "base_conv": {"type": "base_conv", "channels": 32},
    "base_conv_wide": {"type": "base_conv", "channels": 32, "kernel": 21},
    "h3": {"type": "h3", "num_heads": 3, "head_dim": 5, "state_dim": 6, "shift_dim": 4},
    "base_conv_implicit": {"type": "base_conv", "channels": 32, "implicit": True, "max_length": 60},
    "hyena": {"type": "hyena", "inner_dim": 20, "max_length": 50, "filter_width": 12, "filter_bands": 3},
    "kda": {"type": "kda", "num_heads": 3, "key_dim": 6, "value_dim": 10},
    "kda_subheads": {"type": "kda", "num_heads": 2, "key_dim": 6, "value_dim": 8, "conv_width": 0, "gate_bias": False}
    | {"decay_floor": -5.0, "expansion": {"kind": "headwise", "factor": 2, "grafted": True}}
    | {"negative_eigenvalues": True, "gate_rank": 5},
    "rwkv7": {"type": "rwkv7", "input_dim": 32, "num_heads": 3, "key_dim": 6, "value_dim": 10}
    | {"decay_rank": 4, "rate_rank": 5, "gate_rank": 7},
    "mom": {"type": "mom", "num_heads": 2, "key_dim": 8, "value_dim": 16, "memories": 3},
    "mom_linear": {"type": "mom", "num_heads": 2, "key_dim": 7, "value_dim": 10, "memories": 3, "active": 1}
    | {"shared": False, "rule": "gated_linear", "conv_width": 0, "output_gate": False, "balance": 0.0},
    "rg_lru": {"type": "rg_lru", "inner_dim": 30, "num_heads": 3},
    "rwkv4": {"type": "rwkv4", "input_dim": 32, "inner_dim": 24},
    "gated_delta_product": {"type": "gated_delta_product", "num_heads": 2, "key_dim": 8, "value_dim": 8},
    "attention": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8},
    "attention_meta": {"type": "attention", "num_heads": 4, "head_dim": 8, "window": 7, "meta_tokens": 3},
    "attention_window": {"type": "attention", "num_heads": 4, "head_dim": 8, "window": 9},
    "attention_options": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 8, "rotary_share": 0.5}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "qk_norm": "head", "qk_norm_offset": 1.0}
    | {"qk_norm_eps": 1e-5, "output_gate": True, "scale": 0.4, "key_multiplier": 0.9, "soft_cap": 4.0}
    | {"out_bias": True, "value_dim": 6},
    "mla": {"type": "mla", "num_heads": 3, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 5, "q_rank": 10},
}
MIXERS["handover"] = {"type": "handover", "old": MIXERS["gla"], "new": MIXERS["mamba2"]}
MIXERS["hymba"] = {"type": "hymba", "attention": MIXERS["attention_meta"], "ssm": MIXERS["mamba2"]}
MIXERS["parallel"] = {
    "type": "parallel",
    "attention": MIXERS["attention"],
    "ssm": MIXERS["mamba2_groups"]
    | {"gated_norm": "before_gate", "out_bias": True, "part_multipliers": [0.5, 1.25, 0.75, 1.5, 0.25]},
    "attention_input_multiplier": 0.75,
    "ssm_output_multiplier": 1.5,
}
MIXERS["retrieval"] = {"type": "retrieval", "base": MIXERS["gla_conv"], "chunk": 5, "top_k": 2, "encoder_dim": 12} | {
    "num_heads": 6,
    "head_dim": 7,
    "kv_heads": 3,
    "blend": "input",
}
GROWING = ("attention", "mla", "base_conv_implicit", "hyena", "hymba", "parallel", "retrieval")
RECURRENT = {name: mixer for name, mixer in MIXERS.items() if not name.startswith(GROWING)}
"""Those whose whole state has a fixed size."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests, but no garbage: nearly all that is made by then stays, and looking at it takes a tenth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first: one that begins last keeps all other workers waiting."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Leave the tests themselves and all that they have imported out of garbage collection.

    There are millions of such objects, and transformers' Trainer collects garbage at the end of each run.
    """
    gc.freeze()
    warm.prepare()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After each file, leave what has stayed of it out of garbage collection too.

    Packages keep much of what they load and compile. Late in a run it would take half a second to look through it, and
    each training run has it looked through.
    """
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


def pytest_unconfigure() -> None:
    """Let the interpreter take everything down at its end, but for a worker, which just ends."""
    warm.close()
    if not WORKER:
        gc.unfreeze()


class PlainBytes:
    """The byte tokenizer without special tokens: nothing opens a text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors run fastest on one thread, and bit-exact comparisons need a fixed order of sums."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[pytest.MonkeyPatch]:
    """Kernels in Triton's interpreter take less than half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield patch
