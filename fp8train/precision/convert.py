"""Put a model under a precision: choose its layers by pattern and swap them.

Embedding, norms, attention core and LM head stay in BF16; the linears of the blocks go to FP8.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8train.config import ConfigError, PrecisionConfig
from fp8train.precision.backends.emulated import Emulated, WideAttentionCore, has_fast_bf16
from fp8train.precision.backends.transformer_engine import (
    DelayedHistories,
    Engine,
    Region,
    take_over,
)
from fp8train.precision.delayed import DelayedState
from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.quantizers import Block, Current, Delayed, HighPrecision, Quantizer
from fp8train.precision.recipes import (
    ROLES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    recipe_of,
)


@dataclass
class Conversion:
    """What was done to a model.

    Attributes:
        layers: full names of the linears that run in FP8.
        table: rows (layer kind, count, recipe, formats) for the log.
        delayed: the model's amax histories, under delayed scaling.
    """

    layers: list[str] = field(default_factory=list)
    table: list[tuple[str, int, str, str]] = field(default_factory=list)
    delayed: DelayedState | DelayedHistories | None = None


def convert(
    model: nn.Module,
    precision: PrecisionConfig,
    device: torch.device,
    attention_core: type[nn.Module] | None = None,
) -> Conversion:
    """Swap the chosen linears of the model for quantised ones, in place.

    On a CPU without fast BF16 the other linears and the attention cores are swapped too, for ones
    that give BF16's numbers through FP32 GEMMs.

    Args:
        model: any module tree with `nn.Linear`s; may be on the meta device.
        device: where the model will run.
        attention_core: the model's class of q, k, v → output, causal; None if it has none.
    Raises:
        ConfigError: a pattern that matches no layer.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    recipe = recipe_of(precision)
    conversion = Conversion(select(list(linears), precision) if recipe else [])
    gemms = Emulated.on(device, precision.emulation)
    if recipe is not None and precision.backend == "transformer_engine":
        _to_transformer_engine(model, linears, conversion, recipe)
    elif recipe is not None:
        _to_emulated(model, linears, conversion, recipe, gemms, device)
    if precision.recipe != "fp32" and not has_fast_bf16(device):
        for name in linears.keys() - set(conversion.layers):
            layer = QuantizedLinear.take_over(linears[name], HighPrecision(), gemms)
            replace(model, name, layer)
        for name, module in list(model.named_modules()):
            if attention_core is not None and isinstance(module, attention_core):
                replace(model, name, WideAttentionCore())
    conversion.table = table(list(linears), conversion.layers, precision)
    return conversion


def _to_emulated(
    model: nn.Module,
    linears: dict[str, nn.Linear],
    conversion: Conversion,
    recipe: Recipe,
    gemms: Emulated,
    device: torch.device,
) -> None:
    delayed = None
    if isinstance(recipe, DelayedScaling):
        delayed = conversion.delayed = DelayedState(conversion.layers, recipe, device)
    for index, name in enumerate(conversion.layers):
        match recipe:
            case CurrentScaling():
                quantizer: Quantizer = Current(recipe)
            case DelayedScaling():
                assert delayed is not None
                quantizer = Delayed(delayed, index * len(ROLES))
            case BlockScaling():
                quantizer = Block(recipe)
        replace(model, name, QuantizedLinear.take_over(linears[name], quantizer, gemms))


def _to_transformer_engine(
    model: nn.Module, linears: dict[str, nn.Linear], conversion: Conversion, recipe: Recipe
) -> None:
    region = Region(recipe, Engine.load())
    layers = {name: take_over(name, linears[name], region) for name in conversion.layers}
    for name, layer in layers.items():
        replace(model, name, layer)
    region.span(model)
    if isinstance(recipe, DelayedScaling):
        conversion.delayed = DelayedHistories(layers, region)


def select(names: list[str], precision: PrecisionConfig) -> list[str]:
    """The names that match a pattern of `include` and none of `exclude`, in order.

    Patterns are shell patterns on the module's full name: `layers.*`, `*.down_proj`.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing left.
    """
    for key, patterns in (("include", precision.include), ("exclude", precision.exclude)):
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"precision.{key}: the pattern {pattern} matches no linear layer; there are "
                    f"{', '.join(kinds(names))}"
                )
    chosen = [name for name in names if _matches(name, precision.include)]
    chosen = [name for name in chosen if not _matches(name, precision.exclude)]
    if not chosen:
        raise ConfigError(
            f"precision.include={precision.include} without precision.exclude={precision.exclude} "
            f"leaves no layer for {precision.recipe}: widen the first, or use precision=bf16"
        )
    return chosen


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def kinds(names: list[str]) -> list[str]:
    """Names with numbers as `*`, each once: layers.*.mlp.up_proj."""
    return list(
        dict.fromkeys(".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names)
    )


def table(
    names: list[str], chosen: list[str], precision: PrecisionConfig
) -> list[tuple[str, int, str, str]]:
    """Rows (layer kind, count, recipe, formats of input/weight/grad_output)."""
    recipe = recipe_of(precision)
    high = "fp32" if precision.recipe == "fp32" else "bf16"
    rows: Counter[tuple[str, str, str]] = Counter()
    for name in names:
        in_fp8 = recipe is not None and name in chosen
        rows[
            kinds([name])[0],
            precision.recipe if in_fp8 else high,
            str(recipe.formats) if recipe is not None and in_fp8 else high.upper(),
        ] += 1
    return [(kind, count, *rest) for (kind, *rest), count in rows.items()]  # type: ignore[misc]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
