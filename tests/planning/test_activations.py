"""Activations by formula against what a real forward keeps, and under layouts against itself.

What a CPU does otherwise than a GPU is put right by `on_cpu`: its norms keep two FP32 copies of
their input instead of the input, and emulated payloads are BF16.
"""

import pytest
import torch

from fp8train.config import Config
from fp8train.layout import Layout
from fp8train.models.llama import Llama
from fp8train.parallel.activation_checkpoint import checkpoint_blocks
from fp8train.parallel.parallelize import initialize, precise_model
from fp8train.parallel.vocabulary import cross_entropy
from fp8train.planning.activations import Activations, Kept, total
from fp8train.planning.parameters import plans
from fp8train.precision import convert
from fp8train.precision.backends import emulated
from fp8train.precision.convert import Conversion
from fp8train.rules import CHOICES
from tests.parallel.test_activation_checkpoint import LiveBytes
from tests.planning.conftest import compose

RECIPES = [recipe for recipe in CHOICES["precision.recipe"] if recipe is not None]
MODES = ("none", "selective", "full")
LENGTH = 128
CPU = torch.device("cpu")
LOSS = ("logits", "exponentials of logits", "gradient of logits")


@pytest.fixture(autouse=True)
def plain_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What isn't quantised is plain PyTorch, as on a GPU."""
    for module in (convert, emulated):
        monkeypatch.setattr(module, "has_fast_bf16", lambda device: True)


def model_of(recipe: str, *overrides: str) -> tuple[Llama, Conversion]:
    """An unsharded model in its compute type, on this process alone."""
    config = compose(f"precision={recipe}", *overrides)
    model, conversion = precise_model(config, CPU)
    model.to_empty(device=CPU)
    initialize(model, config.model, 0)
    return model.to(torch.float32 if recipe == "fp32" else torch.bfloat16), conversion


def kept_bytes(mode: str, recipe: str, *overrides: str) -> int:
    """What a forward of a small model keeps, without its logits."""
    model, conversion = model_of(recipe, *overrides)
    checkpoint_blocks(model.layers.values(), mode, conversion.position)
    before = [*model.parameters()]
    if conversion.delayed is not None:
        before += conversion.delayed.state_dict().values()
    with LiveBytes(before) as live:
        logits = model(torch.randint(320, (1, LENGTH)))
    return live.total() - logits.untyped_storage().nbytes()


def counts(*overrides: str, layout: Layout | None = None) -> Activations:
    config = compose("trainer.micro_batch_size=1", *overrides)
    return Activations(config, layout or Layout(), plans(config))


def on_cpu(kept: list[Kept]) -> int:
    """Bytes as emulated on a CPU."""

    def bits(tensor: Kept) -> int:
        if tensor.name.startswith("input of ") and tensor.name.endswith("norm"):
            return 64
        return 16 if tensor.name.startswith("FP8 ") else tensor.bits

    return sum(tensor.elements * bits(tensor) // 8 for tensor in kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_keeps_what_is_counted(recipe: str, mode: str) -> None:
    """To the byte, but for NVFP4's scalars."""
    one, two = (kept_bytes(mode, recipe, f"model.num_layers={n}") for n in (1, 2))
    formula = counts(f"precision={recipe}", f"parallel.activation_checkpoint={mode}")
    kept = formula.kept_of_block(0)
    if mode == "none":
        kept += formula.weight_copies(0)
    assert two - one == pytest.approx(on_cpu(kept), abs=100 if recipe == "nvfp4" else 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=fp8_current", "precision.exclude=[*.k_proj,*.gate_proj]"),
        ("precision=fp8_block", "precision.bf16_inputs=[*.down_proj,*.q_proj]"),
        ("precision=fp8_current", "precision.smooth_swiglu=true"),
        ("precision=fp8_current", "model.num_kv_heads=4"),
        ("precision=fp8_current", "precision.format=e4m3", "model.intermediate_size=256"),
    ],
    ids=lambda overrides: " ".join(overrides[:2]),
)
def test_a_block_of_mixed_layers(overrides: tuple[str, ...]) -> None:
    recipe = overrides[0].removeprefix("precision=")
    one, two = (kept_bytes("none", recipe, *overrides[1:], f"model.num_layers={n}") for n in (1, 2))
    formula = counts(*overrides)
    expected = on_cpu(formula.block(0) + formula.weight_copies(0))
    assert two - one == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("recipe", ["bf16", "fp32", "fp8_block"])
def test_what_surrounds_the_blocks(recipe: str) -> None:
    one, two = (kept_bytes("full", recipe, f"model.num_layers={n}") for n in (1, 2))
    ends = counts(f"precision={recipe}").ends(0)
    assert 2 * one - two == on_cpu([tensor for tensor in ends if tensor.name not in LOSS])


