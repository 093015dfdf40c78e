"""A run on disk: outputs/<run.name>/ with its configuration, environment, metrics and results.

Ranks share the folder; rank 0 writes what is not a shard of a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from fp8train.config import Config, ConfigError
from fp8train.environment import environment


class RunFolder:
    """The files of one run."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir)
        self.config = config

    @property
    def holds_run(self) -> bool:
        """Whether it is a run's; a config.yaml alone may be anybody's."""
        return all((self.path / name).is_file() for name in ("config.yaml", "environment.json"))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def owns(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is this run's."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def branched_off(self) -> str | None:
        """The checkpoint that the run in the folder was started from; None without."""
        try:
            kept = OmegaConf.load(self.path / "config.yaml")
        except (OSError, ValueError, YAMLError):
            return None
        resume = OmegaConf.select(kept, "resume", default="none")
        return None if resume in ("none", "auto") else str(resume)

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
            resume = self.config.resume
            goes_on = resume == "auto" or (resume != "none" and self.owns(Path(resume)))
            if not goes_on and not run.overwrite:
                raise ConfigError(
                    f"run.dir={where} already holds a run: go on with resume=auto, choose another "
                    f"run.name=, or delete it with run.overwrite=true"
                )
            if goes_on and run.overwrite:
                raise ConfigError(
                    f"resume={resume} and run.overwrite=true contradict: leave one out"
                )
        elif where.exists() and any(where.iterdir()):
            raise ConfigError(
                f"run.dir={where} holds files of something else: choose another with run.name="
            )
        parent = next(path for path in (where, *where.absolute().parents) if path.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise ConfigError(f"run.dir={where} can't be made in {parent}: choose another run.dir=")

    def open(self, resuming: bool) -> None:
        """Make the folder and write config.yaml and environment.json. Rank 0 only.

        Raises:
            ConfigError: it can't be made.
        """
        if self.holds_run and self.config.run.overwrite:
            self._clear()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir={self.path} can't be made ({error.strerror}): choose another run.dir="
            ) from error
        (self.path / "summary.json").unlink(missing_ok=True)  # not finished any more
        if not resuming:
            self.metrics.unlink(missing_ok=True)
        write_whole(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        write_whole(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(self.config)))

    def _clear(self) -> None:
        """Delete the run's own files; what somebody else put beside them stays."""
        for name in ("checkpoints", "wandb"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        files = ("config.yaml", "environment.json", "metrics.jsonl", "telemetry.png")
        for name in (*files, "summary.json"):
            (self.path / name).unlink(missing_ok=True)

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after a step, and a half-written last one: a resume writes them anew."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        write_whole(self.metrics, "".join(kept))

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def logged(self, key: str) -> dict[int, float]:
        """A quantity of metrics.jsonl by step."""
        if not self.metrics.exists():
            return {}
        lines = map(json.loads, self.metrics.read_text(encoding="utf-8").splitlines())
        return {line["step"]: float(line[key]) for line in lines if key in line}

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, whose presence says that the run is complete."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def finished_steps(self) -> int | None:
        """Steps of the finished run in the folder; None if there is none."""
        try:
            return int(json.loads((self.path / "summary.json").read_text())["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
