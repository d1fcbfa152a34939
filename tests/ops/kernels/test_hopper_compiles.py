"""Kernels in Gluon and products of a decoding step compile for GPUs without one: slowly, with every Triton.

In a process of their own: where there is no GPU, the tests' Triton interprets, also what Gluon is made of.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[3]
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Every release of Triton that the kernels serve, the newest last; add one when it appears."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper."""

TYPES = {
    **dict.fromkeys(("beta", "weights", "cumulative", "log_decay", "d_beta", "d_decay", "d_weights"), "*fp32"),
    **dict.fromkeys(("initial", "final", "d_initial", "d_final"), "*fp32"),
    **dict.fromkeys(("norms", "d_taps"), "*fp32"),
    **dict.fromkeys(("B", "T", "chunks", "segments"), "i32"),
    **dict.fromkeys(("q_row", "k_row", "v_row", "gate_row", "beta_row"), "i32"),
    **dict.fromkeys(("scale", "strongest", "eps", "divisor", "low", "high", "beta_factor"), "fp32"),
}
"""Types of arguments that are no bfloat16 tensors."""

HEADS = {
    "own keys": {"KEY_HEADS": 64, "STATE_HEADS": 64, "SUBHEADS": 8, "VALUE_HEADS": 8},
    "shared keys": {"KEY_HEADS": 4, "STATE_HEADS": 8, "SUBHEADS": 2, "VALUE_HEADS": 4},
    "single": {"KEY_HEADS": 1, "STATE_HEADS": 1, "SUBHEADS": 1, "VALUE_HEADS": 1},
}


@dataclass(frozen=True)
class Case:
    """A kernel, its constants and what must come out."""

    name: str
    """A path in `longrecall.ops`, then the kernel."""
    constants: dict[str, Any]
    warps: int = 8
    products: int | None = 0
    """Instructions that start a product of warp groups; None = any number."""
    most_shared: int = SHARED_MEMORY
    least_shared: int = 0
    quick: bool = field(default=False)
    """Compiled in the default suite too."""
    types: dict[str, str] | None = None
    """Of the arguments of a kernel that is not in Gluon; those that are not named here are bfloat16 tensors."""
    stages: int = 3
    """Loads of a loop that are under way at once."""
    capability: int = 90


