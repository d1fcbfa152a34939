"""Other ways to compute a layer with subheads: what they would move and multiply, and what that would take.

    python benchmarks/layer_designs.py benchmarks/results/gpu_layer_bounds.json

Counted as in gpu_layer_bounds.py, whose record gives the rates and the times; no GPU is needed. `bound` is the least
time of a design. `layer` is a guess: every kernel comes as near to its bound as the kernels do whose place it takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_layer_bounds import CUBLAS, JOINT, Part, bound_ms, parts, units


@dataclass(frozen=True)
class Design:
    """Another way to compute the same layer."""

    name: str
    parts: list[Part]
    """All parts. One with the name of a part of today is expected to come as near to its bound as that part does."""
    instead: dict[str, tuple[str, ...]]
    """For parts with other names: the parts of today whose place they take and whose share of the bound they have."""
    kept: float
    """Bytes of a layer that lie in memory from its forward to its backward, beyond those of today."""


MADE, GRADIENTS, PRODUCTS = "expansion, convolution, SiLU, norm", "gradients of those", CUBLAS[2]
INVERSE, WALK, KEEPING = "inverse", "walk, forward", "walk that keeps states"
BACK, KEYS = "walk back", "gradients of queries and keys"


def designs(subheads: int) -> list[Design]:
    """Ways that move less; the first is what the kernels do."""
    u = units(subheads)
    now = {part.name: part for part in parts(subheads)}
    once = Part(MADE, (), 2 * (u.heads + u.wide + u.norms), 2 * u.expansion)
    whole_walk, all_gradients, one_gradient = joined(subheads)

    def design(name: str, *new: Part, instead: dict[str, tuple[str, ...]] | None = None, kept: float = 0) -> Design:
        """Today's parts without those that `instead` replaces, and with the new ones."""
        replaced = instead or {}
        gone = {old for names in replaced.values() for old in names}
        changed = {**now, **{part.name: part for part in new}}
        return Design(name, [part for part in changed.values() if part.name not in gone], replaced, kept)

    def more(name: str, moved: float, flops: float = 0) -> Part:
        return Part(name, (), now[name].bytes + moved, now[name].flops + flops)

    half = u.chunks * u.cells / 2
    # Made again: of two states the second from the first, of their gradients the first from the second.
    again = 1.5 * u.chunks * u.onto_state
    walks = {whole_walk.name: (INVERSE, WALK)}
    backs, grads = {all_gradients.name: (BACK, KEYS)}, {one_gradient.name: (GRADIENTS, PRODUCTS)}
    # Every kernel makes the queries and keys that it reads from the projected heads.
    names = [part.name for part in expanding(subheads)]
    inside = {whole_walk.name: (MADE, INVERSE, WALK), names[0]: (KEEPING,), names[1]: (BACK,)}
    inside[names[2]] = (KEYS, GRADIENTS, PRODUCTS)
    keeping_walk = more(WALK, u.chunks * (u.tile + u.cells))
    return [
        design("as it is"),
        design("a state of every second chunk", more(KEEPING, -half), more(BACK, -half), more(KEYS, -2 * half, again)),
        design("walk back and gradients of queries and keys in one", all_gradients, instead=backs),
        design("expansion's gradients and their products in one", one_gradient, instead=grads),
        design("forward: expansion and inverse inside of the walk", once, whole_walk, instead=walks),
        design("nothing expanded is written", whole_walk, *expanding(subheads), instead=inside),
        design("queries and keys kept", once, kept=2 * u.wide),
        design("queries, keys, states and corrections kept", once, keeping_walk, Part(KEEPING, (), 0, 0),
               kept=3 * u.wide + u.chunks * u.cells),
        design("one backward pass of each, queries and keys kept", once, all_gradients, one_gradient,
               instead=backs | grads, kept=2 * u.wide),
    ]  # fmt: skip


def joined(subheads: int) -> tuple[Part, Part, Part]:
    """The forward from projected heads on, the walk back with all gradients, and all of an expansion's gradients."""
    u = units(subheads)
    now = {part.name: part for part in parts(subheads)}
    # Projected queries and keys and the values come in; outputs, inverses and cumulative decays go out.
    walked = u.chunks * (u.tile + u.square + 3 * u.shared + 3 * u.line)
    # Queries, keys, outputs' gradient, corrections, inverse and state come in; three gradients go out.
    back = u.chunks * (6 * u.tile + u.shared + u.square + u.cells + 4 * u.line)
    gradients = 2 * (2 * u.heads + u.wide + u.norms)
    return (
        Part("walk from projected heads", (), walked, now[INVERSE].flops + now[WALK].flops + 2 * u.expansion),
        Part("walk back with all gradients", (), back, now[BACK].flops + now[KEYS].flops),
        Part("expansion's gradients", (), gradients, now[GRADIENTS].flops + now[PRODUCTS].flops),
    )


def expanding(subheads: int) -> tuple[Part, Part, Part]:
    """The backward's walks and the rest of it, if each of them expands the projected heads itself."""
    u = units(subheads)
    now = {part.name: part for part in parts(subheads)}
    keeping = now[KEEPING].bytes - u.chunks * (u.tile - u.shared)
    back = now[BACK].bytes - u.chunks * 2 * (u.tile - u.shared)
    # Projected heads come in and their gradients go out, in place of queries and keys and theirs.
    rest = now[KEYS].bytes - u.chunks * 4 * (u.tile - u.shared)
    return (
        Part("walk that keeps states, from projected heads", (), keeping, now[KEEPING].flops + u.expansion),
        Part("walk back from projected heads", (), back, now[BACK].flops + 2 * u.expansion),
        Part("all other gradients", (), rest, sum(now[name].flops for name in (KEYS, GRADIENTS, PRODUCTS))),
    )


def expected_ms(design: Design, subheads: int, rows: dict[str, dict[str, Any]]) -> float:
    """What a layer would take if its parts came as near to their bounds as they do in a record, launches included."""
    rates, layer_ms = rows["rates"], rows[f"layer E {subheads}"]["ms"]
    now = {part.name: part for part in parts(subheads)}

    def today(name: str) -> float:
        row = rows.get(name, rows[JOINT])
        return bound_ms([now[name]], rates) / float(row["share"])

    def expected(part: Part) -> float:
        old = design.instead.get(part.name, (part.name,))
        return bound_ms([part], rates) * sum(map(today, old)) / bound_ms([now[name] for name in old], rates)

    return float(layer_ms - sum(map(today, now)) + sum(map(expected, design.parts)))


def read(record: Path) -> dict[str, dict[str, Any]]:
    """The rows of a record by their names."""
    return {row["name"]: row for row in json.loads(record.read_text(encoding="utf-8"))["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="what gpu_layer_bounds.py wrote")
    parser.add_argument("--subheads", type=int, default=8, help="E of the record [%(default)s]")
    args = parser.parse_args()
    rows = read(args.record)
    for design in designs(args.subheads):
        gigabytes, teraflops = sum(x.bytes for x in design.parts) / 1e9, sum(x.flops for x in design.parts) / 1e12
        bound, expected = bound_ms(design.parts, rows["rates"]), expected_ms(design, args.subheads, rows)
        counts = f"{gigabytes:.2f} GB, {teraflops:.3f} TFLOP, {design.kept / 2**30:.1f} GiB more kept"
        print(f"{design.name}: bound {bound:.2f} ms, layer {expected:.2f} ms, {counts}")


if __name__ == "__main__":
    main()
