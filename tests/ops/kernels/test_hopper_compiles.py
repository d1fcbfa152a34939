"""The kernels in Gluon compile for Hopper without a GPU, where the Triton they are written for is installed.

In a process of their own: where there is no GPU, the tests' Triton interprets, also what Gluon is made of.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from longrecall.ops.decoding.hopper import recurrence as decoding
from longrecall.ops.kernels import hopper
from longrecall.ops.kernels.dependent_launch import PREFETCHING

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper."""


HEADS = {"KEY_HEADS": 64, "STATE_HEADS": 64, "SUBHEADS": 8, "VALUE_HEADS": 8}
SHARED_KEYS = {"KEY_HEADS": 4, "STATE_HEADS": 8, "SUBHEADS": 2, "VALUE_HEADS": 4}
SINGLE = {"KEY_HEADS": 1, "STATE_HEADS": 1, "SUBHEADS": 1, "VALUE_HEADS": 1}

TYPES = {
    **dict.fromkeys(("beta", "weights", "cumulative", "log_decay", "d_beta", "d_decay", "d_weights"), "*fp32"),
    **dict.fromkeys(("initial", "final", "d_initial", "d_final"), "*fp32"),
    **dict.fromkeys(("norms", "d_taps"), "*fp32"),
    **dict.fromkeys(("B", "T", "chunks", "segments"), "i32"),
    **dict.fromkeys(("q_row", "k_row", "v_row", "gate_row", "beta_row"), "i32"),
    **dict.fromkeys(("scale", "strongest", "eps", "divisor", "low", "high", "beta_factor"), "fp32"),
}
"""Types of arguments that are no bfloat16 tensors."""


def compiled(module: str, name: str, constants: dict[str, Any], warps: int) -> dict[str, int]:
    """Shared memory in bytes and products of a kernel compiled for compute capability 9.0.

    Addresses are aligned to 16 bytes; `module` is a path in `longrecall.ops`.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, json.dumps([module, name, constants, warps])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_here(module: str, name: str, constants: dict[str, Any], warps: int) -> dict[str, int]:
    """As `compiled`, in this process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(f"longrecall.ops.{module}"), name)
    places = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*bf16") for n in places}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return {"shared": built.metadata.shared, "products": built.asm["ptx"].count("wgmma.mma_async")}


if __name__ == "__main__":
    print(json.dumps(compile_here(*json.loads(sys.argv[1]))))
else:
    pytestmark = pytest.mark.skipif(hopper.other_triton() is not None, reason=str(hopper.other_triton()))


@pytest.mark.parametrize("heads", [HEADS, SHARED_KEYS, SINGLE], ids=str)
def test_keys_kernel(heads: dict[str, int]) -> None:
    found = compiled("delta_rule.hopper.keys", "keys_kernel", heads, 8)
    assert found["shared"] <= SHARED_MEMORY
    # Products of a pair: 7 in each of two blocks and 4 more, of 4 steps of 16 each.
    assert found["products"] == 4 * (2 * 7 + 4)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_invert_kernel(width: int) -> None:
    found = compiled("delta_rule.hopper.inverse", "invert_kernel", {"KEY_HEADS": 4, "HEADS": 8, "K": width}, 1)
    # A warp of up to 168 registers leaves room for twelve programs on a multiprocessor: of memory there is that room.
    assert found["shared"] * 12 <= SHARED_MEMORY if width <= 128 else found["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("heads", [HEADS, SHARED_KEYS], ids=str)
def test_walks(heads: dict[str, int]) -> None:
    sizes = {**{name: heads[name] for name in ("KEY_HEADS", "SUBHEADS", "VALUE_HEADS")}, "HEADS": heads["STATE_HEADS"]}
    # Products of a chunk over 128 channels and over 64 tokens, in steps of 16.
    for read, absent, products in (
        (True, {}, 3 * 8 + 3 * 4),
        (True, {"initial": None}, 3 * 8 + 3 * 4),
        (False, {}, 8 + 2 * 4),
        (False, {"initial": None}, 8 + 2 * 4),
    ):
        found = compiled("delta_rule.hopper.walk", "walk_kernel", {**sizes, **absent, "READ": read}, 8)
        assert found["products"] == products
        assert found["shared"] <= SHARED_MEMORY
    for absent in ({}, {"d_final": None, "d_initial": None}):
        found = compiled("delta_rule.hopper.walk_back", "walk_back_kernel", {**sizes, **absent}, 8)
        assert found["products"] == 2 * 8 + 4 * 4
        assert found["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("grafted", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_expansion(width: int, grafted: bool) -> None:
    constants = {"HEADS": 2, "E": 4, "D": width, "GRAFTED": grafted, "NORMALISE": not grafted}
    forward = compiled("expansion.hopper.forward", "forward_kernel", {**constants, "KEEP": not grafted}, 8)
    backward = compiled("expansion.hopper.backward", "backward_kernel", constants, 8)
    for found in (forward, backward):
        # One tile before the loop and one in it, in steps of 16.
        assert found["products"] == 2 * width // 16
        # Two programs share a multiprocessor.
        assert found["shared"] * 2 <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("gate", "delta", "K", "V"),
    [
        (0, True, 64, 64),
        (1, False, 64, 128),
        (2, True, 128, 128),
        (3, False, 256, 64),
        (3, True, 64, 64),
        (4, False, 512, 64),
    ],
)
def test_step(gate: int, delta: bool, K: int, V: int) -> None:
    width = decoding.width(K, V, delta=delta)
    constants = {
        "HEADS": 8, "KEY_HEADS": 4, "SHARE": 2, "VALUE_HEADS": 4, "K": K, "V": V, "GATE": gate,
        "NORMALISE": delta, "SKIP": True, "BV": width, "ROWS": decoding.ROWS, "EARLY": PREFETCHING,
    }  # fmt: skip
    if delta:
        warps = decoding.delta_warps(K, width)
        found = compiled("decoding.hopper.delta", "delta_step_kernel", {**constants, "WARPS": warps}, warps)
        # A tile of the state, and what its sums over keys and decays need.
        assert 2 * K * width <= found["shared"] <= 2 * K * width + 2048
    else:
        chunk, ring, warps = decoding.chunks(K, width)
        constants |= {"CHUNK": chunk, "RING": ring, "WARPS": warps}
        found = compiled("decoding.hopper.gated", "gated_step_kernel", constants, warps)
        # The ring, and keys, queries and decays of all keys.
        assert 2 * ring * chunk * width <= found["shared"] <= 2 * ring * chunk * width + 3 * 4 * K + 1024
