"""What one rank sends in an optimizer step, collective by collective.

Bytes are those that leave a rank in a ring, which no algorithm on N ranks beats: (N − 1)/N of the
whole tensor for an all-gather, a reduce-scatter or an all-to-all, twice that for an all-reduce.
Scalars of the step itself, such as loss and gradient norm, are left out, and so is validation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from fp8train.config import Config
from fp8train.layout import Layout, micro_batches
from fp8train.planning.activations import INPUTS, Activations, quantized
from fp8train.planning.parameters import (
    ROOT,
    ROW_PARALLEL,
    Weight,
    bytes_gathered,
    compute_bytes,
    fsdp_ranks,
    linear_shapes,
    plans,
    rank_weights,
    stage_weights,
    units,
)
from fp8train.planning.pipeline import Gather, gathers
from fp8train.precision.plan import LayerPlan
from fp8train.precision.recipes import ROLES, DelayedScaling, NVFP4Scaling
from fp8train.precision.tensor import TENSOR
from fp8train.precision.wire import codec
from fp8train.rules import EIGHT_BIT, wire_types

RING = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}  # · (N − 1)/N
NAMES = {"self_attn": "attention", "mlp": "MLP"}  # of a block's branches


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind.

    Attributes:
        group: the dimension of the layout whose ranks take part.
        what: is sent.
        collective: all-gather, reduce-scatter, all-reduce, all-to-all or send.
        dtype: of the elements on the wire.
        count: in a step.
        bytes: that a rank sends in a step, all of them together.
    """

    group: str
    what: str
    collective: str
    dtype: str
    count: int
    bytes: int


class Message(NamedTuple):
    """The whole of what a collective moves: its type, and its bytes."""

    dtype: str
    size: int


class _Step:
    """Collects the traffic of a step."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sent: Counter[tuple[str, str, str, str]] = Counter()
        self.count: Counter[tuple[str, str, str, str]] = Counter()

    def add(
        self, dimensions: tuple[str, ...], what: str, collective: str, message: Message, count: int
    ) -> None:
        """So many collectives over the ranks of some dimensions; none where they are one rank."""
        dimensions = tuple(name for name in dimensions if getattr(self.layout, name) > 1)
        ranks = 1
        for name in dimensions:
            ranks *= getattr(self.layout, name)
        if ranks == 1 or count == 0:
            return
        key = " × ".join(dimensions), what, collective, message.dtype
        if collective == "send":
            bytes_sent = message.size
        else:
            bytes_sent = RING[collective] * message.size * (ranks - 1) // ranks
        self.count[key] += count
        self.sent[key] += count * bytes_sent

    def rows(self) -> list[Traffic]:
        return [Traffic(*key, count, self.sent[key]) for key, count in self.count.items()]


def communication(config: Config, layout: Layout, pipeline_coordinate: int) -> list[Traffic]:
    """What a rank of a pipeline coordinate sends in a step, by group and kind."""
    step = _Step(layout)
    counts = Activations(config, layout, plans(config))
    rounds = micro_batches(config, layout)
    stages = layout.stages_of(pipeline_coordinate)
    for stage in stages:
        _ends(step, counts, stage, rounds)
        for number in counts.stage_blocks(stage):
            _block_tensor(step, counts, number, rounds)
            _block_context(step, counts, rounds)
            _block_amax(step, counts, number, rounds)
    weights = rank_weights(config.model, layout, pipeline_coordinate)
    if layout.sequence:
        # A norm sees some of the tokens on each tensor rank; summed once, when FSDP reduces.
        for weight in weights:
            if not weight.divided:
                message = Message("fp32", 4 * weight.size)
                step.add(("tensor",), "norm gradients", "all-reduce", message, 1)
    _pipeline(step, counts, stages, rounds)
    _tied(step, config, weights)
    for stage in stages:
        _fsdp(step, config, stage, rounds)
    _weight_amaxes(step, config, weights)
    _delayed(step, counts, stages)
    return step.rows()


def _hidden(counts: Activations, rows: int) -> Message:
    """Hidden states of so many tokens, in the type of computation."""
    name = "fp32" if counts.bits == 32 else "bf16"
    return Message(name, rows * counts.config.model.hidden_size * counts.bits // 8)


def _input(counts: Activations, layer: LayerPlan | None, copy: int) -> dict[str, Message]:
    """What is gathered of a branch's input: a quantised copy and its scales, or it itself."""
    fmt = layer.recipe.formats.input[copy] if layer else None
    if layer is None or fmt is None:
        return {"input": _hidden(counts, counts.rows)}
    shape = counts.rows, counts.config.model.hidden_size
    granularity = layer.recipe.granularity("input")[copy]
    payload, scales = quantized("input", shape, fmt, granularity)
    messages = {"input": Message(fmt.name.lower(), payload.size)}
    if granularity.rows is not None:  # else every rank has the scales of all tokens
        messages["input scales"] = Message("fp32", scales.size)
    return messages


