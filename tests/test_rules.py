"""What a layout asks of model, recipes and batch: each refusal, and that its advice works."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fp8train.config import Config, ConfigError, LayerRecipeConfig, ModelConfig, PrecisionConfig
from fp8train.layout import SIZES, Layout, micro_batches, stage_blocks
from fp8train.layout_rules import BLOCK_SIZES, warnings
from fp8train.planning.pipeline import actions
from fp8train.rules import CHOICES, check, sent_as, wire_types


def configuration(*overrides: str) -> Config:
    """A small model that most layouts divide, with overrides as on the command line."""
    config = Config()
    config.model = ModelConfig(
        name="small",
        vocab_size=320,
        hidden_size=96,
        intermediate_size=384,
        num_layers=4,
        num_heads=12,
        num_kv_heads=4,
        max_sequence_length=2048,
    )
    config.precision = PrecisionConfig(recipe="bf16")
    config.trainer.global_batch_size, config.trainer.micro_batch_size = 48, 2
    config.trainer.sequence_length = 64
    for override in overrides:
        key, _, value = override.partition("=")
        key = "precision.recipe" if key == "precision" else key
        *path, last = key.split(".")
        group: Any = config
        for part in path:
            group = getattr(group, part)
        old = getattr(group, last)
        new: Any = value == "true" if isinstance(old, bool) else value
        new = [value] if isinstance(old, list) else new
        setattr(group, last, int(value) if type(old) is int else new)
    return config


# Ranks, overrides, what the line says, and what it advises: each piece is in the line and works.
REFUSED: dict[str, tuple[int, str, str, list[str]]] = {
    "two sizes for the rest": (
        4,
        "parallel.replicate=-1",
        "parallel.replicate=-1 and parallel.shard=-1: one of them must be a number",
        ["parallel.replicate=1"],
    ),
    "no shards": (
        2,
        "parallel.shard=0",
        "parallel.shard=0: must be at least 1, or -1 for the rest",
        ["parallel.shard=-1"],
    ),
    "another negative size": (
        2,
        "parallel.replicate=-2",
        "parallel.replicate=-2: must be at least 1, or -1",
        ["parallel.replicate=1"],
    ),
    "no tensor ranks": (
        2,
        "parallel.tensor=0",
        "parallel.tensor=0: must be at least 1",
        ["parallel.tensor=1"],
    ),
    "more ranks than there are": (
        2,
        "parallel.tensor=4",
        "parallel.shard=-1 parallel.tensor=4 needs a multiple of 4 processes and there are 2: ",
        ["parallel.tensor=2", "parallel.tensor=1"],
    ),
    "fewer ranks than there are": (
        4,
        "parallel.shard=2",
        "parallel.shard=2 needs 2 processes and there are 4: start as many, or set ",
        ["parallel.shard=4", "parallel.tensor=2", "parallel.context=2"],
    ),
    "nearest that the model allows": (  # 5 and 7 don't divide the heads
        10,
        "parallel.tensor=4 trainer.global_batch_size=240",
        "needs a multiple of 4 processes and there are 10",
        ["parallel.tensor=2", "parallel.tensor=1"],
    ),
    "heads": (
        8,
        "parallel.tensor=8",
        "model.num_heads=12 is not divisible by parallel.tensor=8: use parallel.tensor=4",
        ["parallel.tensor=4"],
    ),
    "fewer KV heads than tensor ranks": (
        12,
        "parallel.tensor=12",
        "model.num_kv_heads=4 is not divisible by parallel.tensor=12: use parallel.tensor=4",
        ["parallel.tensor=4"],
    ),
    "intermediate size": (
        4,
        "parallel.tensor=4 model.intermediate_size=382",
        "model.intermediate_size=382 is not divisible by parallel.tensor=4: ",
        ["parallel.tensor=2"],
    ),
    "vocabulary": (
        3,
        "parallel.tensor=3 model.num_kv_heads=3 trainer.sequence_length=63",
        "model.vocab_multiple=64 is not divisible by parallel.tensor=3: ",
        ["parallel.tensor=1", "model.vocab_multiple=192"],
    ),
    "sequence over context ranks": (
        4,
        "parallel.context=4 trainer.sequence_length=20",
        "trainer.sequence_length=20 is not a multiple of 2 · parallel.context=8: ",
        ["trainer.sequence_length=16", "trainer.sequence_length=24", "parallel.context=2"],
    ),
    "sequence over tensor ranks": (
        4,
        "parallel.tensor=4 trainer.sequence_length=63",
        "trainer.sequence_length=63 is not a multiple of parallel.tensor=4, over which "
        "parallel.sequence=true divides it: ",
        ["trainer.sequence_length=60", "trainer.sequence_length=64", "parallel.sequence=false"],
    ),
    "sequence over both": (
        16,
        "parallel.tensor=4 parallel.context=4 trainer.sequence_length=72",
        "trainer.sequence_length=72 is not a multiple of parallel.tensor · parallel.context=16, ",
        [
            "trainer.sequence_length=64",
            "trainer.sequence_length=80",
            "parallel.context=2",
            "parallel.sequence=false",
        ],
    ),
    "a sequence at the model's limit": (
        4,
        "parallel.context=4 trainer.sequence_length=47 model.max_sequence_length=47",
        "trainer.sequence_length=47 is not a multiple of 2 · parallel.context=8: ",
        ["trainer.sequence_length=40", "parallel.context=1"],
    ),
    "fp8_block, MLP": (
        4,
        "precision=fp8_block parallel.tensor=4",
        "parallel.tensor=4 leaves each rank 96 of model.intermediate_size (384), and blocks of 128 "
        "in fp8_block must not straddle ranks: ",
        ["parallel.tensor=1", "precision=fp8_current"],
    ),
    "mxfp8, queries": (
        4,
        "precision=mxfp8 parallel.tensor=4",
        "parallel.tensor=4 leaves each rank 24 of model.hidden_size (96), and blocks of 32 in ",
        ["parallel.tensor=1", "precision=fp8_current"],
    ),
    "mxfp4, MLP": (
        4,
        "precision=mxfp4 parallel.tensor=4 model.intermediate_size=320",
        "80 of model.intermediate_size (320), and blocks of 32 in mxfp4",
        ["parallel.tensor=1", "precision=fp8_current"],
    ),
    "nvfp4, keys": (
        4,
        "precision=nvfp4 parallel.tensor=4 model.hidden_size=192 model.num_kv_heads=4 "
        "model.num_heads=24",
        "leaves each rank 8 of model.num_kv_heads times the head size (32), and blocks of 16",
        ["parallel.tensor=2", "precision=fp8_current"],
    ),
    "fp8_block, LM head": (
        2,
        "parallel.tensor=2 precision=fp8_block model.hidden_size=256 model.intermediate_size=512 "
        "model.num_heads=2 model.num_kv_heads=2 precision.include=*",
        "parallel.tensor=2 leaves each rank 160 of the padded vocabulary (320), and blocks of 128",
        ["parallel.tensor=1", "precision=fp8_current"],
    ),
    "fp8_block, chunks of a sequence": (
        2,
        "precision=fp8_block parallel.context=2 trainer.sequence_length=576",
        "trainer.sequence_length=576 is not a multiple of 2 · parallel.context · 128=512: blocks "
        "of 128 in fp8_block must not straddle ranks: ",
        ["trainer.sequence_length=512", "trainer.sequence_length=1024", "parallel.context=1"],
    ),
    "mxfp8, chunks": (
        2,
        "precision=mxfp8 parallel.context=2 trainer.sequence_length=64",
        "trainer.sequence_length=64 is not a multiple of 2 · parallel.context · 32=128",
        ["trainer.sequence_length=128", "parallel.context=1"],
    ),
    "nvfp4, chunks": (
        4,
        "precision=nvfp4 parallel.context=4 trainer.sequence_length=64",
        "trainer.sequence_length=64 is not a multiple of 2 · parallel.context · 16=128",
        ["trainer.sequence_length=128", "parallel.context=2"],
    ),
    "fewer layers than stages": (
        8,
        "parallel.pipeline=8",
        "model.num_layers=4 is less than the stages of parallel.pipeline=8: ",
        ["parallel.pipeline=4", "model.num_layers=8"],
    ),
    "fewer layers than virtual stages": (
        4,
        "parallel.pipeline=4 parallel.virtual_stages=2 parallel.pipeline_schedule=interleaved",
        "is less than the stages of parallel.pipeline=4 times parallel.virtual_stages=2: ",
        ["parallel.pipeline=2 parallel.virtual_stages=2", "model.num_layers=8"],
    ),
    "fewer layers than virtual stages of zero bubble": (
        4,
        "parallel.pipeline=4 parallel.virtual_stages=2 parallel.pipeline_schedule=zero_bubble",
        "is less than the stages of parallel.pipeline=4 times parallel.virtual_stages=2: ",
        ["parallel.virtual_stages=1", "model.num_layers=8"],
    ),
    "fewer layers than virtual stages of two ranks": (
        2,
        "parallel.pipeline=2 parallel.virtual_stages=6 parallel.pipeline_schedule=interleaved",
        "model.num_layers=4 is less than the stages of parallel.pipeline=2 times ",
        ["parallel.virtual_stages=2", "model.num_layers=12"],
    ),
    "virtual stages without a pipeline": (
        1,
        "parallel.virtual_stages=2",
        "parallel.virtual_stages=2 needs parallel.pipeline above 1: set it to 1",
        ["parallel.virtual_stages=1"],
    ),
    "1f1b with virtual stages": (
        2,
        "parallel.pipeline=2 parallel.virtual_stages=2",
        "parallel.virtual_stages=2 with parallel.pipeline_schedule=1f1b, which has one stage a ",
        [
            "parallel.pipeline_schedule=interleaved",
            "parallel.pipeline_schedule=zero_bubble",
            "parallel.virtual_stages=1",
        ],
    ),
    "interleaved without virtual stages": (
        2,
        "parallel.pipeline=2 parallel.pipeline_schedule=interleaved",
        "parallel.virtual_stages=1 with parallel.pipeline_schedule=interleaved, ",
        [
            "parallel.virtual_stages=2",
            "parallel.pipeline_schedule=1f1b",
            "parallel.pipeline_schedule=zero_bubble",
        ],
    ),
    "zero bubble, compiled": (
        2,
        "parallel.pipeline=2 parallel.pipeline_schedule=zero_bubble parallel.compile=true",
        "parallel.compile=true with parallel.pipeline_schedule=zero_bubble: ",
        ["parallel.compile=false", "parallel.pipeline_schedule=1f1b"],
    ),
    "a batch that ranks don't divide": (
        8,
        "trainer.global_batch_size=40",
        "trainer.global_batch_size=40 is not divisible by trainer.micro_batch_size=2 times 8 "
        "data-parallel ranks: ",
        [
            "trainer.global_batch_size=32",
            "trainer.global_batch_size=48",
            "trainer.micro_batch_size=1",
        ],
    ),
    "a layout first, its batch then": (
        4,
        "parallel.tensor=3 trainer.global_batch_size=6",
        "parallel.tensor=3 needs a multiple of 3 processes and there are 4: ",
        ["parallel.tensor=4", "parallel.tensor=2 trainer.global_batch_size=8"],
    ),
    "fewer micro batches than pipeline ranks": (
        4,
        "parallel.pipeline=4 trainer.micro_batch_size=16",
        "makes 3 micro batches for parallel.pipeline=4, whose ranks would idle 50% of the time: ",
        ["trainer.global_batch_size=64", "trainer.micro_batch_size=12"],
    ),
    "a batch that neither divides nor fills the pipeline": (
        4,
        "trainer.global_batch_size=50 parallel.pipeline=4 trainer.micro_batch_size=16",
        "trainer.global_batch_size=50 is not divisible by trainer.micro_batch_size=16 times 1 ",
        ["trainer.global_batch_size=64", "trainer.micro_batch_size=10"],
    ),
    "fewer micro batches than interleaved ranks": (
        2,
        "parallel.pipeline=2 parallel.virtual_stages=2 parallel.pipeline_schedule=interleaved "
        "trainer.micro_batch_size=48",
        "makes 1 micro batch for parallel.pipeline=2, whose ranks would idle 33% of the time: ",
        ["trainer.global_batch_size=96", "trainer.micro_batch_size=24"],
    ),
    "fewer micro batches than zero bubble's ranks": (
        2,
        "parallel.pipeline=2 parallel.pipeline_schedule=zero_bubble trainer.micro_batch_size=48",
        "whose ranks would idle at least 25% of the time: ",
        ["trainer.global_batch_size=96", "trainer.micro_batch_size=24"],
    ),
    "one micro batch for a pipeline": (
        2,
        "parallel.pipeline=2 trainer.micro_batch_size=48",
        "makes 1 micro batch for parallel.pipeline=2, whose ranks would idle 50% of the time: ",
        ["trainer.global_batch_size=96", "trainer.micro_batch_size=24"],
    ),
    "one sample for a pipeline": (
        2,
        "parallel.pipeline=2 trainer.micro_batch_size=1 trainer.global_batch_size=1",
        "trainer.global_batch_size=1 makes 1 micro batch for parallel.pipeline=2",
        ["trainer.global_batch_size=2"],
    ),
    "uneven rounds, interleaved": (
        2,
        "parallel.pipeline=2 parallel.virtual_stages=2 parallel.pipeline_schedule=interleaved "
        "trainer.global_batch_size=10",
        "makes 5 micro batches, and parallel.pipeline_schedule=interleaved takes them in 2 equal "
        "rounds of 2 or more: ",
        [
            "trainer.global_batch_size=8",
            "trainer.global_batch_size=12",
            "trainer.micro_batch_size=1",
        ],
    ),
    "uneven rounds, zero bubble": (  # 66 would make 4 rounds of 8, which don't divide 33
        8,
        "parallel.pipeline=8 model.num_layers=8 parallel.pipeline_schedule=zero_bubble "
        "trainer.global_batch_size=62",
        "makes 31 micro batches, and parallel.pipeline_schedule=zero_bubble takes them in 3 equal",
        ["trainer.global_batch_size=60", "trainer.global_batch_size=64"],
    ),
    "Transformer Engine, pipeline": (
        2,
        "precision=fp8_current precision.backend=transformer_engine parallel.pipeline=2",
        "precision.backend=transformer_engine does not run with parallel.pipeline=2: ",
        ["precision.backend=torch", "precision.backend=emulated"],
    ),
    "Transformer Engine, compiled": (
        1,
        "precision=fp8_current precision.backend=transformer_engine parallel.compile=true",
        "parallel.compile=true does not run with precision.backend=transformer_engine: ",
        ["precision.backend=emulated", "precision.backend=torch"],
    ),
    "Transformer Engine, recomputation": (
        1,
        "precision=fp8_current precision.backend=transformer_engine "
        "parallel.activation_checkpoint=full",
        "parallel.activation_checkpoint=full does not run with precision.backend=transformer_eng",
        ["parallel.activation_checkpoint=none", "precision.backend=emulated"],
    ),
    "Transformer Engine, tensor parallel": (
        4,
        "parallel.tensor=4 precision=fp8_current precision.backend=transformer_engine",
        "precision.backend=transformer_engine does not run with parallel.tensor=4: ",
        ["precision.backend=emulated", "parallel.tensor=1"],
    ),
    "Transformer Engine, tokens": (
        1,
        "precision=mxfp8 precision.backend=transformer_engine trainer.sequence_length=40",
        "trainer.sequence_length=40 is not a multiple of 16: precision.backend=transformer_engine "
        "needs a multiple of 32 tokens a micro batch, and trainer.micro_batch_size=2: ",
        ["trainer.sequence_length=32", "trainer.sequence_length=48"],
    ),
    "Transformer Engine, context parallel": (
        4,
        "precision=fp8_current precision.backend=transformer_engine parallel.context=4",
        "precision.backend=transformer_engine does not run with parallel.context=4: ",
        ["precision.backend=emulated", "parallel.context=1"],
    ),
}


def refusal(config: Config, ranks: int) -> str:
    with pytest.raises(ConfigError) as error:
        check(config, ranks)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_is_refused_with_advice_that_works(name: str) -> None:
    ranks, overrides, says, advice = REFUSED[name]
    line = refusal(configuration(*overrides.split()), ranks)
    assert says in line
    key = overrides.split()[0].partition("=")[0]
    assert key in line or line.startswith(("trainer.", "model.")), f"does not name {key}"
    for change in advice:
        if change.split()[0] not in line:  # some values stand alone after "use" or "to"
            assert change.partition("=")[2] in line.rpartition(": ")[2]
        check(configuration(*overrides.split(), *change.split()), ranks)


def test_a_recipe_of_some_layers_has_blocks_too() -> None:
    config = configuration("precision=fp8_current", "parallel.tensor=4")
    check(config, 4)
    config.precision.layer_recipes = [LayerRecipeConfig("*.up_proj", "fp8_block")]
    line = refusal(config, 4)
    assert "blocks of 128 in fp8_block must not straddle ranks" in line
    assert "no recipe with blocks in precision and precision.layer_recipes" in line


def test_weights_alone_have_no_blocks_of_tokens() -> None:
    check(configuration("precision=mxfp4", "parallel.context=2", "trainer.sequence_length=20"), 2)


@pytest.mark.parametrize("schedule", CHOICES["parallel.pipeline_schedule"])
def test_the_number_of_micro_batches_is_as_torch_s_schedules_take_it(schedule: str) -> None:
    """Refused where they raise and nowhere else; and the two counts that are named are taken."""
    virtual = 2 if schedule == "interleaved" else 1
    for ranks in (2, 3, 5, 8):
        for count in range(1, 4 * ranks):
            config = configuration(
                f"parallel.pipeline={ranks}",
                f"parallel.pipeline_schedule={schedule}",
                f"parallel.virtual_stages={virtual}",
                f"trainer.global_batch_size={count}",
                "trainer.micro_batch_size=1",
                "model.num_layers=16",
            )
            layout = Layout(pipeline=ranks, virtual_stages=virtual)
            try:
                actions(layout, schedule, count)
                takes = count >= ranks
            except ConfigError:
                takes = False
            if takes:
                check(config, ranks)
                continue
            line = refusal(config, ranks)
            for option in line.rpartition(": use ")[2].removesuffix(" or more").split(" or "):
                other = replace(config.trainer, global_batch_size=int(option))
                check(replace(config, trainer=other), ranks)


layouts = st.fixed_dictionaries(
    {
        "tensor": st.sampled_from([1, 2, 3, 4]),
        "context": st.sampled_from([1, 2, 4]),
        "pipeline": st.sampled_from([1, 2, 4]),
        "replicate": st.sampled_from([1, 2]),
        "shard": st.sampled_from([1, 2, -1]),
        "sequence": st.booleans(),
        "pipeline_schedule": st.sampled_from(CHOICES["parallel.pipeline_schedule"]),
        "virtual_stages": st.sampled_from([1, 1, 2]),
    }
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    layouts,
    st.sampled_from(CHOICES["precision.recipe"]),
    st.sampled_from([30, 64, 512]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([96, 256, 768]),
)
def test_what_passes_can_be_divided(
    parallel: dict[str, Any], recipe: str, length: int, micro: int, hidden: int
) -> None:
    """By arithmetic of its own: every part is whole, no block straddles, every rank has work."""
    config = configuration(f"precision={recipe}", f"trainer.sequence_length={length}")
    config.model.hidden_size, config.trainer.micro_batch_size = hidden, micro
    for key, value in parallel.items():
        setattr(config.parallel, key, value)
    sizes = [getattr(config.parallel, name) for name in SIZES]
    ranks = abs(math.prod(sizes)) * (2 if -1 in sizes else 1)
    before = copy.deepcopy(config)
    try:
        check(config, ranks)
    except ConfigError as error:
        assert "\n" not in str(error)
        assume(False)
    assert config == before
    layout, model = Layout.of(config.parallel, ranks), config.model
    assert layout.world_size == ranks
    block, head = BLOCK_SIZES.get(recipe, 1), hidden // model.num_heads
    for size in (model.num_heads, model.num_kv_heads, model.vocab_multiple):
        assert size % layout.tensor == 0
    if layout.tensor > 1:
        for size in (model.intermediate_size, hidden, model.num_kv_heads * head):
            assert size % (layout.tensor * block) == 0
    tokens = length // layout.context
    if layout.context > 1:
        assert length % (2 * layout.context) == 0
        assert recipe == "mxfp4" or tokens // 2 % block == 0
    assert not layout.sequence or length % (layout.context * layout.tensor) == 0
    assert all(stage_blocks(model, layout.stages))
    count = micro_batches(config, layout)
    assert count * micro * layout.data == config.trainer.global_batch_size
    assert count >= layout.pipeline
    actions(layout, config.parallel.pipeline_schedule, count)


def warned(overrides: str, ranks: int) -> list[str]:
    """The warnings of a run on machines of 8 processes."""
    config = configuration(*overrides.split())
    return warnings(config, Layout.of(config.parallel, ranks), 8)


def test_a_long_ring_is_warned_of() -> None:
    for overrides in ("gradients.algorithm=ring", "gradients.algorithm=ring parallel.context=2"):
        (line,) = warned(overrides, 16)
        assert "ring over 16 ranks" in line and "23% over 32" in line and "all_to_all" in line
    assert warned("gradients.algorithm=ring", 8) == []
    assert warned("gradients.algorithm=ring parallel.tensor=2", 16) == []


GRADIENTS_REFUSED = {
    "precision=bf16 gradients.rounding=stochastic": (
        "gradients.rounding=stochastic is for eight bits, and gradients.reduce=auto sends fp32",
        "gradients.reduce=e5m2",
    ),
    "gradients.reduce=bf16 gradients.error_feedback=true": (
        "gradients.error_feedback=true is for eight bits",
        "gradients.reduce=e4m3",
    ),
    "gradients.inside=bf16": ("and parallel.replicate=1", "parallel.replicate=2"),
    "gradients.scaling=none": ("gradients.scaling=none loses", "gradients.scaling=tensor"),
    "gradients.algorithm=ring parallel.replicate=2": (
        "does not run with parallel.replicate=2",
        "parallel.replicate=1",
    ),
    "gradients.algorithm=ring gradients.error_feedback=true": (
        "which rounds at every rank: use all_to_all",
        "gradients.algorithm=all_to_all",
    ),
    "gradients.error_feedback=true trainer.loss_scale.mode=dynamic": (
        "with a dynamic loss scale",
        "trainer.loss_scale.mode=static",
    ),
    "parameters.gather=fp8 precision=mxfp8": (
        "parameters.gather=fp8: mxfp8 has no single eight-bit copy of a weight",
        "precision=fp8_block",
    ),
    "parameters.gather=fp8 precision=fp8_rowwise": (
        "parameters.gather=fp8: fp8_rowwise has no single",
        "precision=fp8_delayed",
    ),
    "gradients.reduce=e4m3 gradients.scaling=tensor parallel.tensor=2": (
        "copies of a norm's gradient could differ",
        "gradients.reduce=e5m2",
    ),
    "gradients.reduce=e4m3 gradients.algorithm=ring parallel.tensor=2": (
        "with one scale a message and parallel.tensor=2",
        "gradients.algorithm=all_to_all",
    ),
    "parameters.gather=fp8 precision=bf16": ("has no FP8 weights", "parameters.gather=bf16"),
    "gradients.accumulate=sharded parallel.pipeline=2": (
        "does not run with parallel.pipeline=2",
        "gradients.accumulate=unsharded",
    ),
}


@pytest.mark.parametrize("overrides", GRADIENTS_REFUSED)
def test_gradients_are_refused_with_advice_that_works(overrides: str) -> None:
    says, change = GRADIENTS_REFUSED[overrides]
    given = ["precision=fp8_current", *overrides.split()]
    assert says in refusal(configuration(*given), 4)
    check(configuration(*given, *change.split()), 4)


def test_how_gradients_are_sent() -> None:
    def of(overrides: str, ranks: int = 4) -> tuple[str, str, str]:
        config = configuration("precision=fp8_current", *overrides.split())
        layout = Layout.of(config.parallel, ranks)
        return (*wire_types(config, layout), sent_as(config, layout))

    assert of("") == ("e5m2", "e5m2", "e5m2")
    assert of("", 1)[2] == of("parallel.tensor=4")[2] == "none"
    assert of("precision=bf16") == ("fp32", "fp32", "fp32")
    assert of("parallel.replicate=2") == ("bf16", "e5m2", "bf16 inside, e5m2 between")
    assert of("parallel.replicate=4")[2] == "e5m2"
    assert of("parallel.replicate=2 gradients.inside=fp32")[2] == "fp32 inside, e5m2 between"
    assert of("parallel.replicate=2 gradients.reduce=fp32")[2] == "fp32"
    assert of("parallel.replicate=2 gradients.reduce=bf16 gradients.inside=fp32") == (
        *("fp32", "bf16", "fp32 inside, bf16 between"),
    )


def test_tensor_ranks_on_two_machines_are_warned_of() -> None:
    (line,) = warned("parallel.tensor=16", 16)
    assert line == (
        "parallel.tensor=16 spans 2 machines of 8 processes: its collectives, two a block and "
        "direction, then cross the slow network; use 8, or another divisor of 8"
    )
    (line,) = warned("parallel.tensor=6", 6)
    assert line.startswith("parallel.tensor=6 has groups that span 2 machines of 8 processes")
    assert line.endswith("use 2, or another divisor of 8")
    for tensor in (1, 2, 4, 8):
        assert warned(f"parallel.tensor={tensor}", 8) == []
