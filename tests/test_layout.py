"""Sizes and coordinates of a layout: pure arithmetic."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp8train.config import Config, ConfigError, ModelConfig, ParallelConfig
from fp8train.layout import (
    SIZES,
    Layout,
    micro_batches,
    nearest_layouts,
    padded_vocabulary,
    stage_blocks,
)

size = st.integers(1, 4)
layouts = st.builds(Layout, **dict.fromkeys((*SIZES, "virtual_stages"), size))


def model(layers: int, vocabulary: int = 320, kv_heads: int = 2) -> ModelConfig:
    return ModelConfig(
        name="m",
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=kv_heads,
    )


@given(layouts)
def test_every_rank_has_a_place_of_its_own(layout: Layout) -> None:
    """In the order of counting: tensor is the fastest coordinate, pipeline the slowest."""
    places = [layout.place(rank) for rank in range(layout.world_size)]
    coordinates = [tuple(getattr(place, name) for name in SIZES) for place in places]
    assert coordinates == list(itertools.product(*(range(getattr(layout, n)) for n in SIZES)))
    for place in places:
        assert place.data == place.replicate * layout.shard + place.shard
    assert {place.data for place in places} == set(range(layout.data))


def test_megatron_s_example() -> None:
    """16 ranks of tensor 2 and pipeline 4: the groups in Megatron's `parallel_state` docstring."""
    layout = Layout(tensor=2, pipeline=4, shard=2)

    def groups(*fixed: str) -> set[tuple[int, ...]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(16):
            place = layout.place(rank)
            found.setdefault(tuple(getattr(place, name) for name in fixed), []).append(rank)
        return {tuple(ranks) for ranks in found.values()}

    assert groups("pipeline", "shard") == {(rank, rank + 1) for rank in range(0, 16, 2)}
    assert groups("shard", "tensor") == {(n, n + 4, n + 8, n + 12) for n in range(4)}
    assert groups("pipeline", "tensor") == {
        (stage + n, stage + n + 2) for stage in (0, 4, 8, 12) for n in (0, 1)
    }


@given(layouts)
def test_stages_are_dealt_out_in_turn(layout: Layout) -> None:
    stages = [layout.stages_of(rank) for rank in range(layout.pipeline)]
    assert all(len(mine) == layout.virtual_stages for mine in stages)
    assert sorted(itertools.chain(*stages)) == list(range(layout.stages))
    assert [mine[0] for mine in stages] == list(range(layout.pipeline))
    # From one stage to the next is from one rank to the next, around.
    owner = {stage: rank for rank, mine in enumerate(stages) for stage in mine}
    assert all(owner[stage] == stage % layout.pipeline for stage in range(layout.stages))


def head_in_blocks(config: ModelConfig) -> float:
    """FLOPs of the LM head in those of a block, from the shapes of the matrices."""
    size, inner = config.hidden_size, config.intermediate_size
    kv = size // config.num_heads * config.num_kv_heads
    shapes = [(size, size), (kv, size), (kv, size), (size, size)]  # q, k, v, o
    shapes += [(inner, size), (inner, size), (size, inner)]  # gate, up, down
    return config.vocab_size * size / sum(rows * columns for rows, columns in shapes)


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many layers into stages that are not empty."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(end - start for start, end in itertools.pairwise(ends))


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([2, 320, 1500, 4000, 20000]),
    st.booleans(),
)
@example(9, 3, 20000, True)
def test_stages_hold_the_blocks_evenly(
    layers: int, stages: int, vocabulary: int, grouped: bool
) -> None:
    """A contiguous partition without an empty stage, of the least possible largest load."""
    config = model(layers, vocabulary, kv_heads=2 if grouped else 4)
    if layers < stages:
        with pytest.raises(ConfigError, match=f"num_layers={layers} is less than the {stages}"):
            stage_blocks(config, stages)
        return
    blocks = stage_blocks(config, stages)
    assert [number for stage in blocks for number in stage] == list(range(layers))
    counts = [len(stage) for stage in blocks]
    assert len(counts) == stages and min(counts) >= 1
    head = head_in_blocks(config)
    best = min(max(*cut[:-1], cut[-1] + head, 0) for cut in partitions(layers, stages))
    assert max(*counts[:-1], counts[-1] + head, 0) == pytest.approx(best)
    assert max(counts[:-1], default=0) - min(counts[:-1], default=0) <= 1


def test_a_large_vocabulary_lightens_the_last_stage() -> None:
    assert [len(stage) for stage in stage_blocks(model(8, vocabulary=320), 2)] == [4, 4]
    assert [len(stage) for stage in stage_blocks(model(8, vocabulary=4000), 2)] == [5, 3]
    assert [len(stage) for stage in stage_blocks(model(8, vocabulary=200000), 2)] == [7, 1]


@given(st.integers(1, 5000), st.integers(1, 200))
def test_the_vocabulary_is_padded_to_a_multiple(vocabulary: int, multiple: int) -> None:
    config = model(1, vocabulary)
    config.vocab_multiple = multiple
    padded = padded_vocabulary(config)
    assert padded % multiple == 0
    assert vocabulary <= padded < vocabulary + multiple


sizes = st.fixed_dictionaries(dict.fromkeys(SIZES, st.integers(1, 6)))