def cases() -> list[Case]:
    """All that is compiled."""
    from longrecall.ops.decoding.hopper import recurrence as decoding
    from longrecall.ops.kernels.dependent_launch import PREFETCHING

    # Products of a pair: 7 in each of two blocks and 4 more, of 4 steps of 16 each.
    found = [
        Case("delta_rule.hopper.keys.keys_kernel", heads, products=4 * (2 * 7 + 4), quick=name == "own keys")
        for name, heads in HEADS.items()
    ]
    for width in (64, 128, 256):
        # A warp of up to 168 registers leaves room for twelve programs on a multiprocessor, so of memory too.
        room = SHARED_MEMORY // 12 if width <= 128 else SHARED_MEMORY
        constants = {"KEY_HEADS": 4, "HEADS": 8, "K": width}
        found.append(Case("delta_rule.hopper.inverse.invert_kernel", constants, 1, most_shared=room, quick=width == 64))
    for name in ("own keys", "shared keys"):
        heads = HEADS[name]
        sizes = {key: heads[key] for key in ("KEY_HEADS", "SUBHEADS", "VALUE_HEADS")} | {"HEADS": heads["STATE_HEADS"]}
        # Products of a chunk over 128 channels and over 64 tokens, in steps of 16.
        for absent in ({}, {"initial": None}):
            for read, products in ((True, 3 * 8 + 3 * 4), (False, 8 + 2 * 4)):
                constants = {**sizes, **absent, "READ": read}
                quick = name == "own keys" and not absent and not read
                found.append(Case("delta_rule.hopper.walk.walk_kernel", constants, products=products, quick=quick))
        for absent in ({}, {"d_final": None, "d_initial": None}):
            constants, products = {**sizes, **absent}, 2 * 8 + 4 * 4
            found.append(Case("delta_rule.hopper.walk_back.walk_back_kernel", constants, products=products))
    for width in (64, 128):
        for grafted in (False, True):
            constants = {"HEADS": 2, "E": 4, "D": width, "GRAFTED": grafted, "NORMALISE": not grafted}
            # One tile before the loop and one in it, in steps of 16. Two programs share a multiprocessor.
            rest: dict[str, Any] = {"products": 2 * width // 16, "most_shared": SHARED_MEMORY // 2}
            quick = width == 64 and not grafted
            forward = {**constants, "KEEP": not grafted}
            found.append(Case("expansion.hopper.forward.forward_kernel", forward, quick=quick, **rest))
            found.append(Case("expansion.hopper.backward.backward_kernel", constants, **rest))
    for gate, delta, K, V in (
        (0, True, 64, 64), (1, False, 64, 128), (2, True, 128, 128),
        (3, False, 256, 64), (3, True, 64, 64), (4, False, 512, 64),
    ):  # fmt: skip
        width = decoding.width(K, V, delta=delta)
        constants = {
            "HEADS": 8, "KEY_HEADS": 4, "SHARE": 2, "VALUE_HEADS": 4, "K": K, "V": V, "GATE": gate,
            "NORMALISE": delta, "SKIP": True, "BV": width, "ROWS": decoding.ROWS, "EARLY": PREFETCHING,
        }  # fmt: skip
        quick = gate in (3, 4)
        if delta:
            warps = decoding.delta_warps(K, width)
            # A tile of the state, and what its sums over keys and decays need.
            most, least, constants = 2 * K * width + 2048, 2 * K * width, {**constants, "WARPS": warps}
            found.append(Case("decoding.hopper.delta.delta_step_kernel", constants, warps, 0, most, least, quick))
        else:
            chunk, ring, warps = decoding.chunks(K, width)
            constants |= {"CHUNK": chunk, "RING": ring, "WARPS": warps}
            # The ring, and keys, queries and decays of all keys.
            least = 2 * ring * chunk * width
            most = least + 3 * 4 * K + 1024
            found.append(Case("decoding.hopper.gated.gated_step_kernel", constants, warps, 0, most, least, quick))
    return found + products_of_a_step()


def products_of_a_step() -> list[Case]:
    """Products of a decoding step. Some convert bytes: int8 by their bits, float8_e4m3fn by an instruction."""
    import triton.language as tl

    from longrecall.ops.kernels.dependent_launch import PREFETCHING

    integers = dict.fromkeys(("x_row", "size", "count", "total", "N", *(f"n{i}" for i in range(9))), "i32")
    floats = dict.fromkeys(("eps", "offset"), "fp32")
    scales = dict.fromkeys(("scales", "gate_scales", "up_scales", *(f"s{i}" for i in range(9))), "*fp32")
    step = {"SCALED": True, "BN": 8, "BD": 1024, "EARLY": PREFETCHING}
    operands = {"BK": 128, "DOT": tl.bfloat16, "UPCAST": False, "PRECISION": "ieee"}
    tile = {**operands, "LINES": 16, "LINE": 64, "EARLY": PREFETCHING}
    found = []
    for kind in ("*i8", "*fp8e4nv"):
        weights = dict.fromkeys(("w", "gate", "up", *(f"w{i}" for i in range(9))), kind)
        types = integers | floats | scales | weights
        for name, constants, products in (
            ("products._project_kernel", {**step, "PARTS": 9}, 0),
            ("products._gate_up_kernel", step, 0),
            ("products._add_product_kernel", step, 0),
            ("products._product_kernel", {**step, "BIAS": True}, 0),
        ):
            found.append(Case(f"decoding.triton.{name}", constants, 4, products, types=types))
    for kind in ("*i8", "*fp8e4nv", "*bf16"):
        weights = dict.fromkeys(("gate", "up", *(f"w{i}" for i in range(9))), kind)
        types = integers | floats | scales | weights
        for high, tall, warps in ((16, 16, 4), (64, 64, 4), (128, 64, 8)):
            # Tiles of 64 rows are products of a warp group, in steps of 16; narrower ones are not.
            products = 8 if tall == 64 else 0
            cut = {**tile, "SCALED": kind != "*bf16", "BM": high, "BN": tall}
            for name, more, pairs in (
                ("_wide_product_kernel", {"PARTS": 9, "APART": 8, "BIAS": True}, 1),
                ("_wide_gate_up_kernel", {}, 2),
            ):
                quick, place = (kind, high, pairs) == ("*i8", 64, 1), f"decoding.triton.wide_products.{name}"
                found.append(Case(place, {**cut, **more}, warps, products * pairs, quick=quick, types=types))
        found += tiles_on_gpus(kind, types)
    return found


def tiles_on_gpus(kind: str, types: dict[str, str]) -> list[Case]:
    """The largest products of a step with weights of this kind: as they are cut for a GPU, they have room there."""
    import torch
    import triton.language as tl

    from longrecall.ops.decoding.triton import wide_products as wide
    from longrecall.ops.row_scaled import RowScaled

    held = {"*i8": torch.int8, "*fp8e4nv": torch.float8_e4m3fn, "*bf16": torch.bfloat16}[kind]
    numbers, found = torch.empty(1, 1024, dtype=held), []
    # The first one has no float8.
    gpus = [(80, 163), (89, 99), (90, 227)][kind == "*fp8e4nv" :]
    for dtype, name, dot, precision in (
        (torch.bfloat16, "*bf16", tl.bfloat16, "ieee"),
        (torch.float32, "*fp32", tl.float32, "tf32x3"),
    ):
        if held == torch.bfloat16 != dtype:
            continue
        weight = numbers if held == dtype else RowScaled(numbers, numbers, dtype)
        given = {**types, **dict.fromkeys(("x", "out", "bias"), name)}
        for (capability, kib), rows, pairs in itertools.product(gpus, (64, 256), (1, 2)):
            with mock.patch.object(wide, "shared_memory", lambda _, kib=kib: kib << 10):
                tile = wide.tile_of(torch.empty(rows, 1024, dtype=dtype), weight, [2816], pairs)
            constants = {
                "SCALED": held != dtype, "BM": tile.high, "BN": tile.tall, "BK": tile.columns,
                "LINES": 16, "LINE": 64, "DOT": dot, "UPCAST": False, "PRECISION": precision, "EARLY": 0,
                **({"PARTS": 9, "APART": 8, "BIAS": False} if pairs == 1 else {}),
            }  # fmt: skip
            place = f"decoding.triton.wide_products.{'_wide_product_kernel' if pairs == 1 else '_wide_gate_up_kernel'}"
            quick = (kind, capability, rows, pairs) == ("*bf16", 89, 64, 2)
            cut = {"types": given, "stages": tile.stages, "capability": capability, "quick": quick}
            found.append(Case(place, constants, tile.warps, None, kib << 10, **cut))
    return found


def compile_case(case: Case) -> str | None:
    """What is wrong with the code that Triton makes of a kernel for a compute capability; None = nothing.

    Addresses are aligned to 16 bytes, rows of a decoding step's products too.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = case.name.rpartition(".")
    kernel = getattr(importlib.import_module(f"longrecall.ops.{module}"), name)
    places = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    types = TYPES if case.types is None else case.types
    signature = {n: "constexpr" if n in case.constants else types.get(n, "*bf16") for n in places}
    whole = {n for n, kind in signature.items() if kind.startswith("*") or n in ("size", "x_row")}
    aligned = {places[n]: [["tt.divisibility", 16]] for n in whole}
    read = GluonASTSource if case.types is None else ASTSource
    source = read(kernel, signature, {places[n]: value for n, value in case.constants.items()}, aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)
    shared, products = built.metadata.shared, built.asm["ptx"].count("wgmma.mma_async")
    if not case.least_shared <= shared <= case.most_shared:
        return f"{shared} bytes of shared memory, not {case.least_shared} to {case.most_shared}"
    return None if case.products in (None, products) else f"{products} products, not {case.products}"


def compile_all(wanted: str, folder: str = "") -> None:
    """Compile the `quick` cases or `all`, in a process of its own, by the Triton in `folder` or the installed one."""
    found = dict(os.environ)
    found.pop("TRITON_INTERPRET", None)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, str(ROOT / "src"), found.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "error:TRITON", __file__, wanted], capture_output=True, text=True, env=found, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["compiled"] and not told["wrong"], told
    if folder:
        assert told["triton"].startswith(folder)


if __name__ == "__main__":
    import triton

    chosen = [one for one in cases() if one.quick or sys.argv[1] == "all"]
    wrong = [f"{one.name} {one.constants}: {told}" for one in chosen if (told := compile_case(one))]
    print(json.dumps({"compiled": len(chosen), "wrong": wrong, "triton": triton.__file__}))
else:
    pytest.importorskip("triton")


@pytest.mark.long
def test_every_kernel_compiles() -> None:
    compile_all("quick")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", RELEASES)
def test_every_kernel_compiles_with_every_release(release: str, tmp_path: Path) -> None:
    target = ["--no-deps", "--quiet", "--target", str(tmp_path), f"triton=={release}"]
    got = subprocess.run([sys.executable, "-m", "pip", "install", *target], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"Triton {release} cannot be installed here: {got.stderr.strip()[-200:]}")
    compile_all("all", str(tmp_path))
