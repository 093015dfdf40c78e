"""Which backend runs the recipes of a run, and the backend itself by its name."""

from __future__ import annotations

import torch

from fp8train.config import ConfigError, PrecisionConfig
from fp8train.precision.backends import torch_gemms, transformer_engine
from fp8train.precision.backends.emulated import Emulated
from fp8train.precision.backends.protocol import Backend
from fp8train.precision.backends.quantized_layers import QuantizedLayers
from fp8train.precision.backends.support import Machine, refuse
from fp8train.precision.backends.torch_gemms import TorchGemms
from fp8train.precision.backends.transformer_engine import Engine, TransformerEngine
from fp8train.precision.recipes import Recipe, recipe_of


def choose_backend(precision: PrecisionConfig, device: torch.device) -> str:
    """The backend for the recipes on the device: the asked one, or for `auto` the best.

    Raises:
        ConfigError: the asked backend does not run here, or lacks an option.
    """
    wanted = precision.backend == "transformer_engine"
    return choose(precision, Machine.here(device, with_transformer_engine=wanted))


def choose(precision: PrecisionConfig, machine: Machine) -> str:
    """`choose_backend` for any machine."""
    wanted = precision.backend
    if wanted == "transformer_engine" and machine.device != "cuda":
        raise ConfigError(
            f"precision.backend={wanted} needs a CUDA GPU and this run is on the "
            f"{machine.device.upper()}: use precision.backend=emulated or auto"
        )
    recipes = recipes_of(precision)
    if not recipes:
        return "torch"
    if wanted in ("auto", "emulated"):
        return "emulated"  # `auto` on a GPU too: no other has been measured against it yet
    for recipe in recipes:
        refuse(wanted, recipe, machine)
    check_options(precision, wanted, recipes, machine)
    return wanted


def recipes_of(precision: PrecisionConfig) -> dict[str, Recipe]:
    """The recipes that quantise, of the run and of `precision.layer_recipes`."""
    names = dict.fromkeys(
        [precision.recipe, *(layers.recipe for layers in precision.layer_recipes)]
    )
    found = {name: recipe_of(precision, name) for name in names}
    return {name: recipe for name, recipe in found.items() if recipe is not None}


def check_options(
    precision: PrecisionConfig, backend: str, recipes: dict[str, Recipe], machine: Machine
) -> None:
    """Refuse what only another backend does.

    Raises:
        ConfigError: naming the option.
    """
    for key, value in (("accumulate", "hopper"), ("emulation", "exact")):
        if getattr(precision, key) == value:
            raise ConfigError(
                f"precision.{key}={value} is for the emulated backend: use "
                f"precision.backend=emulated, or leave it out with precision.backend={backend}"
            )
    if backend == "transformer_engine":
        transformer_engine.check_options(precision, list(recipes), machine.capability)
    for name, recipe in recipes.items():
        if backend == "torch":
            torch_gemms.check_formats(name, recipe)
        else:
            transformer_engine.check_recipe(name, recipe)


def load_backend(name: str, precision: PrecisionConfig, device: torch.device) -> Backend:
    """The backend that `choose_backend` named.

    Raises:
        ConfigError: Transformer Engine does not import.
    """
    match name:
        case "emulated":
            gemms = Emulated.on(device, precision.emulation, precision.accumulate)
            return QuantizedLayers(name, gemms)
        case "torch":
            return QuantizedLayers(name, TorchGemms.on(device))
        case "transformer_engine":
            return TransformerEngine(Engine.load())
    raise ValueError(f"no backend is called {name}")
