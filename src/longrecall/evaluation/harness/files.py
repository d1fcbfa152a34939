"""The YAML files by which lm-evaluation-harness knows our tasks: written from what the tasks declare."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from longrecall.tasks.declaration import HarnessForm
from longrecall.tasks.registry import declaration_of, task_names

_MAKER = "longrecall.evaluation.harness.generators"
_TEXT = """task: longrecall_{name}
tag: longrecall
custom_dataset: !function {maker}.make_documents
dataset_kwargs:
  longrecall_task: {name}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
process_results: !function {maker}.score_document
generation_kwargs:
  until: {until}
  max_gen_toks: {tokens}
  do_sample: false
metric_list:
{metrics}
metadata:
  version: 1.0
"""
_METRIC = """  - metric: {name}
    aggregation: mean
    higher_is_better: true"""


def task_file(name: str, form: HarnessForm) -> str:
    """Return the YAML of the task `name`, called ``longrecall_NAME`` there."""
    metrics = "\n".join(_METRIC.format(name=metric) for metric in form.metrics)
    until = json.dumps(list(form.until))
    return _TEXT.format(name=name, maker=_MAKER, until=until, tokens=form.answer_tokens, metrics=metrics)


def task_files() -> dict[str, str]:
    """Return file name -> YAML, of every task that declares how the harness asks it."""
    forms = {name: declaration_of(name).harness for name in task_names()}
    return {f"longrecall_{name}.yaml": task_file(name, form) for name, form in forms.items() if form is not None}


def include_path() -> Path:
    """Return a folder with our tasks for ``lm_eval --include_path``, written where it is not there yet.

    It lies in the user's cache (``XDG_CACHE_HOME``, else ``~/.cache``) under a name that its contents give it, so that
    it stays right for whoever was told of it. Where nothing can be written there, it is a new temporary folder.
    """
    files = task_files()
    name = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longrecall" / "harness"
        folder = cache / name
        if not _holds(folder, files):
            cache.mkdir(parents=True, exist_ok=True)
            _replace(folder, files)
        return folder
    except (OSError, RuntimeError):
        return _written(Path(tempfile.mkdtemp(prefix="longrecall-harness-")), files)


def _holds(folder: Path, files: Mapping[str, str]) -> bool:
    if not folder.is_dir() or {path.name for path in folder.iterdir()} != set(files):
        return False
    return all((folder / name).read_text(encoding="utf-8") == text for name, text in files.items())


def _replace(folder: Path, files: Mapping[str, str]) -> None:
    """Put a whole folder in its place at once: others may be reading it, or writing the same."""
    made = _written(Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent)), files)
    try:
        made.rename(folder)
    except OSError:
        if _holds(folder, files):
            shutil.rmtree(made)
            return
        shutil.rmtree(folder)
        made.rename(folder)


def _written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