def _block_tensor(step: _Step, counts: Activations, number: int, rounds: int) -> None:
    """Megatron's collectives around a block's linears (Shoeybi et al. 2019, section 3; Korthikanti
    et al. 2022, section 4.2).

    Checkpointing runs them again up to the last tensor that backward needs: the input of
    down_proj, before what it gives is summed.
    """
    group, whole = ("tensor",), _hidden(counts, counts.rows)
    recomputes = counts.config.parallel.activation_checkpoint != "none"
    for branch, part in NAMES.items():
        again = recomputes and branch == "self_attn"
        if not counts.layout.sequence:
            step.add(group, f"{part} output", "all-reduce", whole, rounds)
            step.add(group, f"{part} output, recomputed", "all-reduce", whole, rounds * again)
            step.add(group, f"{part} input gradient", "all-reduce", whole, rounds)
            continue
        gathered = counts.gathered_as(number, branch)
        for what, message in _input(counts, gathered, 0).items():
            step.add(group, f"{part} {what}", "all-gather", message, rounds)
            what = f"{part} {what}, recomputed"
            step.add(group, what, "all-gather", message, rounds * recomputes)
        if gathered is not None:
            for what, message in _input(counts, gathered, 1).items():
                step.add(group, f"{part} {what}, for wgrad", "all-gather", message, rounds)
        step.add(group, f"{part} output", "reduce-scatter", whole, rounds)
        step.add(group, f"{part} output, recomputed", "reduce-scatter", whole, rounds * again)
        step.add(group, f"{part} output gradient", "all-gather", whole, rounds)
        step.add(group, f"{part} input gradient", "reduce-scatter", whole, rounds)


def _block_context(step: _Step, counts: Activations, rounds: int) -> None:
    """Keys and values of the whole sequence, and their gradients back to its owners."""
    layout, group = counts.layout, ("context",)
    keys = linear_shapes(counts.config.model, layout)["self_attn.k_proj"][0]
    size = 2 * counts.rows * layout.context * keys * counts.bits // 8
    message = Message(_hidden(counts, 1).dtype, size)
    again = counts.config.parallel.activation_checkpoint != "none"
    step.add(group, "keys and values", "all-gather", message, rounds)
    step.add(group, "keys and values, recomputed", "all-gather", message, rounds * again)
    step.add(group, "their gradients", "all-to-all", message, rounds)


def _ends(step: _Step, counts: Activations, stage: int, rounds: int) -> None:
    """Vocabulary-parallel embedding, head and cross entropy: of that, each token's largest logit,
    then the sum of its exponentials and the target's logit."""
    layout, group = counts.layout, ("tensor",)
    whole = _hidden(counts, counts.rows)
    collective = "reduce-scatter" if layout.sequence else "all-reduce"
    if stage == 0:
        step.add(group, "embedding", collective, whole, rounds)
        if layout.sequence:
            step.add(group, "embedding gradient", "all-gather", whole, rounds)
    if stage == layout.stages - 1:
        if layout.sequence:
            step.add(group, "head input", "all-gather", whole, rounds)
        step.add(group, "head input gradient", collective, whole, rounds)
        for numbers in (1, 2):
            message = Message("fp32", 4 * numbers * counts.rows)
            step.add(group, "cross entropy", "all-reduce", message, rounds)


