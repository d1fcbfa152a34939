"""Passkey far beyond training: seconds and memory of one example, by length, on a CPU.

    python benchmarks/long_passkey.py --threads 2 --out benchmarks/results/long_passkey.json

Random models of about five million parameters, float32. Each length runs `evaluate` on one example in a process of
its own. `processor_seconds` is the work done by all threads; on as many idle cores as threads an example takes the
seconds of the clock, `seconds`, which a busy machine stretches. `peak_mib` is the largest resident memory of the
process, most of it the interpreter and torch; it must not grow with the length, except by the example's own tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

# See cpu_timing.py: a spinning thread holds up the one it waits for on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from cpu_timing import cpu_parser, recorded

from longrecall import RecurrentConfig, RecurrentLM
from longrecall.evaluation import evaluate
from longrecall.models.byte_tokenizer import VOCABULARY, byte_tokenizer
from longrecall.units import format_length, parse_length

MAMBA2 = {"mixer": {"type": "mamba2", "inner_dim": 512, "head_dim": 64, "state_dim": 64}, "mlp_size": 0}
GLA = {"mixer": {"type": "gla", "num_heads": 4, "key_dim": 32, "value_dim": 64}, "mlp_size": 512}
MODELS: dict[str, list[dict[str, Any]]] = {"mamba2": [MAMBA2] * 11, "gla": [GLA] * 7}
WIDTH = 256


def measure(name: str, length: int) -> dict[str, object]:
    """One example of one length, in this process; a short one first warms up."""
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, layers=MODELS[name])).eval()
    tokenizer = byte_tokenizer()

    def run(size: int) -> None:
        evaluate(model, tokenizer, ["passkey"], [size], 1, options={"passkey": {"depths": (0.5,)}}, progress=False)

    run(512)
    wall, own = time.perf_counter(), time.process_time()
    run(length)
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "length": length,
        "seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - own, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = cpu_parser(__doc__, threads=2)
    parser.add_argument("--lengths", default="4k,16k,64k", metavar="N,...", help="tokens [%(default)s]")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    lengths = [parse_length(part) for part in options.lengths.split(",")]
    torch.set_num_threads(options.threads)
    if options.here:
        row = measure(options.models[0], lengths[0])
        print(json.dumps(row))
        return row
    rows = []
    for name in options.models:
        for length in lengths:
            words = ["--here", "--models", name, "--lengths", str(length), "--threads", str(options.threads)]
            done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            print(
                f"{name:8}{format_length(length):>5}{row['seconds']:8.1f} s{row['processor_seconds']:8.1f} processor s"
                f"{row['peak_mib']:9.1f} MiB"
            )
    settings = {"seed": 0}
    return recorded(options, settings, rows)


if __name__ == "__main__":
    main()
