"""A run on disk: outputs/<run.name>/ with its configuration, environment, metrics and results.

Ranks share the folder; rank 0 writes what is not a shard of a checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from fp8train import __version__
from fp8train.config import Config, ConfigError

PACKAGES = ("torch", "hydra-core", "omegaconf", "datasets", "tokenizers", "wandb", "numpy")


class RunFolder:
    """The files of one run."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir)
        self.config = config

    @property
    def holds_run(self) -> bool:
        return (self.path / "config.yaml").exists()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check(self) -> None:
        """Refuse a folder that is not ours to write to. Writes nothing; every rank may call it.

        Raises:
            ConfigError: the folder holds a run and neither resume nor overwrite is asked for, or
                something that is no run.
        """
        run, where = self.config.run, self.path
        if where.exists() and not where.is_dir():
            raise ConfigError(
                f"run.dir={where} is a file: choose another with run.name= or run.dir="
            )
        if self.holds_run:
            if self.config.resume == "none" and not run.overwrite:
                raise ConfigError(
                    f"run.dir={where} already holds a run: go on with resume=auto, choose another "
                    f"run.name=, or delete it with run.overwrite=true"
                )
            if self.config.resume == "auto" and run.overwrite:
                raise ConfigError("resume=auto and run.overwrite=true contradict: leave one out")
        elif where.exists() and any(where.iterdir()):
            raise ConfigError(
                f"run.dir={where} holds files of something else: choose another with run.name="
            )

    def open(self, resuming: bool) -> None:
        """Make the folder and write config.yaml and environment.json. Rank 0 only."""
        if self.holds_run and self.config.run.overwrite:
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "summary.json").unlink(missing_ok=True)  # not finished any more
        if not resuming:
            self.metrics.unlink(missing_ok=True)
        write_whole(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        write_whole(self.path / "config.yaml", yaml.safe_dump(asdict(self.config), sort_keys=False))

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after a step, and a half-written last one: a resume writes them anew."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                continue
        write_whole(self.metrics, "".join(kept))

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def initial_validation_loss(self) -> float | None:
        """The held-out loss at step 0, from metrics.jsonl; None if it is not there."""
        for text in self.metrics.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["step"] == 0 and "validation_loss" in line:
                return float(line["validation_loss"])
        return None

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, whose presence says that the run is complete."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def finished_steps(self) -> int | None:
        """Steps of the finished run in the folder; None if there is none."""
        file = self.path / "summary.json"
        return int(json.loads(file.read_text())["steps"]) if file.exists() else None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def environment() -> dict[str, Any]:
    """Versions, hardware and git state, for environment.json."""
    versions = {"fp8train": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    hardware: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
        hardware["gpus"] = torch.cuda.device_count()
        versions["cuda"] = str(torch.version.cuda)
    return {"versions": versions, "hardware": hardware, "git": git_state()}


def cpu_name() -> str:
    """The processor's name, from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state() -> dict[str, Any]:
    """Commit of the source and whether it was changed; empty outside a checkout."""
    root = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {}
