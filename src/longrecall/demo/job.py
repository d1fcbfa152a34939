"""The demo: measure the shipped base, enlarge its state, post-train it, train the base on by as much, measure both.

The two trainings run side by side, one core each, on the same batches: what differs in the end is the state.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from longrecall.demo.processes import Process, TrainingProcess, wait_for
from longrecall.demo.table import AFTER, BEFORE, CONTROL, closing_table, verdict
from longrecall.errors import UserError
from longrecall.evaluation.checkpoint import evaluate_checkpoint
from longrecall.evaluation.results import joined, read_json, read_result
from longrecall.files import cannot_write, check_replaceable, remove_temporary, write_json
from longrecall.locks import LOCK_FILE
from longrecall.outputs import claim_folder, refuse_busy
from longrecall.report import build_report, check_packages
from longrecall.surgery.expansion import expand
from longrecall.tasks.text import read_text
from longrecall.training.recipe import Recipe

MARKER = "demo.json"
RUNS = ("enlarged", "unchanged")
LABELS = {BEFORE: "before", AFTER: "after", CONTROL: "control"}
TITLE = "A bigger memory for a small model: before and after"
PAIRS = (1, 2, 4, 8, 16, 24)
LENGTHS = (512, 1024, 2048, 4096)
WINDOWS = 16
KEY_LENGTHS = (256, 512, 1024)
KEYS = 32
_RESULTS = ("before.json", "after.json", "control.json", "training_after.json", "training_control.json")
_OURS = (MARKER, "checkpoint", "report.html", "work", *_RESULTS)
_ELSEWHERE = "choose another --out"


def run_demo(out: Path, steps: int | None = None, samples: int = 1024, force: bool = False) -> str:
    """Leave checkpoint/, before.json, after.json, control.json and report.html in `out`; return the closing table.

    Args:
        out: folder. What a demo that was interrupted has left there is cleared; anything else that it holds, such as a
            finished demo, is replaced with `force` only.
        steps: of either training run; None = what the recipe says.
        samples: answers per cell of the phone book.

    Raises:
        UserError: a number below 1; `out` holds something, is being written by another process or cannot be written;
            the report's packages are missing.
    """
    for name, count in (("steps", steps), ("samples", samples)):
        if count is not None and count < 1:  # before an earlier demo is replaced
            raise UserError(f"--{name} must be at least 1, got {count}")
    check_packages()
    with claim_folder(out, _ELSEWHERE):
        _prepare(out, force)
        return _run(out, steps, samples)


def _run(out: Path, steps: int | None, samples: int) -> str:
    """The five steps, in an empty folder."""
    began = time.monotonic()
    assets = Path(str(resources.files("longrecall") / "assets"))
    base, text = assets / "mamba2-base", assets / "text"
    recipe = assets / "demo" / "recipe.yaml"
    held_out = read_text(str(text / "held_out.txt"))

    _say("1/5 measuring the pretrained model")
    before = _measure(base, out / "before.json", held_out, samples)

    _say("2/5 enlarging its state")
    larger = out / "work" / "expanded"
    summary = expand(base, larger, method="grow_state", layers="all", init="perturb", seed=0)
    _say(f"    {summary.state_before:,} -> {summary.state_after:,} numbers of state in {len(summary.layers)} layers")

    _say("3/5 training it, and the unchanged model on the same batches (the control)")
    settings = [f"data.sources.0.path={text / 'train.txt'}", *([] if steps is None else [f"run.steps={steps}"])]
    total = Recipe.load(recipe, [*settings, f"model.checkpoint={base}"]).steps(1)
    runs = [
        TrainingProcess(label, recipe, [*settings, f"model.checkpoint={checkpoint}"], out / "work" / label, total)
        for label, checkpoint in zip(RUNS, (larger, base), strict=True)
    ]
    wait_for(runs)
    trained, continued = (run.output / "final" for run in runs)

    _say("4/5 measuring both")
    control = Process("control", _measure_command(continued, out / "control.json", text, samples), out / "work")
    after = _measure(trained, out / "after.json", held_out, samples)
    wait_for([control])

    _say("5/5 writing the report")
    shutil.move(trained, out / "checkpoint")
    _report(out, runs)
    table = closing_table(before, after, read_result(out / "control.json"))
    write_json(out / MARKER, {"seconds": round(time.monotonic() - began, 1), "steps": total, "samples": samples})
    shutil.rmtree(out / "work", ignore_errors=True)
    seconds = time.monotonic() - began
    return f"{table}\n\n{seconds:.0f} s; open {out / 'report.html'}; the checkpoint is {out / 'checkpoint'}"


def demo_facts(out: Path) -> dict[str, Any]:
    """Return what a finished demo left in `out`: places, steps, samples, seconds, the three summaries, the verdict."""
    results = {name: read_result(out / f"{name}.json") for name in LABELS.values()}
    return {
        "checkpoint": str(out / "checkpoint"),
        "report": str(out / "report.html"),
        **read_json(out / MARKER),
        "summaries": {name: result["summary"] for name, result in results.items()},
        "verdict": verdict(results["before"], results["after"], results["control"]),
    }


def _report(out: Path, runs: Sequence[TrainingProcess]) -> None:
    """The page from three measurements and two training logs, which are kept beside it."""
    named = {label: str(out / f"{name}.json") for label, name in LABELS.items()}
    logs = []
    for run, name in zip(runs, ("after", "control"), strict=True):
        logs.append(out / f"training_{name}.json")
        shutil.move(run.output / "training.json", logs[-1])  # a copy that is cut short would pass for the log
    build_report([*named.values(), *logs], out / "report.html", labels=named, title=TITLE)


def _prepare(out: Path, force: bool) -> None:
    """Leave the marker of a begun demo alone in `out`, or with what the user has put beside an interrupted one."""
    held = [entry for entry in out.iterdir() if entry.name != LOCK_FILE]
    if held and not force and not (out / MARKER).exists():
        raise UserError(f"{out} is not empty and no demo wrote it; {_ELSEWHERE} or give --force")
    for label in RUNS:  # a demo that was killed has left its children alone, and they may still be at work
        refuse_busy(out / "work" / label, _ELSEWHERE)
    if held and not force and _finished(out):
        shutil.rmtree(out / "work", ignore_errors=True)  # a kill may have come before it was
        raise UserError(f"{out} holds a finished demo; --force replaces it by a new one, or {_ELSEWHERE}")
    if held:
        check_replaceable(out)
    try:
        # First the marker, then the rest goes: a kill in between must not leave a folder that no demo wrote.
        write_json(out / MARKER, {"unfinished": True})
        for entry in held:
            if entry.name == MARKER or not (force or entry.name in _OURS):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for name in _OURS:
            remove_temporary(out / name)
    except OSError as error:
        raise cannot_write(out, error, _ELSEWHERE) from error


def _finished(out: Path) -> bool:
    """Whether the demo in `out` came to its end; what cannot be told is not cleared."""
    try:
        return "unfinished" not in read_json(out / MARKER)
    except UserError:
        return True


def _measure(checkpoint: Path, out: Path, held_out: str, samples: int) -> dict[str, Any]:
    """The whole measurement in this process, with its progress bars; pass keys are long, so there are fewer of them."""
    book = {"pairs": PAIRS, "letters": 1, "digits": 1}
    result = evaluate_checkpoint(
        checkpoint,
        ["phonebook", "bits_per_byte"],
        LENGTHS,
        samples,
        dtype="float32",
        text=held_out,
        options={"phonebook": book, "bits_per_byte": {"windows": WINDOWS}},
    )
    depths = {"passkey": {"depths": (0.0, 0.5, 1.0)}}
    keys = evaluate_checkpoint(checkpoint, ["passkey"], KEY_LENGTHS, KEYS, dtype="float32", options=depths)
    result = joined([result, keys])
    write_json(out, result)
    return result


def _measure_command(checkpoint: Path, out: Path, text: Path, samples: int) -> list[str]:
    code = (
        "import sys; from pathlib import Path; from longrecall.demo.job import measure_quietly; "
        "measure_quietly(*map(Path, sys.argv[1:4]), int(sys.argv[4]))"
    )
    return [sys.executable, "-c", code, str(checkpoint), str(out), str(text / "held_out.txt"), str(samples)]


def measure_quietly(checkpoint: Path, out: Path, held_out: Path, samples: int) -> None:
    """What the second process of step 4 does."""
    _measure(checkpoint, out, read_text(str(held_out)), samples)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
