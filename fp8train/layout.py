"""How the ranks of a run divide the work: sizes and coordinates, as arithmetic alone.

A rank's coordinates are (pipeline, replicate, shard, context, tensor), tensor fastest: ranks that
talk most are neighbours, as in Megatron. Parameters are sharded over shard × context, since the
ranks of a context group hold the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from fp8train.config import Config, ConfigError, ModelConfig, ParallelConfig

SIZES = ("pipeline", "replicate", "shard", "context", "tensor")  # slowest to fastest


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions, all known.

    Attributes:
        pipeline: groups of ranks that hold different blocks.
        replicate: copies of the sharded parameters.
        shard: ranks that a copy's parameters are divided over, each with samples of its own.
        context: ranks that share a sequence.
        tensor: ranks that share each matrix.
        virtual_stages: pipeline stages on each rank.
        sequence: norms and residual stream are divided over the tensor ranks too.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    virtual_stages: int = 1
    sequence: bool = False

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        world_size: int,
        fits: Callable[[Layout], bool] = lambda layout: True,
        *,
        planned: bool = False,
    ) -> Layout:
        """The layout of a configuration, its −1 filled in.

        Args:
            fits: whether a layout could be named instead, where this one is not possible.
            planned: the processes are those of a dry run, which the key `world_size` counts.
        Raises:
            ConfigError: the sizes don't multiply to the world size; names the nearest that do.
        """
        sizes = {name: getattr(parallel, name) for name in SIZES}
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ConfigError(
                "parallel.replicate=-1 and parallel.shard=-1: one of them must be a number, as "
                "parallel.replicate=1 for no copies or parallel.shard=1 for nothing but copies"
            )

        def built(sizes: dict[str, int]) -> Layout:
            return cls(
                **sizes,
                virtual_stages=parallel.virtual_stages,
                sequence=parallel.sequence and sizes["tensor"] > 1,
            )

        known = math.prod(size for size in sizes.values() if size != -1)
        if free:
            sizes[free[0]] = world_size // known
        if math.prod(sizes.values()) != world_size:
            asked = " ".join(
                f"parallel.{name}={getattr(parallel, name)}"
                for name in SIZES
                if getattr(parallel, name) != 1 or name == "shard"
            )
            wanted = sizes | dict.fromkeys(free, -1)
            nearest = nearest_layouts(wanted, world_size, lambda sizes: fits(built(sizes)))
            # Where no layout fits, the line for one that multiplies says why.
            nearest = nearest or nearest_layouts(wanted, world_size)
            more = "start as many"
            if planned:
                more = f"give world_size={f'a multiple of {known}' if free else known}"
            raise ConfigError(
                f"{asked} needs {'a multiple of ' if free else ''}{known} processes and there "
                f"{'is' if world_size == 1 else 'are'} {world_size}: {more}, or set "
                f"{' or '.join(nearest)}"
            )
        return built(sizes)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.ranks_a_stage

    @property
    def ranks_a_stage(self) -> int:
        """Ranks that hold pieces of the same blocks."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Groups of ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def stages(self) -> int:
        """Pieces that the model's depth is cut into."""
        return self.pipeline * self.virtual_stages

    def place(self, rank: int) -> Place:
        """Coordinates of a rank."""
        found = {}
        for name in reversed(SIZES):
            rank, found[name] = divmod(rank, getattr(self, name))
        return Place(**found, data=found["replicate"] * self.shard + found["shard"])

    def stages_of(self, pipeline: int) -> list[int]:
        """The stages on the ranks of a pipeline coordinate: every `pipeline`-th, from its own."""
        return list(range(pipeline, self.stages, self.pipeline))

    def __str__(self) -> str:
        """Sizes above 1, as they are written."""
        shown = [f"{name} {getattr(self, name)}" for name in SIZES if getattr(self, name) > 1]
        return " × ".join(shown) or "one rank"

    def described(self, schedule: str) -> str:
        """Sizes above 1 and, where there is a pipeline, its schedule and its stages on a rank."""
        if self.pipeline == 1:
            return str(self)
        stages = f", {self.virtual_stages} stages a rank" if self.virtual_stages > 1 else ""
        return f"{self}, {schedule}{stages}"


@dataclass(frozen=True)
class Place:
    """A rank's coordinates; `data` counts replicate and shard together."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    data: int


def nearest_layouts(
    asked: dict[str, int],
    world_size: int,
    fits: Callable[[dict[str, int]], bool] = lambda sizes: True,
    count: int = 3,
) -> list[str]:
    """Layouts of a world size with the least change to the sizes asked for, as overrides.

    Args:
        asked: sizes by name; -1: whatever the others leave.
        fits: whether sizes come into question.
    """

    def distance(sizes: tuple[int, ...]) -> tuple[int, float, tuple[int, ...]]:
        changed = [
            math.log2(new / asked[name])
            for name, new in zip(SIZES, sizes, strict=True)
            if asked[name] != -1
        ]
        return sum(map(bool, changed)), sum(map(abs, changed)), sizes

    layouts = sorted(_products(world_size, len(SIZES)), key=distance)
    best = islice((sizes for sizes in layouts if fits(dict(zip(SIZES, sizes, strict=True)))), count)
    return [
        " ".join(
            f"parallel.{name}={new}"
            for name, new in zip(SIZES, sizes, strict=True)
            if asked[name] not in (new, -1)
        )
        for sizes in best
    ]


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` factors whose product is the number."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _products(number // first, count - 1):
                yield first, *rest


def stage_blocks(model: ModelConfig, stages: int) -> list[range]:
    """The blocks of each pipeline stage, in order.

    The last stage's LM head counts as the blocks that it equals in FLOPs of its matrices, and the
    most loaded stage is as light as it can be: with a large vocabulary the last stage has fewer.

    Raises:
        ConfigError: fewer blocks than stages.
    """
    if model.num_layers < stages:
        raise ConfigError(
            f"model.num_layers={model.num_layers} is less than the {stages} pipeline stages of "
            f"parallel.pipeline times parallel.virtual_stages: lower one of them"
        )
    kv_size = model.hidden_size // model.num_heads * model.num_kv_heads
    block = 2 * model.hidden_size + 2 * kv_size + 3 * model.intermediate_size
    loads = [0.0] * (stages - 1) + [model.vocab_size / block]
    counts = [1] * stages
    for _ in range(model.num_layers - stages):
        # Of equally loaded stages the first: it holds the embedding, which costs memory only, but
        # a later one would wait longer for its first micro batch.
        lightest = min(range(stages), key=lambda stage: loads[stage] + counts[stage])
        counts[lightest] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def padded_vocabulary(model: ModelConfig) -> int:
    """Rows of embedding and LM head: the vocabulary, rounded up to `model.vocab_multiple`.

    A property of the model and not of the layout, so that a checkpoint fits every layout.
    """
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def micro_batches(config: Config, layout: Layout) -> int:
    """Micro batches of one rank in an optimizer step."""
    trainer = config.trainer
    return trainer.global_batch_size // (trainer.micro_batch_size * layout.data)
