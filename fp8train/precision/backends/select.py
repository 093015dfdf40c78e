"""Which backend runs a recipe on this machine."""

from __future__ import annotations

import torch

from fp8train.config import FP8_RECIPES, ConfigError, PrecisionConfig
from fp8train.precision.backends.transformer_engine import Engine, refusal

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
    if precision.recipe not in FP8_RECIPES:
        return "torch"
    if wanted == "torch":
        raise ConfigError(
            f"precision.backend=torch does not run {precision.recipe} yet: "
            f"use precision.backend=emulated or auto"
        )
    if wanted == "transformer_engine":
        capability = torch.cuda.get_device_capability(device)
        reason = refusal(precision.recipe, capability, Engine.load())
        if reason:
            raise ConfigError(reason)
        return wanted
    # `auto` too, on a GPU as well: no other backend has been measured against it yet.
    return "emulated"
