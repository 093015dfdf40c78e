"""What a result was made with: versions, hardware, git state."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fp8train import __version__

PACKAGES = ("torch", "hydra-core", "omegaconf", "datasets", "tokenizers", "wandb", "numpy")


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
        hardware["compute_capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        versions["cuda"] = str(torch.version.cuda)
    return {"versions": versions, "hardware": hardware, "git": git_state()}


def write_record(
    path: Path,
    name: str,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    versions: dict[str, str] | None = None,
) -> None:
    """Write what a script measured, with what it was measured on, as JSON.

    Args:
        versions: of further packages.
    """
    found = environment()
    record = {
        "name": name,
        "hardware": found["hardware"],
        "versions": found["versions"] | (versions or {}),
        "config": config,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


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
