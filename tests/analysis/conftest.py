"""Run folders with the files a training run leaves, and losses that look like a real run's."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8train.config import Config, ModelConfig, PrecisionConfig, RunConfig, TrainerConfig

MakeRun = Callable[..., Path]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path,
    precision: str = "bf16",
    gap: float = 0.0,
    steps: int = 200,
    validate_every: int = 50,
    seconds: float = 0.2,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """Write a finished run whose losses lie `gap` above the common curve at the end."""
    fp8 = precision.startswith("fp8")
    settings = asdict(
        Config(
            run=RunConfig(name=folder.name, dir=f"outputs/{folder.name}"),
            trainer=TrainerConfig(steps=steps, validate_every=validate_every),
            model=ModelConfig("llama_tiny", 320, 128, 384, 4, 4, 2),
            precision=PrecisionConfig(recipe=precision),
        )
    )
    for section, values in (config or {}).items():
        settings[section] |= values
    noise, own = random.Random(0), random.Random(precision)  # the batches' noise is shared

    def curve(step: int) -> float:
        return (1.9 + 3.9 * math.exp(-step / 45)) * (1 + gap * step / steps)

    lines: list[dict[str, Any]] = []
    initial = final = round(curve(0), 5)
    lines.append({"step": 0, "tokens": 0, "validation_loss": initial})
    for step in range(1, steps + 1):
        value = curve(step) + noise.gauss(0, 0.07) + own.gauss(0, 0.006)
        lines.append(
            {
                "step": step,
                "loss": value,
                "grad_norm": 1.1,
                "learning_rate": 3e-3,
                "tokens": step * 2048,
                "tokens_per_second": 2048 / seconds,
                "step_seconds": seconds,
                "peak_memory_bytes": 300_000_000,
                "model_tflops_per_device": 0.01,
                "bytes_reduced": 560_000 if fp8 else 2_200_000,
                "skipped_steps": 0,
            }
        )
        if step % validate_every == 0 or step == steps:
            final = curve(step) + 0.03 + own.gauss(0, 0.001)
            lines.append({"step": step, "tokens": step * 2048, "validation_loss": final})
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (folder / "environment.json").write_text(
        json.dumps(
            {
                "versions": {"python": "3.11.2", "torch": "2.13.0"},
                "hardware": {"cpu_cores": 2, "gpus": []},
            }
        )
    )
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "name": folder.name,
                "status": "finished",
                "steps": steps,
                "final_validation_loss": final,
                "initial_validation_loss": initial,
                "final_loss": value,
                "tokens": steps * 2048,
                "median_tokens_per_second": 2048 / seconds,
                "wall_seconds": steps * seconds,
                "precision": precision,
                "backend": "emulated" if fp8 else "torch",
                "gradient_reduction": "e5m2" if fp8 else "fp32",
                "bytes_reduced_per_step": 560_000 if fp8 else 2_200_000,
                "fp8_flop_fraction": 1.0 if fp8 else 0.0,
                "data_fingerprint": "5d0c6f8e1a2b3c4d",
                "parameters": 1_100_000,
                "world_size": 2,
                "skipped_steps": 0,
                "parent": None,
                **(summary or {}),
            }
        )
    )
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run into tmp_path/NAME: `make_run("fp8", "fp8_current", gap=0.002)`."""

    def make(name: str, *args: Any, **kwargs: Any) -> Path:
        return write_run(tmp_path / name, *args, **kwargs)

    return make
