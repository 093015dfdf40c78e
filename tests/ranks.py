"""Run a function on several real processes that meet over gloo, and collect what they return.

The processes are one pool that serves the whole session, because starting one costs seconds: it
grows to the largest number of ranks asked for, idles between jobs and ends with the session. Every
job gets a process group of its own and torch's state as a new process has it; only what a job
leaves in the attributes of modules stays, as it does between tests of one process.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

GRACE = 3.0  # seconds from the first failure's report in which ranks that failed with it report too


def on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """`function(*args)` on every rank; returns the ranks' results in order.

    The function must be importable (defined at a module's top level), and it, its arguments and
    its results must survive `pickle`. Each rank has this process's environment and working folder,
    torchrun's variables, one thread, and a default process group.

    Raises:
        AssertionError: the lowest rank that failed by itself, with its traceback; or all ranks
            that had no answer after `timeout` seconds, with the place where each stood.
    """
    return _pool.run(world_size, function, args, timeout)


@dataclass(frozen=True)
class _Job:
    """What one rank is to do."""

    call: bytes  # the pickled function and arguments; they need `modules` to be found
    rank: int
    world_size: int
    meeting: str  # the file over which the ranks find each other
    modules: list[str]
    environment: dict[str, str]
    folder: str


class _Outcome:
    """How a rank's job ended. Of several failures, the first kind in this order is the cause.

    A rank that dies makes its peers raise; one that raises keeps its connections, so that its peers
    only wait.
    """

    FAILURES = DIED, RAISED, HUNG = "died", "raised", "hung"
    RETURNED = "returned"


class _Worker:
    """One process of the pool, seen from this side."""

    def __init__(self, stack: Path) -> None:
        # Forked from a process that has the imports and nothing else: no threads, no tensors.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "torch.distributed.tensor.debug"])
        self.connection, theirs = context.Pipe()
        self.stack = stack
        self.process = context.Process(target=_serve, args=(theirs, stack))
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        """What it sends, or that it died."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return _Outcome.DIED, f"the process ended with exit code {self.process.exitcode}"

    def where(self) -> str:
        """The stack of what it is doing."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        return self.stack.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def close(self) -> None:
        """Let it leave by itself."""
        self.connection.close()
        self.process.join(10)
        self.kill()


class _Pool:
    """Idle workers, none of them bound to a rank."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.names = itertools.count()

    @functools.cached_property
    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Made on first use: the workers import this module too, and leave without cleaning up."""
        return tempfile.TemporaryDirectory(prefix="ranks-")

    def run(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        call = pickle.dumps((function, args))
        self.grow(world_size)
        team = self.workers[:world_size]
        try:
            self.hand_out(team, call)
            outcomes = self.collect(team, timeout)
            failure = self.failure(outcomes)
        except BaseException:  # Ctrl-C leaves them in the middle of something
            self.kill(team)
            raise
        if failure:
            self.kill(team)
            raise AssertionError(failure)
        return [pickle.loads(result) for _, result in outcomes]

    def grow(self, size: int) -> None:
        """Replace those that died while idle, and wait until `size` are ready."""
        self.kill([worker for worker in self.workers if not worker.process.is_alive()])
        new = [_Worker(self.new_file()) for _ in range(size - len(self.workers))]
        self.workers += new
        for worker in new:
            kind, message = worker.receive()
            if kind == _Outcome.DIED:
                self.kill(new)
                raise RuntimeError(f"no process for a rank: {message}")

    def new_file(self) -> Path:
        return Path(self.folder.name) / str(next(self.names))

    def hand_out(self, team: Sequence[_Worker], call: bytes) -> None:
        meeting = str(self.new_file())
        here = list(sys.path), dict(os.environ), os.getcwd()
        for rank, worker in enumerate(team):
            worker.connection.send(_Job(call, rank, len(team), meeting, *here))

    def collect(self, team: Sequence[_Worker], timeout: float) -> list[tuple[str, Any]]:
        """Each rank's outcome, in order."""
        ranks: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(team)}
        outcomes: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while ranks and (ready := wait(list(ranks), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = ranks.pop(connection)
                outcomes[rank] = team[rank].receive()
                if outcomes[rank][0] in _Outcome.FAILURES:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in ranks.values():
            outcomes[rank] = _Outcome.HUNG, f"no answer yet; it is here:\n{team[rank].where()}"
        return [outcomes[rank] for rank in range(len(team))]

    @staticmethod
    def failure(outcomes: Sequence[tuple[str, Any]]) -> str:
        for kind in _Outcome.FAILURES:
            failed = [
                f"rank {rank} failed:\n{text}"
                for rank, (ended, text) in enumerate(outcomes)
                if ended == kind
            ]
            if failed:  # of ranks that hang together, any may be the cause
                return "\n".join(failed if kind == _Outcome.HUNG else failed[:1])
        return ""

    def kill(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.kill()
        self.workers = [worker for worker in self.workers if worker not in workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


_pool = _Pool()
atexit.register(_pool.close)


# --- in the processes -------------------------------------------------------------------------


def _serve(connection: Connection, stack: Path) -> None:
    """Do the jobs that arrive until the pool closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the session's process
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    restore, imports = _torch_state(), _Imports()
    with stack.open("w") as file, suppress(EOFError, BrokenPipeError):
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        connection.send(("ready", None))
        while True:
            outcome = _perform(connection.recv(), imports)
            restore()
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(outcome)
    os._exit(0)  # gloo's threads must not meet the interpreter's shutdown


def _leave_with_parent() -> None:
    """End this process when the session's has died, whatever the job is waiting for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Imports:
    """What imports have brought: set apart, since a collector that walks over it takes a third of a
    second for every job.

    Attributes:
        caches: torch.distributed's functions that remember results.
        threads: native threads when there were no jobs yet.
    """

    def __init__(self) -> None:
        self.caches: list[Any] = []
        self.modules = 0
        self.threads = native_threads()

    def settle(self) -> None:
        """To be called when imports are done and a job's objects are not made yet.

        While a thread of an earlier job lives, so may objects of it, and set apart they would never
        be collected.
        """
        if len(sys.modules) == self.modules or native_threads() > self.threads:
            return
        self.modules = len(sys.modules)
        self.caches += self.new_caches()
        gc.collect()
        gc.freeze()  # no longer among `gc.get_objects()` either

    def new_caches(self) -> list[Any]:
        return [
            thing
            for thing in gc.get_objects()
            if type(thing) is functools._lru_cache_wrapper
            and thing.__module__.startswith("torch.distributed.")
        ]


def native_threads() -> int:
    """Threads of this process, those of gloo among them."""
    return len(os.listdir("/proc/self/task"))


def _perform(job: _Job, imports: _Imports) -> tuple[str, Any]:
    rank, size = str(job.rank), str(job.world_size)
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.chdir(job.folder)
    sys.path[:] = job.modules
    importlib.invalidate_caches()
    try:
        pickle.loads(job.call)  # imports what it needs
        imports.settle()
        store = dist.FileStore(job.meeting, job.world_size)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size)
        result = _call(job.call)
        dist.barrier()
        _part(imports)
    except BaseException:
        return _Outcome.RAISED, traceback.format_exc()
    return _Outcome.RETURNED, result


def _call(pickled: bytes) -> bytes:
    """The pickled result; a function of its own, so that nothing of the call outlives it."""
    function, args = pickle.loads(pickled)
    return pickle.dumps(function(*args))


def _part(imports: _Imports) -> None:
    """Forget the job's meshes and groups.

    torch's caches are keyed by mesh and hold results on it, but meshes of equal shape and names are
    equal: the next job would get tensors on a mesh whose groups are gone. gloo's groups and their
    threads outlive `destroy_process_group` while anything holds them.
    """
    _mesh_resources.mesh_stack.clear()
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cache in (*imports.caches, *imports.new_caches()):
        cache.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    while gc.collect():  # an object's finaliser may let go of others that hold a group
        pass
    dist.destroy_process_group()


def _torch_state() -> Callable[[], None]:
    """What puts torch's global state back as it is now."""
    pairs: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    values = [get() for get, _ in pairs]

    def restore() -> None:
        torch.set_default_device(None)
        for (_, put), value in zip(pairs, values, strict=True):
            put(value)

    return restore
