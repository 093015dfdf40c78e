"""What a checkpoint says of itself: where the run stood, and what a resume must have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8train.config import Config, ConfigError, flattened, written
from fp8train.environment import environment
from fp8train.layout import Layout, micro_batches
from fp8train.rules import gradient_reduction, loss_scaling

MANIFEST = "manifest.json"
GRADIENTS = ("scaling", "rounding", "error_feedback", "algorithm")  # what decides their values


@dataclass
class Progress:
    """Where a run stands; with the tensors, all that a resume needs."""

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    loss_scale: float | None = None  # of the next step, where the scale is dynamic
    growth_tracker: int = 0  # good steps since that scale last changed or a step was skipped
    wandb_id: str | None = None


def held(config: Config) -> dict[str, Any]:
    """What a resume must have in common with the run: another value would train another model."""
    model, precision = asdict(config.model), asdict(config.precision)
    # How it is computed and watched, not what.
    for free in ("backend", "emulation", "cache_weights", "telemetry"):
        del precision[free]
    del model["name"]
    return {
        "model": model,
        "precision": precision,
        "gradients": {
            "reduce": gradient_reduction(config),
            **{key: getattr(config.gradients, key) for key in GRADIENTS},
        },
        "data": {"eod_mask_loss": config.data.eod_mask_loss},
    }


def describe(
    progress: Progress, config: Config, layout: Layout, fingerprint: str
) -> dict[str, Any]:
    """The manifest of a checkpoint of this step."""
    return {
        "progress": asdict(progress),
        "data_fingerprint": fingerprint,
        "layout": str(layout),
        "gradient_unit": gradient_unit(config, layout),
        **held(config),
        "config": asdict(config),
        "environment": environment(),
    }


def gradient_unit(config: Config, layout: Layout) -> float:
    """What gradients are multiplied by while they are reduced, so the unit of what error feedback
    keeps: a static loss scale, for each micro batch of a step."""
    static = loss_scaling(config) == "static"
    scale = config.trainer.loss_scale.value if static else 1.0
    return scale * micro_batches(config, layout)


def read(checkpoint: Path) -> dict[str, Any] | None:
    """The checkpoint's manifest; None if there is no whole one."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = {"progress", "data_fingerprint", "layout", "gradient_unit", "model", "precision"}
    wanted |= {"gradients", "data"}
    return manifest if isinstance(manifest, dict) and wanted <= manifest.keys() else None


def progress_of(checkpoint: Path, config: Config, fingerprint: str) -> Progress:
    """The checkpoint's progress, after holding it to the configuration.

    Raises:
        ConfigError: it is incomplete, or of another model, precision or data.
    """
    manifest = read(checkpoint)
    if manifest is None:
        raise ConfigError(f"{checkpoint} is not a complete checkpoint: resume from another")
    theirs = flattened(manifest)
    for key, value in flattened(held(config)).items():
        if theirs.get(key) != value:
            group = key.partition(".")[0].replace("gradients", "gradient reduction")
            raise ConfigError(
                f"{checkpoint} is a checkpoint of another {group}: {key} is "
                f"{written(theirs.get(key))} there and {written(value)} here; use its "
                f"configuration, or another run.name="
            )
    if manifest["data_fingerprint"] != fingerprint:
        raise ConfigError(
            f"{checkpoint} was trained on other data: fingerprint {manifest['data_fingerprint']} "
            f"there and {fingerprint} here; restore data, seed, sequence length and global batch "
            f"size, or use another run.name="
        )
    try:
        return Progress(**manifest["progress"])
    except TypeError as error:
        raise ConfigError(f"{checkpoint} is of another version of fp8train: {error}") from error
