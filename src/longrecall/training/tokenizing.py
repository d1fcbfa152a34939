"""What `longrecall tokenize` is given -> sources of texts -> token files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.models.checkpoint_tokenizer import read_tokenizer
from longrecall.models.formats.hub import locate_tokenizer
from longrecall.training.corpora.base import find_files
from longrecall.training.opening import ENDINGS, open_files, source_files
from longrecall.training.recipe import Recipe
from longrecall.training.recipe_sources import FileSource, HubSource, JsonlSource, ParquetSource, TextSource
from longrecall.training.token_files import TokenSummary, write_token_files

CHUNK_BYTES = 16 << 20
"""Bytes of text of which a process holds about two at once; a plain text longer than this becomes several documents."""


def tokenize_inputs(
    inputs: Sequence[str],
    out: str,
    tokenizer: str | None,
    *,
    kind: str | None = None,
    field: str = "text",
    workers: int | None = None,
    force: bool = False,
    show: Callable[[int, int], None] | None = None,
) -> list[TokenSummary]:
    """Write token files of `inputs` into `out`; of a recipe one folder for every source of texts, in `out`.

    Args:
        inputs: files, folders or patterns of one kind; or one recipe.
        out: a folder.
        tokenizer: the checkpoint that has it; None only with a recipe.
        kind: text, jsonl or parquet; None: what the names say.
        field: key or column that holds the document.
        workers, force, show: as `write_token_files`.

    Raises:
        UserError: nothing to read, files of several kinds, no tokenizer; and as `write_token_files`.
    """
    if workers is not None and workers < 0:
        raise UserError(f"--workers must be 0 or more, got {workers}")
    recipes = [name for name in inputs if name.endswith((".yaml", ".yml"))]
    if recipes and len(inputs) > 1:
        raise UserError(f"{recipes[0]} is a recipe; give one recipe alone, or files of texts")
    recipe = Recipe.load(recipes[0]) if recipes else None
    place = tokenizer or (recipe.model.checkpoint if recipe is not None else None)
    if place is None:
        raise UserError("--tokenizer is missing: name the checkpoint that will be trained on the tokens")
    loaded = _tokenizer(place)
    if recipe is None:
        files, source = _given(inputs, kind, field)
        return [_write(files, source, loaded, out, workers, force, show)]
    found = [
        (number, source)
        for number, source in enumerate(recipe.data.sources)
        if isinstance(source, (TextSource, JsonlSource, ParquetSource))
    ]
    if not found:
        hub = any(isinstance(source, HubSource) for source in recipe.data.sources)
        more = "; download its hub dataset first" if hub else ""
        raise UserError(f"{inputs[0]} has no source of text, jsonl or parquet files, so there is nothing to do{more}")
    return [
        _write(source_files(source), source, loaded, str(Path(out) / str(number)), workers, force, show)
        for number, source in found
    ]


def _tokenizer(place: str) -> Any:
    """Return the tokenizer of a checkpoint, or in a folder that has nothing else."""
    from longrecall.models.checkpoint import open_checkpoint
    from longrecall.models.checkpoint_tokenizer import load_tokenizer

    folder = locate_tokenizer(place)
    if (folder / "config.json").is_file():
        source = open_checkpoint(place)
        return load_tokenizer(source.path, source.config.vocab_size)
    return read_tokenizer(folder)


def _given(inputs: Sequence[str], kind: str | None, field: str) -> tuple[list[Path], FileSource]:
    """Return the files that the words mean, and the source that reads them."""
    endings = ENDINGS[kind] if kind else tuple(ending for some in ENDINGS.values() for ending in some)
    files = list(dict.fromkeys(path for word in inputs for path in find_files(word, endings, "INPUT")))
    kinds = {kind} if kind else {_kind_of(path) for path in files}
    if len(kinds) > 1:
        raise UserError(
            f"the files are of several kinds ({', '.join(sorted(kinds))}); tokenize each into its own --out"
        )
    path = inputs[0]
    match kinds.pop():
        case "text":
            return files, TextSource(path)
        case "jsonl":
            return files, JsonlSource(path, field)
        case _:
            return files, ParquetSource(path, field)


def _kind_of(path: Path) -> str:
    found = next((kind for kind, endings in ENDINGS.items() if path.name.endswith(endings)), None)
    if found is None:
        raise UserError(f"{path}: its name does not show what kind of file it is; give --kind")
    return found


def _write(
    files: list[Path],
    source: FileSource,
    tokenizer: Any,
    out: str,
    workers: int | None,
    force: bool,
    show: Callable[[int, int], None] | None,
) -> TokenSummary:
    stats = [path.stat() for path in files]
    told = {"kind": source.kind, "files": [[str(path), stat.st_size] for path, stat in zip(files, stats, strict=True)]}
    named = {"field": getattr(source, "field", None) or getattr(source, "column", None)}
    corpus = open_files(source, files, CHUNK_BYTES)
    size = sum(stat.st_size for stat in stats)
    return write_token_files(
        corpus, size, tokenizer, out, source={**told, **named}, workers=workers, force=force, show=show
    )
