"""Which layers run under which recipe, and what a wrong pattern is told."""

import pytest
import torch

from fp8train.config import ConfigError, LayerRecipeConfig, PrecisionConfig
from fp8train.models.llama import AttentionCore, Llama
from fp8train.precision import convert as convert_module
from fp8train.precision.backends.emulated import WideAttentionCore
from fp8train.precision.convert import convert
from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.plan import kinds, plan

CPU = torch.device("cpu")


def tiny(num_layers: int = 2) -> Llama:
    torch.manual_seed(0)
    return Llama(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
    )


def row(kind: str, count: int, recipe: str, formats: str) -> tuple[str, int, str, str, str]:
    return kind, count, recipe, formats, "torch" if recipe in ("bf16", "fp32") else "emulated"


def test_the_blocks_linears_are_chosen() -> None:
    model = tiny()
    conversion = convert(model, PrecisionConfig(recipe="fp8_current"), CPU)
    assert len(conversion.layers) == 14
    assert all(name.startswith("layers.") for name in conversion.layers)
    assert row("lm_head", 1, "bf16", "BF16") in conversion.table
    expected = row("layers.*.mlp.up_proj", 2, "fp8_current", "E4M3/E4M3/E5M2")
    assert expected in conversion.table
    assert isinstance(model.layers["0"].mlp.up_proj, QuantizedLinear)


def test_exclude() -> None:
    precision = PrecisionConfig(recipe="fp8_block", exclude=["*.down_proj"])
    conversion = convert(tiny(), precision, CPU)
    assert len(conversion.layers) == 12
    assert row("layers.*.mlp.down_proj", 2, "bf16", "BF16") in conversion.table


def test_first_and_last_blocks_stay_in_bf16() -> None:
    precision = PrecisionConfig(recipe="mxfp8", bf16_first_blocks=1, bf16_last_blocks=2)
    conversion = convert(tiny(12), precision, CPU)
    assert {name.split(".")[1] for name in conversion.layers} == {str(n) for n in range(1, 10)}
    assert row("layers.*.mlp.up_proj", 9, "mxfp8", "E4M3/E4M3/E4M3") in conversion.table
    assert row("layers.*.mlp.up_proj", 3, "bf16", "BF16") in conversion.table


def test_a_recipe_for_a_pattern() -> None:
    """Down projections in block scaling, one of them in BF16, the rest in current scaling."""
    layers = [
        LayerRecipeConfig("*.down_proj", "fp8_block"),
        LayerRecipeConfig("layers.1.mlp.down_proj", "bf16"),
    ]
    precision = PrecisionConfig(recipe="fp8_current", layer_recipes=layers)
    model = tiny(3)
    conversion = convert(model, precision, CPU)
    named = {name: layer.name for name, layer in conversion.layers.items()}
    assert named["layers.0.mlp.down_proj"] == named["layers.2.mlp.down_proj"] == "fp8_block"
    assert "layers.1.mlp.down_proj" not in named  # the last pattern that matches decides
    assert set(named.values()) == {"fp8_block", "fp8_current"}
    expected = row("layers.*.mlp.down_proj", 2, "fp8_block", "E4M3/E4M3/E4M3")
    assert expected in conversion.table
    x = torch.randint(0, 64, (2, 16))
    model(x).sum().backward()
    assert model.layers["0"].mlp.down_proj.weight.grad.abs().sum() > 0


def test_some_layers_in_fp8_under_bf16() -> None:
    layers = [LayerRecipeConfig("*.up_proj", "mxfp8")]
    conversion = convert(tiny(), PrecisionConfig(recipe="bf16", layer_recipes=layers), CPU)
    assert set(conversion.layers) == {f"layers.{n}.mlp.up_proj" for n in (0, 1)}
    wrong = [LayerRecipeConfig("*.up", "mxfp8")]
    with pytest.raises(ConfigError, match=r"the pattern \*\.up matches no"):
        convert(tiny(), PrecisionConfig(recipe="bf16", layer_recipes=wrong), CPU)


def test_delayed_scaling_for_some_layers_only() -> None:
    precision = PrecisionConfig(
        recipe="fp8_block", layer_recipes=[LayerRecipeConfig("*.q_proj", "fp8_delayed")]
    )
    conversion = convert(tiny(), precision, CPU)
    assert len(conversion.delayed.names) == 2 * 3
    assert all(".q_proj." in name for name in conversion.delayed.names)


