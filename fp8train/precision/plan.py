"""Which linears of a model run under which recipe, by patterns on their full names.

Patterns are shell patterns: `layers.*`, `*.down_proj`. One that matches nothing is an error, since
a filter that quietly matched nothing is a run in another precision.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fp8train.config import ConfigError, PrecisionConfig
from fp8train.precision.recipes import ROLES, Copies, Recipe, recipe_of

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
    if recipe_of(precision) is None and not precision.layer_recipes:
        return {}
    for key, patterns in (("include", precision.include), ("exclude", precision.exclude)):
        for pattern in patterns:
            _must_match(f"precision.{key}: the pattern {pattern}", pattern, names)
    in_bf16 = _outer_blocks(names, precision)
    chosen = [
        name
        for name in names
        if _matches(name, precision.include)
        and not _matches(name, precision.exclude)
        and name not in in_bf16
    ]
    if not chosen:
        raise ConfigError(
            f"precision.include={precision.include} leaves no layer after precision.exclude="
            f"{precision.exclude} and the blocks in BF16: widen it, or use precision=bf16"
        )
    left = " that include, exclude and the blocks in BF16 leave"
    for layers in precision.layer_recipes:
        what = f"precision.layer_recipes: the pattern {layers.pattern}"
        _must_match(what, layers.pattern, chosen, left)
    for pattern in precision.bf16_inputs:
        _must_match(f"precision.bf16_inputs: the pattern {pattern}", pattern, chosen, left)
    if precision.smooth_swiglu:
        what = f"precision.smooth_swiglu levels {SWIGLU_OUTPUT}, which"
        _must_match(what, SWIGLU_OUTPUT, chosen, left)
    plans = {name: found for name in chosen if (found := _plan_of(name, precision)) is not None}
    for name, found in plans.items():
        if not any(fmt for role in ROLES for fmt in found.recipe.formats.of(role)):
            raise ConfigError(
                f"precision.formats leaves {name} no format but BF16 under {found.name}: set one, "
                f"or use precision=bf16"
            )
    return plans


def _plan_of(name: str, precision: PrecisionConfig) -> LayerPlan | None:
    """One layer's plan; the last pattern of `precision.layer_recipes` that matches decides."""
    recipe_name = precision.recipe
    for layers in precision.layer_recipes:
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


def _must_match(what: str, pattern: str, names: list[str], which: str = "") -> None:
    if not any(_matches(name, [pattern]) for name in names):
        there = ", ".join(kinds(names))
        raise ConfigError(f"{what} matches no linear layer{which}; there are {there}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def kinds(names: list[str]) -> list[str]:
    """Names with numbers as `*`, each once: layers.*.mlp.up_proj."""
    return list(
        dict.fromkeys(".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names)
    )
