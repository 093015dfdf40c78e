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

from fp8train.config import ConfigError, PrecisionConfig
from fp8train.precision.backends.protocol import Installed, Job, replace
from fp8train.precision.recipes import (
    ALL_E2M1,
    NAMED,
    ROLES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Formats,
    MXScaling,
    NVFP4Scaling,
    Recipe,
)

BACKEND = "precision.backend=transformer_engine"
INSTEAD = "or use precision.backend=emulated"


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
    def found(cls) -> Engine | str:
        """TE as installed here, or why it does not import."""
        try:
            pytorch = importlib.import_module("transformer_engine.pytorch")
            recipes = importlib.import_module("transformer_engine.common.recipe")
        except Exception as error:  # a build for another CUDA or torch fails in many ways
            reason = (str(error).splitlines() or [""])[0]
            return (
                f"Transformer Engine does not import ({type(error).__name__}: {reason}); build it "
                f"with pip install --no-build-isolation 'transformer-engine[pytorch]'"
            )
        return cls(pytorch, recipes)

    @classmethod
    def load(cls) -> Engine:
        """TE as installed here.

        Raises:
            ConfigError: it does not import.
        """
        engine = cls.found()
        if isinstance(engine, str):
            raise ConfigError(f"{BACKEND}: {engine}, {INSTEAD}")
        return engine