def test_bf16_inputs_and_smooth_swiglu_are_in_the_table() -> None:
    precision = PrecisionConfig(
        recipe="fp8_current", bf16_inputs=["*.down_proj"], smooth_swiglu=True
    )
    conversion = convert(tiny(), precision, CPU)
    expected = row("layers.*.mlp.down_proj", 2, "fp8_current, smooth", "BF16/E4M3/E5M2")
    assert expected in conversion.table
    assert row("layers.*.mlp.up_proj", 2, "fp8_current", "E4M3/E4M3/E5M2") in conversion.table


@pytest.mark.parametrize("key", ["include", "exclude", "bf16_inputs", "layer_recipes"])
def test_a_pattern_that_matches_nothing_is_an_error(key: str) -> None:
    pattern = "layers.*.mlp.up"
    value = [LayerRecipeConfig(pattern, "fp8_block")] if key == "layer_recipes" else [pattern]
    precision = PrecisionConfig(recipe="fp8_current", **{key: value})
    with pytest.raises(ConfigError, match=rf"{key}.*layers\.\*\.mlp\.up matches no .*mlp\.up_proj"):
        convert(tiny(), precision, CPU)


def test_patterns_mean_the_same_case_everywhere() -> None:
    with pytest.raises(ConfigError, match="matches no"):
        plan(["layers.0.mlp"], PrecisionConfig(recipe="fp8_current", include=["LAYERS.*"]))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_recipes": [LayerRecipeConfig("lm_head", "mxfp8")]}, "lm_head matches no"),
        ({"bf16_inputs": ["*.down_proj"], "exclude": ["*.down_proj"]}, "down_proj matches no"),
        ({"smooth_swiglu": True, "exclude": ["*.down_proj"]}, "which matches no"),
        (
            {"bf16_first_blocks": 1, "layer_recipes": [LayerRecipeConfig("layers.0.*", "mxfp8")]},
            r"layers\.0\.\* matches no",
        ),
    ],
)
def test_an_option_for_layers_that_stay_in_bf16_is_an_error(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(tiny(), PrecisionConfig(recipe="fp8_current", **options), CPU)


def test_formats_that_leave_nothing_to_quantise_are_an_error() -> None:
    precision = PrecisionConfig(recipe="fp8_current")
    for role in ("input", "weight", "grad_output"):
        setattr(precision.formats, role, "bf16")
    with pytest.raises(ConfigError, match="no format but BF16 under fp8_current"):
        convert(tiny(), precision, CPU)


def test_patterns_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match="leaves no layer"):
        convert(tiny(), PrecisionConfig(recipe="fp8_current", exclude=["*"]), CPU)
    with pytest.raises(ConfigError, match="leave none of the 2 blocks"):
        convert(tiny(), PrecisionConfig(recipe="fp8_current", bf16_first_blocks=2), CPU)


def test_smooth_swiglu_needs_its_layer() -> None:
    with pytest.raises(ConfigError, match=r"smooth_swiglu .* matches no linear"):
        plan(["layers.0.mlp"], PrecisionConfig(recipe="fp8_current", smooth_swiglu=True))


def test_fp32_converts_nothing() -> None:
    model = tiny()
    conversion = convert(model, PrecisionConfig(recipe="fp32"), CPU, AttentionCore)
    assert not conversion.layers
    assert not any(isinstance(m, QuantizedLinear | WideAttentionCore) for m in model.modules())
    assert any(isinstance(m, AttentionCore) for m in model.modules())
    assert row("lm_head", 1, "fp32", "FP32") in conversion.table


def test_bf16_without_fast_gemms_converts_head_and_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fast, expected in ((True, 0), (False, 2)):
        monkeypatch.setattr(convert_module, "has_fast_bf16", lambda device, fast=fast: fast)
        model = tiny()
        convert(model, PrecisionConfig(recipe="bf16"), CPU, AttentionCore)
        assert sum(isinstance(m, WideAttentionCore) for m in model.modules()) == expected
        assert isinstance(model.lm_head, QuantizedLinear) is not fast


def test_wide_attention_is_bf16_attention_rounded_once() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8).bfloat16() for heads in (4, 2, 2))
    exact = AttentionCore()(q.double(), k.double(), v.double())
    ours = WideAttentionCore()(q, k, v)
    assert (ours.double() - exact).abs().max() < 2.0**-8 * exact.abs().max()
    assert (ours == exact.bfloat16()).double().mean() > 0.99


def test_kinds() -> None:
    assert kinds(["layers.0.a", "layers.11.a", "head"]) == ["layers.*.a", "head"]
