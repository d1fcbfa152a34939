"""Processes that train together, forked from one that has imported everything: what torchrun does, in less time."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch
from torch.distributed import TCPStore

PATIENCE = 280
"""Seconds that a test waits for its processes: less than a test may take, and far more than they need."""


def meeting_point() -> TCPStore:
    """Hold what processes find each other by, as torchrun does, and name it in the environment of those to come.

    The system chooses the port and it stays taken: one that was free a moment ago may be another program's by then.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store


def on_processes(world: int, work: Callable[[], None]) -> None:
    """Run `work` in `world` forked processes with torchrun's variables; SystemExit when one fails."""
    store, children = meeting_point(), []
    told, held = os.pipe()
    # They begin together, once all are there: the store's thread answers whoever has begun, and a fork in the middle of
    # an answer could take a lock along that nobody opens.
    begun, begin = os.pipe()
    for rank in range(world):
        child = os.fork()
        if not child:
            os.close(held)
            os.close(begin)
            os.read(begun, 1)
            threading.Thread(target=_end_with, args=(told,), daemon=True).start()
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ |= {name: str(value) for name, value in ranks.items()}
            code = 1
            try:
                work()
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    os.close(begin)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for end in (told, held, begun):
        os.close(end)
    del store
    if any(codes):
        sys.exit(f"the processes ended with {codes}")


def _end_with(told: int) -> None:
    """End this process when the one that has forked it ends, killed or not: nobody waits for it any more."""
    os.read(told, 1)
    os._exit(1)
