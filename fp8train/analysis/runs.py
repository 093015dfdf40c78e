"""A finished run, read back from its folder (`outputs/<run.name>/`)."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fp8train.config import ConfigError, nearest


def number(value: Any) -> float:
    """The value as a float; NaN for what is missing, infinite or no number."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


@dataclass(frozen=True)
class Run:
    """What a finished run left on disk.

    Attributes:
        folder: where it was read from.
        config: config.yaml, nested as fp8train/config.py has it.
        environment: environment.json (versions, hardware, git); empty where there is none.
        summary: summary.json.
        training: metrics of the optimizer steps, by step, in order.
        validation: metrics of the validations, by step, in order; step 0 is before training.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    training: dict[int, dict[str, Any]]
    validation: dict[int, dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.summary.get("name") or self.folder.name)

    @property
    def steps(self) -> int:
        return int(self.summary["steps"])

    @property
    def final_validation_loss(self) -> float:
        """In nats a token; NaN where it is missing."""
        return number(self.summary.get("final_validation_loss"))

    @property
    def initial_validation_loss(self) -> float:
        """In nats a token, before the first step; NaN where it is missing."""
        return number(self.validation.get(0, {}).get("validation_loss"))

    @property
    def losses(self) -> dict[int, float]:
        """The training loss by step, in nats a token."""
        return {step: number(line["loss"]) for step, line in self.training.items()}

    @property
    def step_seconds(self) -> float:
        """The median time of an optimizer step in seconds; NaN where none was logged."""
        seconds = [number(line.get("step_seconds")) for line in self.training.values()]
        finite = [value for value in seconds if math.isfinite(value)]
        return statistics.median(finite) if finite else math.nan


def load_run(folder: str | Path) -> Run:
    """Read a finished run.

    Raises:
        ConfigError: there is no such folder, it holds no run, the run is not finished, or one of
            its files can't be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        siblings = [str(path) for path in folder.parent.glob("*") if path.is_dir()]
        raise ConfigError(f"run folder {folder} does not exist{nearest(str(folder), siblings)}")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is not a run (it has no config.yaml): give the folder of a run, "
            f"such as outputs/NAME"
        )
    if not (folder / "summary.json").is_file():
        raise ConfigError(
            f"{folder}: the run is not finished (it has no summary.json): "
            f"finish it with its own command and resume=auto"
        )
    summary = _read_object(folder / "summary.json")
    if summary.get("status") != "finished":
        raise ConfigError(
            f"{folder}: the run is not finished (status {summary.get('status')}): "
            f"finish it with its own command and resume=auto"
        )
    if not isinstance(summary.get("steps"), int):
        raise ConfigError(f"{folder}/summary.json has no number of steps: train the run again")
    environment = folder / "environment.json"
    training, validation = _read_metrics(folder / "metrics.jsonl")
    return Run(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        environment=_read_object(environment) if environment.is_file() else {},
        summary=summary,
        training=training,
        validation=validation,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # YAML's errors and OmegaConf's have no base in common
        raise ConfigError(f"{path} can't be read as YAML: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not the configuration of a run: give a run's folder")
    return {str(key): value for key, value in config.items()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} can't be read as JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object: train the run again")
    return value


def _read_metrics(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Split metrics.jsonl into the lines of training and of validation, each by step."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing: train the run again")
    training: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise ConfigError(f"{path} is not text ({_first_line(error)}): train again") from error
    for index, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {index} is not a line of metrics") from error
        if "validation_loss" in line:
            validation[step] = line
        if "loss" in line:
            training[step] = line
    return dict(sorted(training.items())), dict(sorted(validation.items()))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