def _pipeline(step: _Step, counts: Activations, stages: list[int], rounds: int) -> None:
    """Hidden states to the next stage, their gradients to the one before."""
    last = counts.layout.stages - 1
    message = _hidden(counts, counts.residual_rows)
    forward = rounds * sum(stage != last for stage in stages)
    backward = rounds * sum(stage != 0 for stage in stages)
    step.add(("pipeline",), "hidden states", "send", message, forward)
    step.add(("pipeline",), "their gradients", "send", message, backward)


def _tied(step: _Step, config: Config, weights: list[Weight]) -> None:
    """The gradient of a tied embedding, between the two stages that have a copy."""
    if config.model.tie_embeddings and step.layout.pipeline > 1:
        for weight in weights:
            if weight.name in ("embed_tokens", "lm_head"):
                message = Message("fp32", 4 * weight.shard(fsdp_ranks(step.layout)))
                step.add(("pipeline",), "tied embedding's gradient", "send", message, 1)


def _fsdp(step: _Step, config: Config, stage: int, rounds: int) -> None:
    """Weights gathered in the type of computation, gradients reduced in their wire formats.

    Without a pipeline a block is gathered for each forward and again for its backward, the root
    once for both, or all once a step; of a pipeline as `gathers` says.
    """
    layout, width, schedule = step.layout, compute_bytes(config), config.parallel.pipeline_schedule
    place = stage % layout.pipeline
    gathered = gathers(layout, schedule, rounds, place).count(Gather(True, stage))
    ranks, group = fsdp_ranks(layout), ("shard", "context")
    dtype = "fp32" if width == 4 else "bf16"
    reductions = rounds if config.gradients.accumulate == "sharded" else 1
    for unit, parts in units(stage_weights(config.model, layout, stage)).items():
        shard = sum(weight.shard(ranks) for weight in parts)
        each = rounds * (1 if unit == ROOT else 2)
        once = layout.pipeline > 1 or not config.parameters.reshard_after_forward
        times = gathered if once else each
        as_bytes = sum(w.shard(ranks) for w in parts if w.name in bytes_gathered(config, ranks))
        size = width * (shard - as_bytes) + as_bytes
        types = f"{dtype} + fp8" if as_bytes else dtype
        step.add(group, "weights", "all-gather", Message(types, size * ranks), times)
        _reduction(step, config, shard, reductions)


def _weight_amaxes(step: _Step, config: Config, weights: list[Weight]) -> None:
    """Of weights that are gathered as bytes: all blocks' amaxes together, before the first gather;
    a tensor's one amax over the tensor ranks too."""
    names, all_plans = bytes_gathered(config, fsdp_ranks(step.layout)), plans(config)
    owners = tensor_ranks = 0
    for weight in weights:
        if weight.name in names:
            recipe = all_plans[weight.name].recipe
            granularity = recipe.granularity("weight")[0]
            rows, columns = granularity.grid(weight.rows, weight.columns)
            owners += rows * columns
            delayed = isinstance(recipe, DelayedScaling)
            shared = granularity.is_whole and config.precision.amax_groups == "all"
            tensor_ranks += int(shared and not delayed)
    for group, count in ((("shard", "context"), owners), (("tensor",), tensor_ranks)):
        message = Message("fp32", 4 * count)
        step.add(group, "amax of gathered weights", "all-reduce", message, int(count > 0))


