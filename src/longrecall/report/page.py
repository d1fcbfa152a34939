"""Result files in, one HTML file out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from longrecall import __version__
from longrecall.errors import UserError
from longrecall.files import check_no_input, write_text
from longrecall.report.blocks import Plot, Section, spoken
from longrecall.report.inputs import read_inputs

_ELSEWHERE = "choose another -o"
_TITLE = "What the model remembers, before and after"


def build_report(
    result_paths: Sequence[str | Path],
    out: str | Path,
    *,
    labels: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Path:
    """Write one self-contained HTML page that compares result files; it loads nothing from anywhere.

    Args:
        result_paths: files of `longrecall eval`, `diagnose`, `train` and `sweep`, in the order of the page.
            "before" and "after" (by label, else first and last) are compared; one labelled "control" or "continued"
            stands for plain continued training.
        out: the page; it appears only when it is whole.
        labels: label -> one of `result_paths`; else the file's own "label", else its name.
        title: heading of the page.

    Returns:
        The path of the page.

    Raises:
        UserError: a file that is missing, broken or of another schema; a place that cannot be written or is one of the
            result files; jinja2 or matplotlib not installed.
    """
    check_no_input(out, result_paths, _ELSEWHERE)
    inputs = read_inputs(result_paths, labels)
    check_extras()
    from jinja2 import Environment, StrictUndefined

    from longrecall.report.drawing import describe
    from longrecall.report.sections import all_sections

    def heard(section: Section) -> Section:
        blocks = [
            replace(block, svg=describe(block.svg, spoken(block))) if isinstance(block, Plot) else block
            for block in section.blocks
        ]
        return replace(section, blocks=blocks)

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(resources.files("longrecall.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    page = template.render(title=title or _TITLE, sections=list(map(heard, all_sections(inputs))), version=__version__)
    write_text(out, page, _ELSEWHERE)
    return Path(out)


def check_extras() -> None:
    """Raise UserError when jinja2 or matplotlib is not installed; long jobs ask before they begin."""
    try:
        import jinja2  # noqa: F401

        import longrecall.report.sections  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}; install it with pip install 'longrecall[report]'") from error
