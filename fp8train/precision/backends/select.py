"""Which backend runs a recipe on this machine, and what NVIDIA software is here to use."""

from __future__ import annotations

import importlib
from types import ModuleType

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


def nvidia_apex() -> ModuleType | None:
    """NVIDIA's apex if it is installed; not PyPI's package of that name, a Pyramid toolkit."""
    try:
        return importlib.import_module("apex.normalization")
    except ImportError:
        return None


def transformer_engine() -> ModuleType | None:
    """TransformerEngine's PyTorch package if it imports."""
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError):  # OSError: its CUDA libraries are missing
        return None
