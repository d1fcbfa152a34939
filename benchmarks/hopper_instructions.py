"""How many instructions the large kernels of a layer with subheads issue, counted in their compiled code; needs no GPU.

    python benchmarks/hopper_instructions.py --out benchmarks/results/hopper_instructions.json

Each kernel in Gluon spends its time in one loop, and each turn of it serves 64 tokens of one subhead. Triton compiles
the kernel for Hopper, the code is disassembled, and the instructions of the longest loop are counted. A scheduler
issues at most one instruction a cycle, an H200 has 132 x 4 of them, and its clock is at most 1.98 GHz. So `issue_ms`,
for the layer of gpu_layer_bounds.py, is the least time that the instructions take. Under load the clock is lower.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_layer_bounds import HEADS, WIDTH, units

SCHEDULERS, CLOCK, WARPS = 132 * 4, 1.98e9, 8
SINGLE = ("beta", "weights", "cumulative", "d_beta", "d_decay", "d_weights", "final", "norms", "d_taps")
"""Arguments that are float32 tensors; all other tensors are bfloat16."""
WHOLE = ("B", "T", "chunks", "segments")
FRACTIONS = ("scale", "eps")


@dataclass(frozen=True)
class Case:
    """A kernel of the layer, how it is compiled, and how often it goes through all tokens of all subheads."""

    name: str
    place: str
    constants: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    registers: int | None = None


def cases(subheads: int) -> list[Case]:
    """The kernels of a layer."""
    states = {"KEY_HEADS": HEADS * subheads, "SUBHEADS": subheads, "VALUE_HEADS": HEADS}
    walked = {**states, "HEADS": HEADS * subheads}
    expanded = {"HEADS": HEADS, "E": subheads, "D": WIDTH, "GRAFTED": False, "NORMALISE": True}
    walk, back = "delta_rule.hopper.walk.walk_kernel", {**walked, "d_final": None, "d_initial": None}
    # Two programs of the expansion share a multiprocessor, so a thread has 128 registers.
    return [
        Case(
            "expansion, convolution, SiLU, norm",
            "expansion.hopper.forward.forward_kernel",
            {**expanded, "KEEP": True},
            4,
            128,
        ),
        Case("gradients of those", "expansion.hopper.backward.backward_kernel", expanded, 2, 128),
        Case("walk, forward", walk, {**walked, "initial": None, "READ": True}),
        Case("walk that keeps states", walk, {**walked, "initial": None, "READ": False}),
        Case("walk back", "delta_rule.hopper.walk_back.walk_back_kernel", back),
        Case(
            "gradients of queries and keys",
            "delta_rule.hopper.keys.keys_kernel",
            {**states, "STATE_HEADS": HEADS * subheads},
        ),
    ]


def compiled(case: Case) -> tuple[str, int]:
    """The machine code of a kernel for Hopper, disassembled, and its bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = case.place.rpartition(".")
    kernel = getattr(importlib.import_module(f"longrecall.ops.{module}"), name)
    kinds = {**dict.fromkeys(SINGLE, "*fp32"), **dict.fromkeys(WHOLE, "i32"), **dict.fromkeys(FRACTIONS, "fp32")}
    kinds |= dict.fromkeys(case.constants, "constexpr")
    signature = {argument: kinds.get(argument, "*bf16") for argument in kernel.arg_names}
    places = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    aligned = {places[x]: [["tt.divisibility", 16]] for x, kind in signature.items() if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, {places[x]: value for x, value in case.constants.items()}, aligned)
    options = {"num_warps": WARPS, "enable_fp_fusion": True, "maxnreg": case.registers}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return code, built.metadata.shared


def longest_loop(code: str) -> list[str]:
    """Operations of the longest stretch that a jump goes back over, the jump included."""
    labels: dict[str, int] = {}
    found: list[str] = []
    longest = range(0)
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            found.append(instruction[1].partition(".")[0])
            jump = re.search(r"`\((\.L_\w+)\)", instruction[2])
            if found[-1] == "BRA" and jump and jump[1] in labels:
                longest = max(longest, range(labels[jump[1]], len(found)), key=len)
    return found[longest.start : longest.stop]


def counted(subheads: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel."""
    turns = units(subheads).chunks
    for case in cases(subheads):
        code, shared = compiled(case)
        loop = longest_loop(code)
        cycles = case.passes * turns * len(loop) * WARPS / SCHEDULERS
        row = {"name": case.name, "instructions": len(loop), "special_functions": loop.count("MUFU")}
        yield row | {"shared_kib": shared / 1024, "issue_ms": 1e3 * cycles / CLOCK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subheads", type=int, default=8, help="E [%(default)s]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Kernels for the interpreter cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    rows = []
    for row in counted(args.subheads):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.out:
        import triton

        told = {"schema": 1, "benchmark": "hopper_instructions", "triton": triton.__version__, "rows": rows}
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
