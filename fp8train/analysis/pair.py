"""Planning and training the runs of a comparison, one torchrun after the other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import hydra
from omegaconf import OmegaConf

from fp8train.config import CompareConfig, Config, ConfigError, from_container
from fp8train.rules import check

STOP_SECONDS = 60  # more than the 30 s after which torchrun kills its workers


@dataclass(frozen=True)
class PlannedRun:
    """A training run to come: what it is to the comparison, its configuration and overrides."""

    role: str
    config: Config
    overrides: list[str]

    @property
    def name(self) -> str:
        return self.config.run.name

    def command(self, processes: int, script: Path) -> list[str]:
        """The torchrun command that trains it."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(processes), str(script), *self.overrides]


def key_of(override: str) -> str:
    """The dotted key of a Hydra override, without its sign: `++a.b=1` gives `a.b`."""
    return re.sub(r"^[+~]*", "", override.partition("=")[0]).partition("@")[0]


def training_overrides(overrides: Sequence[str]) -> list[str]:
    """What launch/train.py understands of launch/compare.py's overrides."""
    return [
        item
        for item in overrides
        if key_of(item) != "baseline" and not f"{key_of(item)}.".startswith("compare.")
    ]


def with_precision(overrides: Sequence[str], precision: str, *options: str) -> list[str]:
    """The same overrides under another precision; options of the former one are dropped."""
    kept = [item for item in overrides if not f"{key_of(item)}.".startswith("precision.")]
    return [*kept, f"precision={precision}", *options]


def compose(overrides: list[str]) -> Config:
    """The configuration that launch/train.py makes of these overrides (inside a Hydra app)."""
    container = OmegaConf.to_container(hydra.compose("compare", overrides), resolve=True)
    assert isinstance(container, dict)
    return from_container({str(key): value for key, value in container.items()}, CompareConfig)


def plan(variants: Sequence[tuple[str, str, list[str]]], processes: int) -> list[PlannedRun]:
    """Compose and check the runs of a comparison before any of them starts.

    Args:
        variants: role, suffix and overrides of each run. The suffix is added to `run.name` where
            a run before it has the same name.
        processes: torchrun processes of each run.
    Raises:
        ConfigError: a rule between the keys is broken, two runs would share a folder, or one
            holds a run already.
    """
    if processes < 1:
        raise ConfigError(f"compare.processes={processes}: must be at least 1")
    planned: list[PlannedRun] = []
    for role, suffix, overrides in variants:
        config = compose(overrides)
        if config.run.name in {run.name for run in planned}:
            others = [item for item in overrides if key_of(item) != "run.name"]
            overrides = [*others, f"run.name={config.run.name}-{suffix}"]
            config = compose(overrides)
        for other in planned:
            if Path(config.run.dir).resolve() == Path(other.config.run.dir).resolve():
                raise ConfigError(
                    f"run.dir={config.run.dir} would hold two runs: drop run.dir and name them "
                    f"with run.name=NAME (their folders are outputs/NAME and outputs/NAME-{suffix})"
                )
        check(config, world_size=processes)
        _check_folder(config)
        planned.append(PlannedRun(role, config, overrides))
    return planned


def _check_folder(config: Config) -> None:
    """Refuse a second run's full folder before the first run has trained for hours."""
    holds_run = (Path(config.run.dir) / "config.yaml").exists()
    if holds_run and config.resume == "none" and not config.run.overwrite:
        raise ConfigError(
            f"{config.run.dir} already holds a run: go on with resume=auto, choose another "
            f"run.name=, or delete it with run.overwrite=true"
        )


def train(run: PlannedRun, processes: int, script: Path) -> None:
    """Train one run as a torchrun child whose output goes to our terminal.

    The child gets a session of its own, so that Ctrl-C reaches us alone and torchrun is asked to
    stop once: a second signal during its clean-up would leave its workers behind.

    Raises:
        ConfigError: the child failed.
    """
    shown = " ".join([script.name, *run.overrides])
    print(f"=== {run.role}: {run.name} | {processes} x {shown}", flush=True)
    environment = dict(os.environ)
    if "OMP_NUM_THREADS" not in environment:  # else torchrun sets one thread and warns
        cores = len(os.sched_getaffinity(0))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    with _interrupt_on(signal.SIGTERM, signal.SIGHUP):
        child = subprocess.Popen(
            run.command(processes, script), env=environment, start_new_session=True
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            _stop(child)
            raise
    if code:
        raise ConfigError(
            f"the {run.role} run {run.name} failed with exit code {code}: "
            f"mend what its messages above say, then go on with resume=auto"
        )


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to stop and wait; it gives its workers 30 s. No signal may cut this short."""
    print("stopping the training processes (30 s at most)", file=sys.stderr, flush=True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    child.terminate()
    try:
        child.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@contextmanager
def _interrupt_on(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals act as Ctrl-C, those left out that are ignored already (nohup)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    caught = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    handlers = [signal.signal(number, interrupt) for number in caught]
    try:
        yield
    finally:
        for number, handler in zip(caught, handlers, strict=True):
            signal.signal(number, handler)