# Of our recipes, in TE's order of questions to the GPU.
QUESTIONS = {
    "fp8_delayed": "is_fp8_available",
    "fp8_current": "is_fp8_available",
    "fp8_block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def unavailable(engine: Engine) -> dict[str, str]:
    """Recipe → reason, for the recipes that TE says it can't run on the current GPU."""
    refused = {}
    for recipe, question in QUESTIONS.items():
        able, reason = getattr(engine.pytorch, question)(return_reason=True)
        if not able:
            refused[recipe] = reason
    return refused


def check_options(
    precision: PrecisionConfig, recipes: list[str], capability: tuple[int, int] | None
) -> None:
    """Refuse the options of a run that TE's layers lack.

    Args:
        recipes: names of all in use.
        capability: the GPU's.
    Raises:
        ConfigError: naming the option.
    """
    if len(recipes) > 1:
        raise ConfigError(
            f"precision.layer_recipes: {BACKEND} runs one recipe a model, not "
            f"{', '.join(recipes)}; keep {recipes[0]} and bf16, {INSTEAD}"
        )
    for key, off in (("cache_weights", "false"), ("smooth_swiglu", "false"), ("bf16_inputs", "[]")):
        if value := getattr(precision, key):
            shown = "true" if value is True else f"[{', '.join(value)}]"
            raise ConfigError(
                f"precision.{key}={shown}: {BACKEND} has no such layer; set it to {off}, {INSTEAD}"
            )
    fp32_blocks = "fp8_block" in recipes and precision.power_of_two_scales is False
    if fp32_blocks and capability is not None and capability >= (10, 0):
        raise ConfigError(
            f"precision.power_of_two_scales=false: FP32 scales of fp8_block need compute "
            f"capability 9.x and this GPU is {capability[0]}.{capability[1]}; set it to null, "
            f"{INSTEAD}"
        )


def check_recipe(name: str, recipe: Recipe) -> None:
    """Refuse the options of a recipe that TE lacks.

    Args:
        name: of the recipe, for the message.
    Raises:
        ConfigError: naming the option.
    """
    delayed = isinstance(recipe, DelayedScaling)
    if recipe.margin and not delayed:
        raise ConfigError(
            f"precision.margin={recipe.margin}: Transformer Engine has a margin in fp8_delayed "
            f"only; set precision.margin=0, {INSTEAD}"
        )
    if recipe.power_of_two and delayed:
        raise ConfigError(
            f"precision.power_of_two_scales=true: Transformer Engine's fp8_delayed has FP32 "
            f"scales only; set it to false, {INSTEAD}"
        )
    able = [{"grad_output"}, set()] if isinstance(recipe, NVFP4Scaling) else [set()]
    if recipe.stochastic not in able:
        raise ConfigError(
            f"precision.stochastic_rounding={sorted(recipe.stochastic)}: Transformer Engine rounds "
            f"stochastically in nvfp4 and grad_output only, not so in {name}; set it to null, "
            f"{INSTEAD}"
        )
    known = [ALL_E2M1] if isinstance(recipe, NVFP4Scaling) else list(NAMED.values())
    if recipe.formats not in known:
        raise ConfigError(
            f"precision.formats: Transformer Engine has no {recipe.formats} for input/weight/"
            f"grad_output of {name}, only {', '.join(map(str, known))}; leave it out, {INSTEAD}"
        )


def te_recipe(recipe: Recipe, recipes: Any) -> Any:
    """TE's object for a recipe of ours that `check_recipe` let through.

    Much of TE's recipes is set by environment variables read at its import; here the
    configuration alone decides. (Of its power-of-two flags only the variables reach the
    quantisers: the constructors' own arguments are not looked at.)

    Args:
        recipes: `transformer_engine.common.recipe`.
    """
    match recipe:
        case DelayedScaling():
            return recipes.DelayedScaling(
                margin=recipe.margin,
                fp8_format=_te_format(recipe.formats, recipes),
                amax_history_len=recipe.history_length,
                amax_compute_algo=recipe.amax_compute,
            )
        case CurrentScaling():
            result = recipes.Float8CurrentScaling(
                use_power_2_scales=recipe.power_of_two,
                fp8_format=_te_format(recipe.formats, recipes),
            )
        case BlockScaling():
            result = recipes.Float8BlockScaling(
                use_f32_scales=not recipe.power_of_two,
                fp8_format=_te_format(recipe.formats, recipes),
            )
        case MXScaling():
            result = recipes.MXFP8BlockScaling(fp8_format=_te_format(recipe.formats, recipes))
        case NVFP4Scaling():
            result = recipes.NVFP4BlockScaling(
                disable_rht=not recipe.hadamard,
                disable_stochastic_rounding=not recipe.stochastic,
                disable_2d_quantization=False,
            )
        case _:
            raise AssertionError(f"no {type(recipe).__name__} in TE: support.py refuses it")
    for name, value in PLAIN.items():
        if hasattr(result, name):
            setattr(result, name, value)
    if isinstance(recipe, CurrentScaling | BlockScaling):
        for role in ("fwd_inp", "fwd_weight", "bwd_grad"):
            quantizer = recipes.QParams(power_2_scale=recipe.power_of_two)
            setattr(result, f"fp8_quant_{role}", quantizer)
    return result


# What TE takes from the environment beyond our recipes, and its value without.
PLAIN = {"backward_override": None, "row_scaled_activation": False, "nvfp4_4over6": "none"}


def _te_format(formats: Formats, recipes: Any) -> Any:
    """TE knows HYBRID and E4M3 by the names that our configuration uses."""
    name = next(name for name, known in NAMED.items() if known == formats)
    return recipes.Format[name.upper()]


class Region:
    """TE's autocast under one recipe, entered once however deep it is asked for."""

    def __init__(self, recipe: Recipe, engine: Engine) -> None:
        self.engine = engine
        self.recipe = te_recipe(recipe, engine.recipes)
        # Of both sizes of a matrix; MXFP8 has to have whole blocks in both directions.
        self.alignment = 32 if isinstance(recipe, MXScaling) else 16
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


@dataclass(frozen=True)
class TransformerEngine:
    """TE's own linears, with its quantisers, histories and GEMMs."""

    engine: Engine
    name: str = "transformer_engine"

    def install(self, job: Job) -> Installed:
        recipe = next(iter(job.plans.values())).recipe  # the same for all: `check_options`
        region = Region(recipe, self.engine)
        layers = {name: take_over(name, job.linear(name), region) for name in job.plans}
        for name, layer in layers.items():
            replace(job.model, name, layer)
        region.span(job.model)
        if isinstance(recipe, DelayedScaling):
            return Installed(delayed=DelayedHistories(layers, region))
        return Installed()


def take_over(name: str, linear: nn.Linear, region: Region) -> nn.Module:
    """A TE linear that shares the parameters of an `nn.Linear`, and their names.

    It is a TE linear, not a module around one: `layers.0.mlp.up_proj.weight` stays that in
    checkpoints, and TE reads the attribute that FSDP2 swaps between shard and gathered weight.

    Args:
        name: the layer's full name, for the refusal.
        linear: on any device, also meta.
    Raises:
        ConfigError: a size that TE's GEMMs do not take.
    """
    n, k = linear.out_features, linear.in_features
    if n % region.alignment or k % region.alignment:
        raise ConfigError(
            f"{BACKEND}: {name} is {n}×{k}, and its GEMMs need multiples of {region.alignment}; "
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
