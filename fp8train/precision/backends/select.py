"""Which backend runs a recipe on this machine."""

from __future__ import annotations

import torch

from fp8train.config import FP8_RECIPES, ConfigError, PrecisionConfig

GPU_ONLY = ("torch", "transformer_engine")


def choose_backend(precision: PrecisionConfig, device: torch.device) -> str:
    """The backend for the recipe on the device; `auto` picks the best that runs.

    Raises:
        ConfigError: the asked backend does not run here.
    """
    wanted = precision.backend
    if wanted in GPU_ONLY and device.type != "cuda":
        raise ConfigError(
            f"precision.backend={wanted} needs a CUDA GPU and this run is on the "
            f"{device.type.upper()}: use precision.backend=emulated or auto"
        )
    if wanted in GPU_ONLY and precision.recipe in FP8_RECIPES:
        raise ConfigError(
            f"precision.backend={wanted} does not run {precision.recipe} yet: "
            f"use precision.backend=emulated or auto"
        )
    return "emulated" if precision.recipe in FP8_RECIPES else "torch"
