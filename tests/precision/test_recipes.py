"""Recipes from the configuration: formats by name, role and GEMM, and what each means."""

import pytest

from fp8train.config import RECIPES, PrecisionConfig
from fp8train.precision.formats import E2M1, E4M3, E5M2
from fp8train.precision.recipes import (
    DEFAULTS,
    OPERANDS,
    ROLES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP4Weights,
    NVFP4Scaling,
    recipe_of,
)
from fp8train.precision.tensor import COLUMN, ROW, TENSOR


def test_every_recipe_of_the_schema_has_a_meaning() -> None:
    assert set(DEFAULTS) == set(RECIPES)
    for name in RECIPES:
        assert recipe_of(PrecisionConfig(recipe=name)) == DEFAULTS[name]
    for name in ("bf16", "fp32"):
        assert recipe_of(PrecisionConfig(recipe=name)) is None


@pytest.mark.parametrize(
    "name, formats",
    [
        ("fp8_current", "E4M3/E4M3/E5M2"),
        ("fp8_delayed", "E4M3/E4M3/E5M2"),
        ("fp8_rowwise", "E4M3/E4M3/E4M3"),
        ("fp8_rowwise_bf16_wgrad", "E4M3|BF16/E4M3/E4M3|BF16"),
        ("fp8_block", "E4M3/E4M3/E4M3"),
        ("mxfp8", "E4M3/E4M3/E4M3"),
        ("nvfp4", "E2M1/E2M1/E2M1"),
        ("mxfp4", "BF16/E2M1/BF16"),
    ],
)
def test_formats(name: str, formats: str) -> None:
    assert str(recipe_of(PrecisionConfig(recipe=name)).formats) == formats


def test_options_reach_the_recipe() -> None:
    config = PrecisionConfig(
        recipe="fp8_delayed",
        format="e4m3",
        margin=1,
        power_of_two_scales=True,
        stochastic_rounding=["grad_output"],
        amax_history_length=16,
        amax_compute="most_recent",
    )
    recipe = recipe_of(config)
    assert isinstance(recipe, DelayedScaling)
    assert str(recipe.formats) == "E4M3/E4M3/E4M3"
    assert (recipe.margin, recipe.power_of_two, recipe.stochastic) == (1, True, {"grad_output"})
    assert (recipe.history_length, recipe.amax_compute) == (16, "most_recent")
    nvfp4 = recipe_of(PrecisionConfig(recipe="nvfp4", hadamard=False, stochastic_rounding=[]))
    assert isinstance(nvfp4, NVFP4Scaling)
    assert not nvfp4.hadamard and not nvfp4.stochastic


def test_another_recipe_of_the_same_configuration_keeps_its_own_defaults() -> None:
    """What `precision.layer_recipes` needs: block scaling beside current scaling."""
    config = PrecisionConfig(recipe="fp8_current", margin=2)
    block = recipe_of(config, "fp8_block")
    assert isinstance(block, BlockScaling) and block.power_of_two and block.margin == 2
    assert str(block.formats) == "E4M3/E4M3/E4M3"
    assert recipe_of(config, "bf16") is None


def test_formats_by_role_and_gemm() -> None:
    config = PrecisionConfig(recipe="fp8_current")
    config.formats.input = "e5m2"
    config.formats.wgrad.input = "e4m3"
    config.formats.dgrad.weight = "bf16"
    formats = recipe_of(config).formats
    assert formats.input == (E5M2, E4M3)
    assert formats.weight == (E4M3, None)
    assert formats.grad_output == (E5M2, E5M2)
    assert str(formats) == "E5M2|E4M3/E4M3|BF16/E5M2"


def test_a_role_s_format_leaves_what_the_recipe_keeps_in_bf16() -> None:
    config = PrecisionConfig(recipe="fp8_rowwise_bf16_wgrad")
    config.formats.input = "e5m2"
    assert recipe_of(config).formats.input == (E5M2, None)
    assert recipe_of(config).granularity("weight") == (ROW, TENSOR)
    config.formats.wgrad.input = "e5m2"
    assert recipe_of(config).formats.input == (E5M2, E5M2)


def test_each_key_of_a_gemm_reaches_its_operand() -> None:
    for gemm, operands in OPERANDS.items():
        for role, copy in operands:
            config = PrecisionConfig(recipe="fp8_block")
            setattr(getattr(config.formats, gemm), role, "e5m2")
            formats = recipe_of(config).formats
            found = {
                (r, c): getattr(formats.of(r), c) for r in ROLES for c in ("rowwise", "columnwise")
            }
            assert [place for place, fmt in found.items() if fmt == E5M2] == [(role, copy)]


def test_a_bf16_input_alone_leaves_the_weight_s_column_scales() -> None:
    """One scale for the weight of dgrad belongs to the variant with wgrad in BF16."""
    config = PrecisionConfig(recipe="fp8_rowwise")
    config.formats.input = "bf16"
    assert recipe_of(config).granularity("weight") == (ROW, COLUMN)


def test_mxfp4_with_formats_of_its_own() -> None:
    config = PrecisionConfig(recipe="mxfp4")
    config.formats.dgrad.weight = "bf16"
    recipe = recipe_of(config)
    assert str(recipe.formats.weight) == "E2M1|BF16" and not recipe.shares_copies("weight")
    config.formats.input = "e2m1"
    assert not recipe_of(config).shares_copies("input")


def test_quantized_share() -> None:
    shares = {name: recipe.formats.quantized_share for name, recipe in DEFAULTS.items()}
    assert shares.pop("fp8_rowwise_bf16_wgrad") == pytest.approx(2 / 3)
    assert shares.pop("mxfp4") == 0  # its GEMMs run in BF16
    assert set(shares.values()) == {1}


def test_granularities() -> None:
    def named(name: str) -> list[tuple[str, str]]:
        return [tuple(map(str, DEFAULTS[name].granularity(role))) for role in ROLES]

    assert named("fp8_current") == [("tensor", "tensor")] * 3
    assert named("fp8_rowwise") == [("row", "column")] * 3
    assert DEFAULTS["fp8_rowwise_bf16_wgrad"].granularity("weight") == (ROW, TENSOR)
    assert DEFAULTS["fp8_rowwise"].granularity("weight") == (ROW, COLUMN)
    assert named("fp8_block") == [("1x128", "128x1"), ("128x128",) * 2, ("1x128", "128x1")]
    assert named("mxfp8") == [("1x32", "32x1")] * 3
    assert named("nvfp4") == [("1x16", "16x1"), ("16x16",) * 2, ("1x16", "16x1")]


def test_one_copy_serves_both_gemms_where_it_may() -> None:
    shared = {
        name: [role for role in ROLES if recipe.shares_copies(role)]
        for name, recipe in DEFAULTS.items()
    }
    assert shared["fp8_current"] == shared["fp8_delayed"] == list(ROLES)
    assert shared["fp8_block"] == shared["nvfp4"] == ["weight"]  # square blocks
    assert shared["fp8_rowwise"] == shared["mxfp8"] == []
    two_formats = CurrentScaling()
    config = PrecisionConfig(recipe="fp8_current")
    config.formats.wgrad.input = "e5m2"
    assert two_formats.shares_copies("input") and not recipe_of(config).shares_copies("input")
    assert MXFP4Weights().formats.weight == (E2M1, E2M1)
    assert "weight" in shared["mxfp4"]  # the copy that is exported
