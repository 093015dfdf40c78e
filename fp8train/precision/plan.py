"""Which linears of a model run under which recipe, by patterns on their full names.

Patterns are shell patterns: `layers.*`, `*.down_proj`. One that matches nothing is an error, since
a filter that quietly matched nothing is a run in another precision.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fp8train.config import ConfigError, PrecisionConfig
from fp8train.precision.recipes import Copies, Recipe, recipe_of

SWIGLU_OUTPUT = "*.down_proj"  # the linear whose input is SwiGLU's output


@dataclass(frozen=True)
class LayerPlan:
    """How one linear computes.

    Attributes:
        name: of the recipe, a value of `precision.recipe`.
        recipe: with the configuration's options.
    """

    name: str
    recipe: Recipe


def plan(names: list[str], precision: PrecisionConfig) -> dict[str, LayerPlan]:
    """The quantised layers among `names`, in order; none for bf16 and fp32 by themselves.

    Raises:
        ConfigError: a pattern that matches nothing, blocks that are not there, or nothing left.
    """
    if recipe_of(precision) is None and not precision.layers:
        return {}
    for key, patterns in (
        ("include", precision.include),
        ("exclude", precision.exclude),
        ("layers", [layers.pattern for layers in precision.layers]),
        ("bf16_inputs", precision.bf16_inputs),
    ):
        for pattern in patterns:
            _must_match(f"precision.{key}: the pattern {pattern}", pattern, names)
    if precision.smooth_swiglu:
        _must_match(f"precision.smooth_swiglu levels {SWIGLU_OUTPUT}, which", SWIGLU_OUTPUT, names)
    in_bf16 = _outer_blocks(names, precision)
    plans = {}
    for name in names:
        if not _matches(name, precision.include) or _matches(name, precision.exclude):
            continue
        if name not in in_bf16 and (found := _plan_of(name, precision)) is not None:
            plans[name] = found
    if not plans:
        raise ConfigError(
            f"precision.include={precision.include} without precision.exclude={precision.exclude} "
            f"and the blocks that stay in BF16 leaves no layer for {precision.recipe}: widen the "
            f"first, or use precision=bf16"
        )
    return plans


def _plan_of(name: str, precision: PrecisionConfig) -> LayerPlan | None:
    """One layer's plan; the last pattern of `precision.layers` that matches decides."""
    recipe_name = precision.recipe
    for layers in precision.layers:
        if _matches(name, [layers.pattern]):
            recipe_name = layers.recipe
    recipe = recipe_of(precision, recipe_name)
    if recipe is None:
        return None
    if _matches(name, precision.bf16_inputs):
        formats = replace(recipe.formats, input=Copies(None, None))
        recipe = replace(recipe, formats=formats)
    if precision.smooth_swiglu and _matches(name, [SWIGLU_OUTPUT]):
        recipe = replace(recipe, smooth=True)
    return LayerPlan(recipe_name, recipe)


def _outer_blocks(names: list[str], precision: PrecisionConfig) -> set[str]:
    """Layers of the first and last blocks, which stay in BF16."""
    first, last = precision.bf16_first_blocks, precision.bf16_last_blocks
    if not (first or last):
        return set()
    numbers = {name: int(n) for name in names if (n := _block_number(name)) is not None}
    blocks = len(set(numbers.values()))
    if first + last >= blocks:
        raise ConfigError(
            f"precision.bf16_first_blocks={first} and precision.bf16_last_blocks={last} leave none "
            f"of the {blocks} blocks for {precision.recipe}: lower them, or use precision=bf16"
        )
    return {name for name, n in numbers.items() if n < first or n >= blocks - last}


def _block_number(name: str) -> str | None:
    """The first part of a name that is a number: 3 of layers.3.mlp.up_proj."""
    return next((part for part in name.split(".") if part.isdigit()), None)


def _must_match(what: str, pattern: str, names: list[str]) -> None:
    if not _any_match(names, pattern):
        raise ConfigError(f"{what} matches no linear layer; there are {', '.join(kinds(names))}")


def _any_match(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def kinds(names: list[str]) -> list[str]:
    """Names with numbers as `*`, each once: layers.*.mlp.up_proj."""
    return list(
        dict.fromkeys(".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names)
    )
