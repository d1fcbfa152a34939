"""Context parallelism of the recurrences: four processes and two (gloo, CPU) compute what one does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from longrecall.context import ContextGroup, context_parallel, from_last, from_previous, hand_on, received
from longrecall.errors import UserError
from longrecall.models.packed_documents import find_fragments
from longrecall.ops.execution import context
from tests import warm
from tests.context import ranks
from tests.processes import PATIENCE


def run_ranks(*arguments: str, timeout: float = PATIENCE, **variables: str) -> None:
    """Start `tests.context.ranks` with variables in its environment; AssertionError with what went wrong on a rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment |= variables
    command = [sys.executable, "-m", "tests.context.ranks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
def test_every_recurrence_over_two_and_four_ranks() -> None:
    """Outputs, final states and all gradients; packed documents; parts of a model that run twice; frozen inputs."""
    done = warm.run(ranks.main)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_layers_in_kernels_over_two_ranks() -> None:
    """Triton's interpreter: convolutions, expansion and recurrence in one function, from states, with padding."""
    pytest.importorskip("triton")
    run_ranks("kernels", TRITON_INTERPRET="1", LONGRECALL_BACKEND="triton")


def test_operations_are_all_that_begin_from_a_state() -> None:
    assert {row.op for row in ranks.OPERATIONS.values()} >= {
        "gated_linear_attention",
        "merged_linear_attention",
        "gated_delta_rule",
        "generalised_delta_rule",
        "subhead_delta_rule",
        "selective_scan",
        "linear_recurrence",
        "weighted_average",
    }


def test_one_rank_changes_nothing() -> None:
    x, start = torch.ones(2, 3), torch.zeros(2, 3)
    with context_parallel(ContextGroup.alone()):
        assert context() is None
        assert from_previous(x, start) is start and received(start, x) is start
        assert hand_on(x, start) == (x, start) and from_last(x, start) == (x, start)


def test_groups_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="rank 2 is not one of a context group of 2 ranks"):
        ContextGroup(None, 2, 2)
    with pytest.raises(UserError, match="a context group of 2 ranks needs a process group"):
        ContextGroup(None, 0, 2)


def test_a_rank_reads_no_rows_of_documents_that_others_hold() -> None:
    """Two rows of 2 x 6 columns, the right half of each: documents go on, begin, end and lie elsewhere."""
    cuts = torch.tensor([0, 4, 8, 12, 21, 24])
    with context_parallel(ContextGroup(object(), 1, 2)):
        found = find_fragments(cuts, 2, 6, every_document=False)
    pieces = found.pieces
    assert pieces is not None and pieces.documents == 5
    assert pieces.rows.tolist() == [1, 2, 3, 4] and pieces.ends.tolist() == [True, True, True, True]
    assert (
        pieces.first.tolist() == [0, 2] and pieces.last.tolist() == [1, 3] and pieces.goes_on.tolist() == [True, True]
    )
    assert found.mask.sum(1).tolist() == [2, 4, 3, 3] and found.longest == 9
    x = torch.arange(12).view(2, 6)
    assert found.apart(x).tolist() == [[0, 1, 0, 0], [2, 3, 4, 5], [6, 7, 8, 0], [9, 10, 11, 0]]
    assert torch.equal(found.together(found.apart(x), 2), x)
    with context_parallel(ContextGroup(object(), 0, 2)):
        first = find_fragments(cuts, 2, 6, every_document=False).pieces
    assert first is not None and first.rows.tolist() == [0, 1, 3] and first.ends.tolist() == [True, False, False]
    assert first.goes_on.tolist() == [False, False] and first.last.tolist() == [1, 2]
