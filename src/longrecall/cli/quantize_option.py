"""The option --quantize of the verbs that only read a model."""

from __future__ import annotations

import argparse

KINDS = ("int8", "fp8")


def add_quantize(parser: argparse._ActionsContainer) -> None:
    """Add it."""
    parser.add_argument(
        "--quantize", choices=KINDS, help="store the weights of linear layers in one byte each; needs torchao [off]"
    )