def _reduction(step: _Step, config: Config, shard: int, times: int) -> None:
    """A unit's gradients, by `parallel.reduction`.

    Args:
        shard: elements that a rank owns.
    """
    layout, gradients, group = step.layout, config.gradients, ("shard", "context")
    ranks, copies, types = fsdp_ranks(layout), layout.replicate, wire_types(config, layout)
    if gradients.algorithm == "ring":
        message = Message(types.shard, codec(types.shard, "none").width(shard))
        step.add(group, "gradients", "send", message, times * (ranks - 1))
        if types.shard in EIGHT_BIT and gradients.scaling != "none":
            step.add(group, "gradients' amax", "all-reduce", Message("fp32", 4), times)
        return
    width = codec(types.shard, gradients.scaling).width(shard)
    step.add(group, "gradients", "all-to-all", Message(types.shard, width * ranks), times)
    part = -(-shard // copies)
    width = codec(types.replicate, gradients.scaling).width(part)
    message = Message(types.replicate, width * copies)
    step.add(("replicate",), "gradients", "all-to-all", message, times)
    step.add(("replicate",), "mean gradients", "all-gather", message, times)


def _block_amax(step: _Step, counts: Activations, number: int, rounds: int) -> None:
    """Amaxes of blocks that lie on several ranks: of a whole tensor, a row or a column of it."""
    config = counts.config
    forward = rounds * (2 if config.parallel.activation_checkpoint != "none" else 1)
    weight_rounds = 1 if config.precision.cache_weights else forward
    as_bytes = bytes_gathered(config, fsdp_ranks(counts.layout))
    times = {"input": forward, "weight": weight_rounds, "grad_output": rounds}
    branches = {name: branch for branch, names in INPUTS.items() for name in names}
    for name, (_, columns) in linear_shapes(config.model, counts.layout).items():
        layer = counts.plans.get(f"layers.{number}.{name}")
        if layer is None or isinstance(layer.recipe, DelayedScaling):
            continue
        branch = branches.get(name)
        gathered = branch is not None and counts.gathered_as(number, branch) is not None
        if layer.recipe.smooth:
            message = Message("fp32", 4 * columns)
            step.add(("context",), "amax of channels", "all-reduce", message, times["input"])
        for role in ROLES:
            if role == "input" and gathered and name != INPUTS[branch or ""][0]:
                continue  # the first one has quantised it for all
            if role == "weight" and f"layers.{number}.{name}" in as_bytes:
                continue  # its owners have
            for copy in (0,) if layer.recipe.shares_copies(role) else (0, 1):
                if layer.recipe.formats.of(role)[copy] is not None:
                    dimensions, blocks = _amax(counts, layer, name, role, copy, gathered)
                    what = f"amax of {role}s".replace("_", " ")
                    message = Message("fp32", 4 * blocks)
                    step.add(dimensions, what, "all-reduce", message, times[role])


def _amax(
    counts: Activations, layer: LayerPlan, name: str, role: str, copy: int, gathered: bool
) -> tuple[tuple[str, ...], int]:
    """The dimensions over whose ranks the blocks of a copy lie, and how many blocks.

    Args:
        gathered: the input is quantised in parts, before it is gathered.
    """
    recipe = layer.recipe
    granularity = recipe.granularity(role)[copy]
    if isinstance(recipe, NVFP4Scaling):
        granularity = TENSOR  # of its second level of scales
    outputs, inputs = linear_shapes(counts.config.model, counts.layout)[name]
    by_rows: tuple[str, ...] = ("context",)
    by_columns: tuple[str, ...] = ()
    rows, columns = counts.rows, inputs if role == "input" else outputs
    row_parallel = name in ROW_PARALLEL
    if role == "weight":
        rows, columns = outputs, inputs
        by_rows, by_columns = ((), ("tensor",)) if row_parallel else (("tensor",), ())
    elif role == "input" and gathered:
        rows, by_rows = counts.residual_rows, ("context", "tensor")
    elif row_parallel == (role == "input"):
        by_columns = ("tensor",)
    if counts.config.precision.amax_groups == "te":  # as `parallel.tensor.splits`
        by_rows, by_columns = ("tensor",) if role == "input" and gathered else (), ()
    sharing = (by_rows if granularity.rows is None else ()) + (
        by_columns if granularity.columns is None else ()
    )
    blocks = granularity.grid(rows, columns)
    return sharing, blocks[0] * blocks[1]


def _delayed(step: _Step, counts: Activations, stages: list[int]) -> None:
    """Delayed scaling's one maximum a step, over all ranks with pieces of the same blocks."""
    names = {f"layers.{n}." for stage in stages for n in counts.stage_blocks(stage)}
    if counts.layout.stages - 1 in stages:
        names.add("lm_head")
    histories = 0
    for name, layer in counts.plans.items():
        if isinstance(layer.recipe, DelayedScaling) and name.startswith(tuple(names)):
            for role in ROLES:
                formats = layer.recipe.formats.of(role)
                kept = formats[:1] if layer.recipe.shares_copies(role) else formats
                histories += sum(fmt is not None for fmt in kept)
    group = ("replicate", "shard", "context", "tensor")
    message = Message("fp32", 4 * histories)
    step.add(group, "amax histories", "all-reduce", message, int(histories > 0))