def read(overrides: str) -> dict[str, int]:
    """The sizes in a list of overrides."""
    return {name: int(value) for name, value in re.findall(r"parallel\.(\w+)=(\d+)", overrides)}


@given(sizes, st.sampled_from([1, 2, 6, 7, 8, 12, 16, 64, 360]), st.sampled_from([*SIZES, ""]))
def test_the_nearest_layouts(asked: dict[str, int], world_size: int, free: str) -> None:
    """They multiply to the world size, and no layout left out has a smaller change."""
    asked = {name: -1 if name == free else value for name, value in asked.items()}
    found = [asked | read(overrides) for overrides in nearest_layouts(asked, world_size, count=4)]
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    all_layouts = [
        chosen
        for chosen in itertools.product(divisors, repeat=4)
        if world_size % math.prod(chosen) == 0
    ]

    def change(chosen: dict[str, int]) -> tuple[int, float]:
        steps = [abs(math.log2(chosen[n] / asked[n])) for n in SIZES if n != free]
        return sum(step > 0 for step in steps), sum(steps)

    for layout in found:
        known = math.prod(value for value in layout.values() if value != -1)
        assert world_size % known == 0 if free else known == world_size
    changes = [change(layout) for layout in found]
    everything = sorted(
        change(dict(zip(SIZES, (*chosen, world_size // math.prod(chosen)), strict=True)))
        for chosen in all_layouts
    )
    for ours, best in zip(changes, everything, strict=False):
        assert ours == pytest.approx(best)
    assert len(changes) == min(4, len(everything))


def test_only_layouts_that_fit_are_named() -> None:
    asked = dict.fromkeys(SIZES, 1) | {"tensor": 3, "shard": -1}
    assert nearest_layouts(asked, 8)[:2] == ["parallel.tensor=4", "parallel.tensor=2"]
    few = nearest_layouts(asked, 8, lambda sizes: sizes["tensor"] <= 2)
    assert few[:2] == ["parallel.tensor=2", "parallel.tensor=1"]
    assert nearest_layouts(asked, 8, lambda sizes: False) == []


@given(sizes, st.integers(1, 64), st.sampled_from(["replicate", "shard", ""]))
@example(dict.fromkeys(SIZES, 1) | {"tensor": 3}, 4, "shard")
def test_a_layout_or_one_line(asked: dict[str, int], world_size: int, free: str) -> None:
    """Sizes that multiply are taken, −1 is the rest; else each layout that is named works."""
    asked = {name: -1 if name == free else value for name, value in asked.items()}
    known = math.prod(value for value in asked.values() if value != -1)
    works = world_size % known == 0 if free else world_size == known
    if works:
        layout = Layout.of(ParallelConfig(**asked), world_size)
        assert layout.world_size == world_size
        expected = asked | ({free: world_size // known} if free else {})
        assert {name: getattr(layout, name) for name in SIZES} == expected
        return
    with pytest.raises(ConfigError) as error:
        Layout.of(ParallelConfig(**asked), world_size)
    line = str(error.value)
    assert "\n" not in line
    assert f"needs {'a multiple of ' if free else ''}{known} processes" in line
    options = line.partition("or set ")[2].split(" or ")
    assert options
    for option in options:
        assert Layout.of(ParallelConfig(**asked | read(option)), world_size)


def test_two_sizes_can_t_both_be_the_rest() -> None:
    parallel = ParallelConfig(replicate=-1, shard=-1)
    with pytest.raises(
        ConfigError, match=r"one of them must be a number, as parallel\.replicate=1"
    ):
        Layout.of(parallel, 4)
    parallel.replicate = 1
    assert Layout.of(parallel, 4).shard == 4


def test_sequence_parallelism_comes_with_tensor_ranks_only() -> None:
    assert not Layout.of(ParallelConfig(tensor=1, sequence=True), 2).sequence
    assert Layout.of(ParallelConfig(tensor=2, sequence=True), 2).sequence
    assert not Layout.of(ParallelConfig(tensor=2, sequence=False), 2).sequence


def test_micro_batches_of_a_rank() -> None:
    config = Config()
    config.trainer.global_batch_size, config.trainer.micro_batch_size = 24, 2
    assert micro_batches(config, Layout(replicate=2, shard=3, tensor=4, context=2)) == 2


def test_a_layout_in_words() -> None:
    layout = Layout(pipeline=2, shard=4, tensor=8, virtual_stages=3)
    assert str(layout) == "pipeline 2 × shard 4 × tensor 8"
    assert layout.described("interleaved") == f"{layout}, interleaved, 3 stages a rank"
    assert Layout(pipeline=2).described("zero_bubble") == "pipeline 2, zero_bubble"
    assert Layout().described("1f1b") == str(Layout()) == "one rank"


def test_a_planned_layout_names_the_key_of_its_processes() -> None:
    """A dry run has no processes to start."""
    with pytest.raises(ConfigError, match=r"there are 4: give world_size=2, or set"):
        Layout.of(ParallelConfig(shard=2), 4, planned=True)
    with pytest.raises(ConfigError, match=r"give world_size=a multiple of 3, or set"):
        Layout.of(ParallelConfig(tensor=3), 4, planned=True)
