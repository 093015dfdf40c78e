"""Memory of a rank: by hand for a small model, and how it moves with the layout."""

from typing import Any

import pytest

from fp8train.layout import Layout
from fp8train.planning.activations import Activations, total
from fp8train.planning.memory import Memory, memory
from fp8train.planning.parameters import plans
from tests.planning.conftest import MODELS, compose

BLOCK, ROOT = 246_016, 2 * 320 * 128 + 128  # elements of llama_tiny


def held(layout: Layout, *overrides: str, pipeline: int = 0) -> Memory:
    return memory(compose(*overrides), layout, pipeline)


def test_one_rank_by_hand() -> None:
    found = held(Layout(), "trainer.global_batch_size=8", "precision=bf16")  # one micro batch of 8
    count = MODELS["llama_tiny"]
    assert (found.parameters, found.sharded_parameters) == (count, count)
    assert (found.masters, found.optimizer, found.gradients) == (4 * count, 8 * count, 4 * count)
    assert found.weights == 2 * (ROOT + 2 * BLOCK)
    assert found.unsharded_gradients == (2 + 4) * BLOCK
    assert found.quantized_weights == 0
    assert found.in_flight == 1
    parts = ("masters", "optimizer", "gradients", "unsharded_gradients", "weights", "activations")
    assert found.total == sum(getattr(found, part) for part in parts)


def test_gradients_of_several_micro_batches_are_held_whole() -> None:
    one, two = (held(Layout(), f"trainer.global_batch_size={size}") for size in (8, 16))
    assert two.unsharded_gradients - one.unsharded_gradients == 4 * MODELS["llama_tiny"]
    assert two.activations == one.activations


def test_gradients_that_are_reduced_each_time_are_held_sharded_twice() -> None:
    given = ("trainer.global_batch_size=16", "gradients.accumulate=sharded")
    one, two = (held(Layout(shard=2), *given[:count]) for count in (1, 2))
    rounds = held(Layout(shard=2), given[0].replace("16", "64"), given[1])
    assert two.gradients == one.gradients and rounds.gradients == 2 * one.gradients
    assert rounds.unsharded_gradients == (2 + 4) * BLOCK


def test_error_feedback_keeps_the_unsharded_size_twice() -> None:
    count, feedback = MODELS["llama_tiny"], "gradients.error_feedback=true"
    assert held(Layout(shard=2)).residuals == 0
    assert held(Layout(shard=2), feedback).residuals == 2 * 4 * count
    assert held(Layout(shard=2), feedback, "gradients.residual=bf16").residuals == 2 * 2 * count
    # Between replicas: the shard that is sent, and a part of it, the mean.
    replicas = held(Layout(shard=2, replicate=2), feedback).residuals
    assert replicas == pytest.approx(2 * 4 * (count / 2 + count / 4), rel=1e-3)
    assert held(Layout(), feedback).residuals == 0


def test_weights_that_travel_as_bytes_take_one_and_are_not_quantised_again() -> None:
    layout, given = Layout(shard=2), ("precision=fp8_current", "trainer.global_batch_size=16")
    block = BLOCK - 2 * 128  # without its norms
    plain, found = held(layout, *given), held(layout, *given, "parameters.gather=fp8")
    own_shard = 4 * block // 2
    assert plain.weights - found.weights == 2 * block - own_shard
    assert plain.quantized_weights > 0 and found.quantized_weights == 0
    alone = "parallel.shard=1", "parameters.gather=fp8"
    assert held(Layout(), *given, *alone) == held(Layout(), *given)


def test_weights_that_stay_for_a_step_are_all_gathered() -> None:
    found = held(Layout(shard=2), "parameters.reshard_after_forward=false")
    assert found.weights == 2 * MODELS["llama_tiny"]


def test_fp32_computes_in_four_bytes() -> None:
    found = held(Layout(), "precision=fp32", "trainer.global_batch_size=8")
    assert found.weights == 4 * (ROOT + 2 * BLOCK)
    assert found.unsharded_gradients == (4 + 4) * BLOCK


def test_sharding_divides_states_and_nothing_else() -> None:
    one, four = held(Layout()), held(Layout(shard=2, context=1))
    assert four.masters == pytest.approx(one.masters / 2, rel=1e-4)
    assert four.sharded_parameters == pytest.approx(one.parameters / 2, rel=1e-4)
    for part in ("parameters", "weights", "activations"):
        assert getattr(four, part) == getattr(one, part)
    assert held(Layout(shard=2)).masters == held(Layout(context=2)).masters


