"""NVIDIA Transformer Engine (TE) as a backend: our recipes in its words, its linear in our model.

TE imports only where CUDA is, so everything here takes it as an argument (`Engine`).

Two rules of TE shape this file. It updates all delayed scales at the end of the outermost
`autocast` region, so the region has to span the whole forward, not a layer: a region a layer
would reduce the amaxes of the whole model at every layer. And leaving an inner region makes TE
take the next layer for the first of the forward, which brings the backward reductions back at
every layer: so `Region` enters TE's once, however deep it is asked for.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8train.config import FP8_RECIPES, ConfigError
from fp8train.precision.recipes import (
    FORMATS,
    ROLES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Formats,
    Recipe,
)

BACKEND = "precision.backend=transformer_engine"
ALIGNMENT = 16  # of both sizes of a matrix in an FP8 GEMM


@dataclass(frozen=True)
class Engine:
    """TE's modules.

    Attributes:
        pytorch: `transformer_engine.pytorch`.
        recipes: `transformer_engine.common.recipe`.
    """

    pytorch: Any
    recipes: Any

    @classmethod
    def load(cls) -> Engine:
        """TE as installed here.

        Raises:
            ConfigError: it does not import.
        """
        try:
            pytorch = importlib.import_module("transformer_engine.pytorch")
            recipes = importlib.import_module("transformer_engine.common.recipe")
        except Exception as error:  # a build for another CUDA or torch fails in many ways
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{BACKEND}: Transformer Engine does not import ({type(error).__name__}: "
                f"{reason}); build it with pip install --no-build-isolation "
                f"'transformer-engine[pytorch]', or use precision.backend=emulated"
            ) from error
        return cls(pytorch, recipes)


def refusal(recipe: str, capability: tuple[int, int], engine: Engine) -> str | None:
    """Why TE does not run the recipe on the current GPU, in one line; None if it does.

    Args:
        recipe: a value of `precision.recipe`.
        capability: the GPU's compute capability, for the message; TE reads the GPU itself.
    """
    able, reason = _available(recipe, engine)
    if able:
        return None
    others = [name for name in FP8_RECIPES if _available(name, engine)[0]]
    instead = f"here it runs {', '.join(others)}; or " if others else ""
    return (
        f"{BACKEND} does not run {recipe} on this GPU of compute capability "
        f"{capability[0]}.{capability[1]}: {reason.rstrip('.')}; "
        f"{instead}use precision.backend=emulated"
    )


def _available(recipe: str, engine: Engine) -> tuple[bool, str]:
    te = engine.pytorch
    able, reason = te.is_fp8_available(return_reason=True)
    if able and recipe == "fp8_block":
        able, reason = te.is_fp8_block_scaling_available(return_reason=True)
    return able, reason


def te_recipe(recipe: Recipe, recipes: Any) -> Any:
    """TE's object for a recipe of ours.

    TE's scales of current and block scaling are powers of two or not by environment variables
    read at its import; here the configuration alone decides.

    Args:
        recipes: `transformer_engine.common.recipe`.
    Raises:
        ConfigError: an option that TE lacks.
    """
    if recipe.margin and not isinstance(recipe, DelayedScaling):
        raise ConfigError(
            f"precision.margin={recipe.margin}: Transformer Engine has a margin in fp8_delayed "
            f"only; set precision.margin=0, or use precision.backend=emulated"
        )
    te_format = _te_format(recipe.formats, recipes)
    match recipe:
        case DelayedScaling():
            if recipe.power_of_two:
                raise ConfigError(
                    "precision.power_of_two_scales=true: Transformer Engine's fp8_delayed has "
                    "FP32 scales only; set it to false, or use precision.backend=emulated"
                )
            return recipes.DelayedScaling(
                margin=recipe.margin,
                fp8_format=te_format,
                amax_history_len=recipe.history_length,
                amax_compute_algo=recipe.amax_compute,
            )
        case CurrentScaling():
            power_of_two = recipe.power_of_two
            result = recipes.Float8CurrentScaling(
                use_power_2_scales=power_of_two, fp8_format=te_format
            )
        case BlockScaling():
            power_of_two = True
            result = recipes.Float8BlockScaling(use_f32_scales=False, fp8_format=te_format)
    # What TE's linear reads are these three, which the constructors above leave as the
    # environment had them.
    for role in ("fwd_inp", "fwd_weight", "bwd_grad"):
        setattr(result, f"fp8_quant_{role}", recipes.QParams(power_2_scale=power_of_two))
    return result


def _te_format(formats: Formats, recipes: Any) -> Any:
    """TE knows HYBRID and E4M3 by the names that our configuration uses."""
    name = next(name for name, known in FORMATS.items() if known == formats)
    return recipes.Format[name.upper()]


class Region:
    """TE's autocast under one recipe, entered once however deep it is asked for."""

    def __init__(self, recipe: Recipe, engine: Engine) -> None:
        self.engine = engine
        self.recipe = te_recipe(recipe, engine.recipes)
        self.depth = 0
        self.autocast: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.depth == 0:
            self.autocast = self.engine.pytorch.autocast(enabled=True, recipe=self.recipe)
            self.autocast.__enter__()
        self.depth += 1

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            assert self.autocast is not None
            self.autocast.__exit__(*error)

    def span(self, model: nn.Module) -> None:
        """Have every forward of the model run inside, until its end or an exception."""

        def enter(*_: Any) -> None:
            self.__enter__()

        def leave(*_: Any) -> None:
            if self.depth:  # 0 if the forward failed before it came in
                self.__exit__(None, None, None)

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)


