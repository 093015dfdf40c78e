"""Bytes that one rank holds, by what they are for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fp8train.config import Config
from fp8train.layout import Layout, micro_batches
from fp8train.planning.activations import Activations, total
from fp8train.planning.parameters import (
    ROOT,
    Weight,
    bytes_gathered,
    compute_bytes,
    fsdp_ranks,
    plans,
    rank_weights,
    stage_weights,
    units,
)
from fp8train.planning.pipeline import InFlight, actions, gathers, most_in_flight
from fp8train.rules import EIGHT_BIT, wire_types

FP32 = 4  # bytes
GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """What one rank holds, in bytes but for the counts of parameters.

    Every part is at its largest, though they aren't at the same time: the sum is an upper bound of
    what these parts take. It leaves out operands and results of the operator that runs, buffers of
    collectives, and what the allocator and the GPU's libraries hold.

    Attributes:
        parameters: elements on this rank, divided over pipeline and tensor ranks.
        sharded_parameters: elements after FSDP divided them too.
        masters: FP32 shards.
        optimizer: AdamW's two moments, FP32 shards.
        gradients: FP32 shards; with their sum where they are added up sharded.
        unsharded_gradients: before they are reduced.
        residuals: what error feedback keeps, of the last step and of this one.
        weights: gathered, in the type of computation or as bytes; and the bytes of the own shard,
            which are kept for a step.
        quantized_weights: copies that are held from forward to backward.
        activations: what backward needs, of all micro batches in flight.
        in_flight: most micro batches that the rank has activations of, over its stages.
    """

    parameters: int
    sharded_parameters: int
    masters: int
    optimizer: int
    gradients: int
    unsharded_gradients: int
    residuals: int
    weights: int
    quantized_weights: int
    activations: int
    in_flight: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        counts = ("parameters", "sharded_parameters", "in_flight")
        return sum(size for name, size in asdict(self).items() if name not in counts)


def memory(config: Config, layout: Layout, pipeline_coordinate: int) -> Memory:
    """What a rank of a pipeline coordinate holds; the first of its FSDP group, if they differ."""
    weights = rank_weights(config.model, layout, pipeline_coordinate)
    count = sum(weight.size for weight in weights)
    shard = sum(weight.shard(fsdp_ranks(layout)) for weight in weights)
    activations, quantized, in_flight = _in_flight(config, layout, pipeline_coordinate)
    sizes = {unit: sum(part.size for part in parts) for unit, parts in units(weights).items()}
    return Memory(
        parameters=count,
        sharded_parameters=shard,
        masters=FP32 * shard,
        optimizer=2 * FP32 * shard,
        gradients=FP32 * shard * (2 if _accumulates_sharded(config, layout) else 1),
        unsharded_gradients=_unsharded_gradients(config, layout, sizes),
        residuals=_residuals(config, layout, weights),
        weights=_gathered(config, layout, pipeline_coordinate, weights),
        quantized_weights=quantized,
        activations=activations,
        in_flight=in_flight,
    )


def _gathered(config: Config, layout: Layout, pipeline: int, weights: list[Weight]) -> int:
    """Most bytes of weights that are gathered at a time, and the bytes of this rank's shard.

    Without a pipeline FSDP2 frees a block after its forward and keeps the root's until backward;
    while a block runs, the next one is gathered; or all of them stay for the step. A pipeline's
    stages stay gathered as `gathers` says, which is for the whole step with up to three on a rank.
    """
    ranks, width = fsdp_ranks(layout), compute_bytes(config)
    as_bytes = bytes_gathered(config, ranks)

    def size(parts: list[Weight]) -> int:
        return sum(part.size * (1 if part.name in as_bytes else width) for part in parts)

    kept = sum(weight.shard(ranks) for weight in weights if weight.name in as_bytes)
    if layout.pipeline == 1:
        if not config.parameters.reshard_after_forward:
            return kept + size(weights)
        by_unit = {unit: size(parts) for unit, parts in units(weights).items()}
        blocks = sorted(each for unit, each in by_unit.items() if unit != ROOT)
        return kept + by_unit[ROOT] + sum(blocks[-2:])
    stages = layout.stages_of(pipeline)
    of_stage = {stage: size(stage_weights(config.model, layout, stage)) for stage in stages}
    schedule, rounds = config.parallel.pipeline_schedule, micro_batches(config, layout)
    held = most = 0
    for begins, stage in gathers(layout, schedule, rounds, pipeline):
        held += of_stage[stage] if begins else -of_stage[stage]
        most = max(most, held)
    return kept + most


def _unsharded_gradients(config: Config, layout: Layout, sizes: dict[str, int]) -> int:
    """Bytes of gradients before they are reduced.

    One unit's at a time, as backward makes them and in FP32 for the reduction; and with more than
    one micro batch the sum of all units over the micro batches, unsharded in FP32, unless each is
    reduced.
    """
    at_work = (compute_bytes(config) + FP32) * max(sizes.values())
    one = micro_batches(config, layout) == 1 and layout.pipeline == 1
    if one or _accumulates_sharded(config, layout):
        return at_work
    return FP32 * sum(sizes.values()) + at_work


def _accumulates_sharded(config: Config, layout: Layout) -> bool:
    return config.gradients.accumulate == "sharded" and micro_batches(config, layout) > 1


def _residuals(config: Config, layout: Layout, weights: list[Weight]) -> int:
    """Bytes of what eight-bit casts of a unit's gradients lose, by stage of the reduction."""
    gradients, types, ranks = config.gradients, wire_types(config, layout), fsdp_ranks(layout)
    if not gradients.error_feedback:
        return 0
    elements = 0
    for parts in units(weights).values():
        shard = sum(weight.shard(ranks) for weight in parts)
        part = -(-shard // layout.replicate)
        if types.shard in EIGHT_BIT and ranks > 1:
            elements += shard * ranks
        if types.replicate in EIGHT_BIT and layout.replicate > 1:
            elements += part * layout.replicate + part  # what is sent, and the mean
    return 2 * elements * {"fp32": 4, "bf16": 2}[gradients.residual]


def _in_flight(config: Config, layout: Layout, pipeline: int) -> tuple[int, int, int]:
    """Bytes of activations and of quantised weights, and micro batches, at most at a time."""
    counts = Activations(config, layout, plans(config))
    recomputes = config.parallel.activation_checkpoint != "none"
    cached = config.precision.cache_weights
    stages = layout.stages_of(pipeline)
    blocks = [number for stage in stages for number in counts.stage_blocks(stage)]
    copies = {number: total(counts.weight_copies(number)) for number in blocks}
    activations, weights, wgrads = {}, {}, {}
    for stage in stages:
        numbers = counts.stage_blocks(stage)
        activations[stage] = total(counts.ends(stage)) + sum(
            total(counts.kept_of_block(number)) for number in numbers
        )
        held = not (cached or recomputes)
        weights[stage] = sum(copies[number] for number in numbers) if held else 0
        wgrads[stage] = sum(total(counts.wgrad_operands(number)) for number in numbers)
        if stage == layout.stages - 1:
            wgrads[stage] += total(counts.head_wgrad_operands())

    def kept(flight: InFlight) -> int:
        return sum(n * activations[stage] for stage, n in flight.activations.items()) + sum(
            n * wgrads[stage] for stage, n in flight.wgrads.items()
        )

    def copied(flight: InFlight) -> int:
        return sum(n * weights[stage] for stage, n in flight.activations.items())

    order = actions(layout, config.parallel.pipeline_schedule, micro_batches(config, layout))
    most = most_in_flight(order[pipeline], lambda flight: kept(flight) + copied(flight))
    activation_bytes, weight_bytes = kept(most), copied(most)
    if recomputes:  # the block whose backward runs has everything again
        activation_bytes += max(total(counts.block(number)) for number in blocks)
        weight_bytes += 0 if cached else max(copies.values())
    if cached:
        weight_bytes += sum(total(counts.cached_weights(number)) for number in blocks)
    return activation_bytes, weight_bytes, sum(most.activations.values())
