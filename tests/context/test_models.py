"""Context parallelism of whole models: four processes and two (gloo, CPU) compute what one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def test_whole_models_over_two_and_four_ranks() -> None:
    """Loss, logits, states passed on and every gradient; with padding, and with packed documents."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.context.models", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
