"""Result files in, one HTML file out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from longrecall.errors import UserError
from longrecall.files import check_no_input, write_text
from longrecall.installing import install_command
from longrecall.outputs import claim_file
from longrecall.report.blocks import BEST, Plot, Section, spoken
from longrecall.report.inputs import Inputs, read_inputs
from longrecall.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

_ELSEWHERE = "choose another -o"
_LONG = 26
"""Letters of the longest cell that stays on one line: two numbers and a word between them."""


def build_report(
    result_paths: Sequence[str | Path],
    out: str | Path,
    *,
    labels: Mapping[str, str] | None = None,
    title: str | None = None,
    force: bool = False,
) -> Path:
    """Write one self-contained HTML page that compares result files; it loads nothing from anywhere.

    Args:
        result_paths: files of `longrecall eval`, `diagnose`, `train` and `sweep`, in the order of the page.
            "before" and "after" (by label, else first and last) are compared; one labelled "control" or "continued"
            stands for plain continued training.
        out: the page; it appears only when it is whole.
        labels: label -> one of `result_paths`; else the file's own "label", else its name.
        title: heading of the page; else one that fits what the files are.
        force: replace a page that is there already.

    Returns:
        The path of the page.

    Raises:
        UserError: a file that is missing, broken or of another schema; a place that cannot be written, is one of the
            result files or another file that is there, or is being written by another process; jinja2 or matplotlib
            not installed.
    """
    check_no_input(out, result_paths, _ELSEWHERE)
    with claim_file(out, force=force, advice=_ELSEWHERE):
        write_text(out, _page(read_inputs(result_paths, labels), title), _ELSEWHERE)
    return Path(out)


def _page(inputs: Inputs, title: str | None) -> str:
    check_packages()
    from jinja2 import Environment, StrictUndefined

    from longrecall.report.drawing import describe
    from longrecall.report.opening_sections import title_of
    from longrecall.report.sections import all_sections
    from longrecall.report.theme import style_sheet

    def heard(section: Section) -> Section:
        blocks = [
            replace(block, svg=describe(block.svg, spoken(block))) if isinstance(block, Plot) else block
            for block in section.blocks
        ]
        return replace(section, blocks=blocks)

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "is_long": _is_long}
    template = environment.from_string(
        resources.files("longrecall.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    sections = list(map(heard, all_sections(inputs)))
    return template.render(
        title=title or title_of(inputs), sections=sections, version=__version__, style_sheet=style_sheet(), best=BEST
    )


def _breakable(line: str) -> Markup:
    """Return text as HTML that may be broken after a slash: paths then wrap there, and no word is split."""
    from markupsafe import Markup, escape

    return Markup(str(escape(line)).replace("/", "/<wbr>"))


def _is_long(cell: str) -> bool:
    """Whether a cell of a table is more than a number or a name, so that its lines may be broken."""
    return any(len(line) > _LONG for line in cell.split("\n"))


def check_packages() -> None:
    """Raise UserError when an installation has lost jinja2 or matplotlib; long jobs ask before they begin."""
    try:
        import jinja2  # noqa: F401

        import longrecall.report.sections  # noqa: F401
    except ModuleNotFoundError as error:
        command = install_command("jinja2", "matplotlib")
        raise UserError(f"a report needs {error.name}, which is not installed; run: {command}") from error
