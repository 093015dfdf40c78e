"""Run a function on several real processes that meet over gloo, and collect what they return."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world_size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on every rank; returns the ranks' results in order.

    The function must be importable (defined at a test module's top level).
    """
    context = mp.get_context("spawn")
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, folder, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    results = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
        file = folder / f"rank{rank}.pickle"
        ok, value = pickle.loads(file.read_bytes()) if file.exists() else (False, "it hung or died")
        assert ok, f"rank {rank} failed:\n{value}"
        results.append(value)
    return results


def _rank(
    rank: int, world_size: int, port: int, folder: Path, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    code, outcome = 0, (True, None)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        outcome = (True, function(*args))
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
    except Exception:
        code, outcome = 1, (False, traceback.format_exc())
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(outcome))
    os._exit(code)  # gloo's threads must not meet the interpreter's shutdown


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