def test_the_loss() -> None:
    tokens = torch.randint(320, (1, LENGTH))
    logits = torch.randn(1, LENGTH, 320, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes([logits, tokens]) as live:
        loss = cross_entropy(logits, tokens, 320).sum()
        kept = live.total()
        loss.backward()
    sizes = {tensor.name: tensor.size for tensor in counts("precision=bf16").ends(0)}
    assert kept == pytest.approx(sizes["exponentials of logits"], abs=8 * LENGTH + 4)  # and sums
    assert logits.untyped_storage().nbytes() == sizes["logits"]
    assert logits.grad is not None
    assert logits.grad.untyped_storage().nbytes() == sizes["gradient of logits"]


def test_llama_3_8b_by_hand() -> None:
    """Bytes a token: 11 D + 4 F under selective checkpointing with keys and values of D/4 each."""
    formula = counts("model=llama3_8b", "precision=bf16", "trainer.sequence_length=8192")
    d, f, heads = 4096, 14336, 32
    assert total(formula.results()) == 8192 * (11 * d + 4 * f + 4 * heads)
    block = 2 * (2 * d + 4) + 4 * d + (2 + 1 + 2 + 2) * d + 4 * heads + 8 * f
    assert total(formula.block(0)) == 8192 * block
    quantized = counts("model=llama3_8b", "precision=fp8_current", "trainer.sequence_length=8192")
    # 3 + 1 + 2 copies of D and one of F, in the place of 2 · 3 D and 2 F; seven scales.
    assert total(quantized.block(0)) == 8192 * block - 8192 * f + 7 * 4
    assert total(quantized.weight_copies(0)) == 2 * d * d + 2 * d * 1024 + 3 * d * f + 7 * 4


def test_tensor_and_sequence_parallelism_divide_by_hand() -> None:
    """Eight ranks: all is divided but gathered inputs of q, k, v and of gate and up."""
    big = ("precision=bf16", "model=llama3_8b", "trainer.sequence_length=8192")
    alone, together = counts(*big), counts(*big, layout=Layout(tensor=8, sequence=True))
    gathered = 2 * 2 * 8192 * 4096
    expected = (total(alone.block(0)) - gathered) / 8 + gathered
    assert total(together.block(0)) == expected


def test_what_is_gathered_in_eight_bits_is_kept_once_and_divided() -> None:
    big = ("precision=fp8_current", "model=llama3_8b", "trainer.sequence_length=8192")
    alone, together = counts(*big), counts(*big, layout=Layout(tensor=8, sequence=True))
    copy = 8192 * 4096
    rest = total(alone.block(0)) - 5 * copy - 7 * 4  # copies for q, k, v, gate, up; scales
    assert total(together.block(0)) == (rest + 2 * copy) / 8 + 4 * 4
    mixed = counts(*big, "precision.exclude=[*.k_proj]", layout=Layout(tensor=8, sequence=True))
    # Linears that don't agree keep the whole input: q and v a copy, k itself.
    assert total(mixed.inputs(0)["self_attn"]) == 2 * (copy + 4) + 2 * copy


def test_without_sequence_parallelism_norms_see_all_tokens() -> None:
    big = ("precision=bf16", "model=llama3_8b", "trainer.sequence_length=8192")
    alone, together = counts(*big), counts(*big, layout=Layout(tensor=8))
    d = 4096
    residual = 8192 * (2 * (2 * d + 4) + 4 * d)  # norms, and their results
    assert total(together.block(0)) == (total(alone.block(0)) - residual) / 8 + residual


def test_context_parallelism_divides_all_but_keys_and_values() -> None:
    big = ("precision=bf16", "model=llama3_8b", "trainer.sequence_length=8192")
    alone, together = counts(*big), counts(*big, layout=Layout(context=4))
    keys = 8192 * 2 * 2 * 1024
    assert total(together.block(0)) == (total(alone.block(0)) - keys) / 4 + keys


def test_wgrad_operands_are_what_the_gemms_take() -> None:
    tokens, d, f = 128, 128, 512
    outputs = d + 2 * 64 + d + 2 * f + d
    quantized = counts("precision=fp8_current")
    inputs = 6 * d + f  # q k v o gate up, down
    assert total(quantized.wgrad_operands(0)) == tokens * (inputs + outputs) + 14 * 4
    inputs = 3 * d + f  # q, k, v and gate, up have theirs in common
    for recipe in ("bf16", "fp8_rowwise_bf16_wgrad"):
        plain = counts(f"precision={recipe}")
        assert total(plain.wgrad_operands(0)) == 2 * tokens * (inputs + outputs)
        assert total(plain.head_wgrad_operands()) == 2 * tokens * (d + 320)


def test_cached_weights_are_both_copies() -> None:
    size = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 512
    shared, apart = counts("precision=fp8_current"), counts("precision=mxfp8")
    assert total(shared.cached_weights(0)) == size + 7 * 4
    assert total(apart.cached_weights(0)) == 2 * (size + size // 32 * 4)
    assert total(apart.weight_copies(0)) == size + size // 32 * 4


def test_a_stage_in_the_middle_has_neither_ids_nor_head() -> None:
    config: Config = compose("trainer.micro_batch_size=1")
    formula = Activations(config, Layout(pipeline=4), plans(config))
    names = [[tensor.name for tensor in formula.ends(stage)] for stage in range(4)]
    assert names[0] == ["rotary tables", "token ids", "hidden states"]
    assert names[1] == names[2] == ["rotary tables", "hidden states"]
    assert names[3][-3:] == list(LOSS)