def take_over(name: str, linear: nn.Linear, region: Region) -> nn.Module:
    """A TE linear that shares the parameters of an `nn.Linear`, and their names.

    It is a TE linear, not a module around one: `layers.0.mlp.up_proj.weight` stays that in
    checkpoints, and TE reads the attribute that FSDP2 swaps between shard and gathered weight.

    Args:
        name: the layer's full name, for the refusal.
        linear: on any device, also meta.
    Raises:
        ConfigError: a size that TE's FP8 GEMMs do not take.
    """
    n, k = linear.out_features, linear.in_features
    if n % ALIGNMENT or k % ALIGNMENT:
        raise ConfigError(
            f"{BACKEND}: {name} is {n}×{k}, and its FP8 GEMMs need multiples of {ALIGNMENT}; "
            f"change the model's sizes, or add the layer to precision.exclude"
        )
    layer = linear_class(region.engine.pytorch.Linear)(
        k, n, bias=linear.bias is not None, device="meta"
    )
    layer.weight = linear.weight
    if linear.bias is not None:
        layer.bias = linear.bias
    layer.region = region
    layer.train(linear.training)
    return layer


@lru_cache
def linear_class(base: type[nn.Module]) -> type[Any]:
    """The subclass of `transformer_engine.pytorch.Linear` that runs under a `Region`."""

    class TransformerEngineLinear(base):  # type: ignore[misc, valid-type]
        region: Region

        # TE adds a pickle to state dicts, `NAME._extra_state`, whose size changes at the first
        # forward and which it refuses to load by default. `DelayedHistories` saves the content.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, x: Tensor) -> Tensor:
            """x [..., K] → [..., N] in x's dtype."""
            with self.region:
                y: Tensor = super().forward(x)
            return y

    return TransformerEngineLinear


# Where TE keeps each role: the key of its state, and the column of scale and history there.
SLOTS = {
    "input": ("scaling_fwd", 0),
    "weight": ("scaling_fwd", 1),
    "grad_output": ("scaling_bwd", 0),
}


class DelayedHistories:
    """TE's amax histories and scales, under the names that `DelayedState` saves them by.

    TE rolls them itself, after each forward and each backward: a skipped step rolls too, and what
    an evaluation saw enters the next roll.

    Args:
        layers: the model's TE linears, by full name.
        region: the one that they run under.
    """

    def __init__(self, layers: dict[str, Any], region: Region) -> None:
        self.layers, self.region = layers, region

    @torch.no_grad()  # with gradients on, leaving the region would end a forward for TE
    def state_dict(self) -> dict[str, Tensor]:
        """Views of each role's history [L] and scale [1] in FP32; written into by a load."""
        state = {}
        with self.region:
            for layer in self.layers.values():
                layer.init_fp8_metadata()  # TE makes them at the first forward, else
        for name, layer in self.layers.items():
            for role in ROLES:
                key, column = SLOTS[role]
                held = layer.fp8_meta[key]
                state[f"{name}.{role}.amax_history"] = held.amax_history[:, column]
                state[f"{name}.{role}.scale"] = held.scale[column : column + 1]
        return state

    def discard(self) -> None:
        """Nothing to forget: TE has rolled already."""

    def roll(self, group: object = None) -> None:
        """Nothing to roll: TE has, over all ranks."""