def test_a_pipeline_keeps_its_stages_gathered() -> None:
    found = held(Layout(pipeline=2), "trainer.global_batch_size=32", pipeline=1)
    count = 2 * BLOCK + 320 * 128 + 128
    assert found.parameters == count
    assert found.weights == 2 * count
    assert found.unsharded_gradients == 4 * count + (2 + 4) * BLOCK


def activation_counts(*overrides: str, layout: Layout) -> Activations:
    config = compose(*overrides)
    return Activations(config, layout, plans(config))


def test_1f1b_keeps_as_many_as_there_are_stages_to_come() -> None:
    layout, overrides = Layout(pipeline=4), ("trainer.global_batch_size=64",)
    counts = activation_counts(*overrides, layout=layout)
    for stage, rounds in enumerate((4, 3, 2, 1)):
        found = held(layout, *overrides, pipeline=stage)
        block = total(counts.block(stage)) + total(counts.ends(stage))
        assert found.in_flight == rounds
        assert found.activations == rounds * block
        assert found.quantized_weights == rounds * total(counts.weight_copies(stage))


def test_interleaved_keeps_some_of_each_stage() -> None:
    layout = Layout(pipeline=2, virtual_stages=2)
    overrides = ("trainer.global_batch_size=32", "parallel.pipeline_schedule=interleaved")
    counts = activation_counts(*overrides, layout=layout)
    stage = [total(counts.block(number)) + total(counts.ends(number)) for number in range(4)]
    # Rank 0, four micro batches: 0F0 0F1 2F0 2F1 0F2 2B0 0F3, and stage 0 is the larger one.
    assert held(layout, *overrides).activations == 4 * stage[0] + stage[2]


def test_zero_bubble_keeps_wgrads_that_wait() -> None:
    layout, overrides = Layout(pipeline=4), ("trainer.global_batch_size=64",)
    counts = activation_counts(*overrides, layout=layout)
    zero_bubble = (*overrides, "parallel.pipeline_schedule=zero_bubble")
    for stage, waiting in enumerate((0, 1, 2, 3)):
        plain, found = (held(layout, *given, pipeline=stage) for given in (overrides, zero_bubble))
        operands = counts.wgrad_operands(stage)
        operands += counts.head_wgrad_operands() if stage == 3 else []
        extra = waiting * total(operands)
        assert found.activations == plain.activations + extra


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_has_one_block_whole(mode: str) -> None:
    given = (f"parallel.activation_checkpoint={mode}", "trainer.global_batch_size=8")
    counts = activation_counts(*given, layout=Layout())
    kept = counts.results() if mode == "selective" else [counts.hidden]
    found = held(Layout(), *given)
    assert found.activations == total(counts.ends(0)) + 4 * total(kept) + total(counts.block(0))
    assert found.quantized_weights == total(counts.weight_copies(0))
    assert found.activations < held(Layout(), "trainer.global_batch_size=8").activations


@pytest.mark.parametrize("mode", ["none", "full"])
def test_cached_weights_stay_for_the_step(mode: str) -> None:
    layout = Layout(pipeline=2)
    given = ("precision=mxfp8", f"parallel.activation_checkpoint={mode}")
    given = (*given, "trainer.global_batch_size=32")
    counts = activation_counts(*given, layout=layout)
    found = held(layout, *given, "precision.cache_weights=true")
    assert found.quantized_weights == 2 * total(counts.cached_weights(0))
    plain: Any = held(layout, *given)
    rounds = {"none": 2 * 2, "full": 1}[mode]  # micro batches and blocks, or the one that runs
    assert plain.quantized_weights == rounds * total(counts.weight_copies(0))


def test_of_many_stages_three_are_gathered() -> None:
    given = ("trainer.global_batch_size=32", "parallel.pipeline_schedule=interleaved")
    given = (*given, "model.num_layers=10")
    found = held(Layout(pipeline=2, virtual_stages=5), *given, pipeline=1)
    assert found.weights == 2 * (3 * BLOCK + 320 * 128 + 128)
    assert found.parameters == 5 * BLOCK + 320 * 128 + 128


def test_tied_embeddings_count_once_on_one_rank() -> None:
    tied = held(Layout(), "model.tie_embeddings=true")
    assert tied.parameters == MODELS["llama_tiny"] - 320 * 128
