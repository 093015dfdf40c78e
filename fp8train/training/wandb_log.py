"""Weights & Biases: metrics of a run, online with a key and a network, else offline.

Everything is logged against our own step, since an offline resume starts W&B's at 0 again.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import Error as WandbError

from fp8train.config import Config
from fp8train.layout import SIZES, Layout
from fp8train.rules import sent_as

INIT_TIMEOUT = 15.0  # seconds to wait for the server before going offline
log = logging.getLogger(__name__)


class WandbLog:
    """One W&B run; `id` identifies it on a resume. Rank 0 only."""

    def __init__(self, config: Config, folder: Path, world_size: int, run_id: str | None) -> None:
        layout = Layout.of(config.parallel, world_size)

        sizes = [f"{name}{size}" for name in SIZES if (size := getattr(layout, name)) > 1]
        if layout.pipeline > 1:
            sizes.append(config.parallel.pipeline_schedule)
        arguments: dict[str, Any] = {
            "project": config.logging.wandb.project,
            "name": config.run.name,
            "group": config.run.experiment,
            "tags": [
                config.precision.recipe,
                config.run.recipe or config.model.name,
                *sizes,
                f"reduce-{sent_as(config, layout).replace(', ', '-').replace(' ', '-')}",
            ],
            "config": asdict(config),
            "dir": str(folder),
            "id": run_id,
            "resume": "allow" if run_id else None,
        }
        os.environ.setdefault("WANDB_SILENT", "true")  # its lines would break ours
        mode = choose_mode(config.logging.wandb.mode)
        self.run = start(mode, arguments)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.id, self.folder = str(self.run.id), folder

    @property
    def place(self) -> str:
        """Where the run can be seen: its page, or the folder to sync."""
        return str(self.run.url or f"offline; wandb sync {self.folder}/wandb/offline-run-*")

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics; it carries its own `step`."""
        self.run.log(flat(line))

    def alert(self, title: str, text: str) -> None:
        """Tell the run's owner, by W&B's mail or Slack."""
        self.run.alert(title=title, text=text, level="ERROR")

    def finish(self, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish()


def flat(line: dict[str, Any]) -> dict[str, Any]:
    """A line with its telemetry as telemetry/STATISTIC/LAYER.ROLE, without what is None."""
    line = dict(line)
    for name, statistics in line.pop("telemetry", {}).items():
        for statistic, value in statistics.items():
            if value is not None:
                line[f"telemetry/{statistic}/{name}"] = value
    return line


def choose_mode(mode: str) -> str:
    """What `auto` stands for: WANDB_MODE if set, online with a key, else offline."""
    if mode != "auto":
        return mode
    if chosen := os.environ.get("WANDB_MODE"):
        return chosen
    try:  # looks for a key, asks neither user nor server
        has_key = wandb.login(prompt=False, verify=False)
    except (WandbError, ValueError) as error:
        log.warning("wandb: offline, since the key can't be used (%s)", _first_line(error))
        return "offline"
    return "online" if has_key else "offline"


def start(mode: str, arguments: dict[str, Any]) -> wandb.Run:
    """`wandb.init`, offline where the server can't be reached; never a crash of the run."""
    settings = wandb.Settings(init_timeout=INIT_TIMEOUT, silent=True)
    try:
        return wandb.init(mode=mode, settings=settings, **arguments)  # type: ignore[arg-type]
    except (WandbError, OSError) as error:
        if mode != "online":
            raise
        log.warning("wandb: offline, since the server can't be reached (%s)", _first_line(error))
        return wandb.init(mode="offline", settings=settings, **arguments)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
