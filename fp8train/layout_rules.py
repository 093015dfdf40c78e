"""What a layout asks of model, recipes and batch: equal parts, whole blocks, full pipelines."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import replace

from fp8train.config import FP8_RECIPES, Config, ConfigError
from fp8train.layout import Layout, micro_batches, padded_vocabulary

BLOCK_SIZES = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
LARGEST_RING = 8  # ranks that sum gradients in the wire format without a warning
TE_MULTIPLE = 16  # of the tokens that Transformer Engine's GEMMs get


def check_layout(config: Config, layout: Layout) -> None:
    """Whether the model, its recipes and the batch can be divided in this way.

    Raises:
        ConfigError: naming the key, its value, and what would work.
    """
    check_divides(config, layout)
    _check_batch(config, layout)


def check_divides(config: Config, layout: Layout) -> None:
    """Whether the model and its recipes can, whatever the batch.

    Raises:
        ConfigError: as `check_layout`.
    """
    if config.precision.backend == "transformer_engine":
        for name in ("tensor", "context"):
            if (size := getattr(layout, name)) > 1:
                raise ConfigError(
                    f"precision.backend=transformer_engine does not run with parallel.{name}="
                    f"{size}: its layers would scale each rank's part by itself; use "
                    f"precision.backend=torch or emulated, or parallel.{name}=1"
                )
    _check_tensor(config, layout.tensor)
    _check_sequence(config, layout)
    _check_pipeline(config, layout)


def _largest_block(recipes: set[str]) -> tuple[str, int]:
    """The recipe with the largest block of scales, and its size; 1 without blocks."""
    name = max(sorted(recipes), key=lambda name: BLOCK_SIZES.get(name, 1))
    return name, BLOCK_SIZES.get(name, 1)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _tensor_parts(config: Config) -> list[tuple[str, int, int, str]]:
    """What the tensor ranks divide: (name, size, multiple that a part must be, why)."""
    model, precision = config.model, config.precision
    # A scale's block must not straddle ranks: its values would be on two of them.
    recipe, multiple = _largest_block(precision.recipes())
    why = f"blocks of {multiple} in {recipe} must not straddle ranks"
    keys = model.hidden_size // model.num_heads * model.num_kv_heads
    vocabulary = []
    if _matches("lm_head", precision.include) and not _matches("lm_head", precision.exclude):
        vocabulary = [("the padded vocabulary", padded_vocabulary(model), multiple, why)]
    return [
        ("model.num_heads", model.num_heads, 1, ""),
        ("model.num_kv_heads", model.num_kv_heads, 1, ""),
        ("model.vocab_multiple", model.vocab_multiple, 1, ""),
        ("model.intermediate_size", model.intermediate_size, multiple, why),
        ("model.hidden_size", model.hidden_size, multiple, why),
        ("model.num_kv_heads times the head size", keys, multiple, why),
        *vocabulary,
    ]


def _check_tensor(config: Config, tensor: int) -> None:
    """Tensor ranks have equal parts, of whole heads and whole blocks."""
    if tensor == 1:
        return
    parts = _tensor_parts(config)

    def fits(ranks: int, size: int, multiple: int) -> bool:
        return ranks == 1 or size % (ranks * multiple) == 0

    fewer = max(
        ranks
        for ranks in _divisors(tensor)
        if all(fits(ranks, size, multiple) for _, size, multiple, _ in parts)
    )
    for name, size, multiple, why in parts:
        if fits(tensor, size, multiple):
            continue
        use = f"use parallel.tensor={fewer}"
        if name == "model.vocab_multiple":
            use += f" or model.vocab_multiple={math.lcm(size, tensor)}"
        if size % tensor:
            raise ConfigError(f"{name}={size} is not divisible by parallel.tensor={tensor}: {use}")
        if "block" in why:
            use += f", or {_without_blocks(config)}"
        raise ConfigError(
            f"parallel.tensor={tensor} leaves each rank {size // tensor} of {name} ({size}), and "
            f"{why}: {use}"
        )


def _without_blocks(config: Config) -> str:
    """How to have no recipe with blocks of scales."""
    if any(layers.recipe in BLOCK_SIZES for layers in config.precision.layer_recipes):
        return "no recipe with blocks in precision and precision.layer_recipes, as fp8_current"
    return "a recipe without blocks, as precision=fp8_current"


def _sequence_multiples(config: Config, layout: Layout) -> list[tuple[int, str]]:
    """What a sequence's length must be a multiple of: (number, in words)."""
    precision, micro, context = config.precision, config.trainer.micro_batch_size, layout.context
    # mxfp4 has no blocks of tokens: it quantises weights alone.
    recipe, block = _largest_block({"bf16", *precision.recipes() & {*FP8_RECIPES}})
    found = []
    if context > 1:  # a rank has two chunks of a sequence, apart from each other
        chunks, whole = 2 * context, 2 * context * block
        found.append((chunks, f"2 · parallel.context={chunks}"))
        found.append(
            (
                whole,
                f"2 · parallel.context · {block}={whole}: blocks of {block} in {recipe} must not "
                f"straddle ranks",
            )
        )
    if layout.sequence:
        parts = layout.tensor * context
        by = "parallel.tensor · parallel.context" if context > 1 else "parallel.tensor"
        found.append((parts, f"{by}={parts}, over which parallel.sequence=true divides it"))
    if precision.backend == "transformer_engine":
        rows = 32 if precision.recipe == "mxfp8" else TE_MULTIPLE
        each = rows // math.gcd(micro, rows)
        found.append(
            (
                each,
                f"{each}: precision.backend=transformer_engine needs a multiple of {rows} tokens "
                f"a micro batch, and trainer.micro_batch_size={micro}",
            )
        )
    return found


def _check_sequence(config: Config, layout: Layout) -> None:
    """Context and tensor ranks have equal parts of a sequence, and of whole blocks."""
    length = config.trainer.sequence_length

    def failing(layout: Layout) -> list[str]:
        return [why for number, why in _sequence_multiples(config, layout) if length % number]

    if not (reasons := failing(layout)):
        return
    every = math.lcm(*(number for number, _ in _sequence_multiples(config, layout)))
    below = length // every * every
    lengths = [size for size in (below, below + every) if size]
    options = [str(size) for size in lengths if size <= config.model.max_sequence_length]
    fewer = [
        ranks
        for ranks in _divisors(layout.context)[:-1]
        if not failing(replace(layout, context=ranks))
    ]
    if fewer:
        options.append(f"parallel.context={fewer[-1]}")
    if layout.sequence and not failing(replace(layout, sequence=False)):
        options.append("parallel.sequence=false")
    use = " or ".join(options) or f"{every} and raise model.max_sequence_length"
    raise ConfigError(
        f"trainer.sequence_length={length} is not a multiple of {reasons[0]}: use {use}"
    )


def _check_pipeline(config: Config, layout: Layout) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    schedule, ranks, virtual = parallel.pipeline_schedule, layout.pipeline, layout.virtual_stages
    if ranks == 1:
        if virtual > 1:
            raise ConfigError(
                f"parallel.virtual_stages={virtual} needs parallel.pipeline above 1: set it to 1"
            )
        return
    if schedule == "1f1b" and virtual > 1:
        raise ConfigError(
            f"parallel.virtual_stages={virtual} with parallel.pipeline_schedule=1f1b, which has "
            f"one stage a rank: use interleaved or zero_bubble, or set it to 1"
        )
    if schedule == "interleaved" and virtual == 1:
        raise ConfigError(
            "parallel.virtual_stages=1 with parallel.pipeline_schedule=interleaved, which has more "
            "than one stage a rank: set it to 2 or more, or use 1f1b or zero_bubble"
        )
    if layers < layout.stages:
        least = 2 if schedule == "interleaved" else 1
        if layers >= ranks * least:
            use = f"parallel.virtual_stages={layers // ranks}"
        else:
            fewer = max(size for size in _divisors(ranks) if size * least <= layers or size == 1)
            use = f"parallel.pipeline={fewer}"
            if virtual > 1:
                use += (
                    f" parallel.virtual_stages={1 if fewer == 1 else min(virtual, layers // fewer)}"
                )
        stages = f"parallel.pipeline={ranks}"
        if virtual > 1:
            stages += f" times parallel.virtual_stages={virtual}"
        raise ConfigError(
            f"model.num_layers={layers} is less than the stages of {stages}: use {use}, or "
            f"{layout.stages} layers or more"
        )
    if config.precision.backend == "transformer_engine":
        raise ConfigError(
            f"precision.backend=transformer_engine does not run with parallel.pipeline={ranks}: "
            f"use precision.backend=torch or emulated"
        )
    if schedule == "zero_bubble" and parallel.compile:
        raise ConfigError(
            "parallel.compile=true with parallel.pipeline_schedule=zero_bubble: torch has no split "
            "backward of compiled blocks; set it to false, or use 1f1b or interleaved"
        )


def _takes(config: Config, layout: Layout, batch: int, micro: int) -> bool:
    """Whether a global batch makes whole micro batches, in a number that the pipeline takes."""
    count, rest = divmod(batch, micro * layout.data)
    if rest or layout.pipeline == 1:
        return rest == 0 and count > 0
    # torch's schedules but 1F1B go in rounds of equally many micro batches.
    rounds = count // layout.pipeline
    return rounds > 0 and (config.parallel.pipeline_schedule == "1f1b" or count % rounds == 0)


def _batches_that_work(config: Config, layout: Layout) -> str:
    """The nearest batch sizes that the layout takes, in words."""
    trainer = config.trainer
    batch, micro = trainer.global_batch_size, trainer.micro_batch_size
    step = micro * layout.data
    down = range(batch // step * step, 0, -step)
    up = range(batch // step * step + step, 2 * batch + 2 * step * layout.pipeline, step)
    sizes = [
        next((size for size in way if _takes(config, layout, size, micro)), 0) for way in (down, up)
    ]
    use = " or ".join(str(size) for size in sizes if size)
    smaller = [size for size in range(1, micro) if _takes(config, layout, batch, size)]
    return use + (f", or trainer.micro_batch_size={smaller[-1]}" if smaller else "")


def _check_batch(config: Config, layout: Layout) -> None:
    """Whole micro batches, and enough to fill the pipeline."""
    trainer = config.trainer
    batch, micro, ranks = trainer.global_batch_size, trainer.micro_batch_size, layout.data
    if _takes(config, layout, batch, micro):
        return
    use = _batches_that_work(config, layout)
    if batch % (micro * ranks):
        raise ConfigError(
            f"trainer.global_batch_size={batch} is not divisible by trainer.micro_batch_size="
            f"{micro} times {ranks} data-parallel rank{'s' if ranks > 1 else ''}: use {use}"
        )
    count, stages = micro_batches(config, layout), layout.pipeline
    made = f"trainer.global_batch_size={batch} makes {count} micro batch{'es' if count > 1 else ''}"
    schedule = config.parallel.pipeline_schedule
    if count >= stages:
        raise ConfigError(
            f"{made}, and parallel.pipeline_schedule={schedule} takes them in {count // stages} "
            f"equal rounds of {stages} or more: use {use}"
        )
    # The last rank waits for the first micro batch; W passes fill a gap of zero bubble's, so that
    # this is the least there. See planning/pipeline.py for the formulas.
    work = count * layout.virtual_stages * (3 if schedule == "zero_bubble" else 1)
    idle = (stages - 1) / (work + stages - 1)
    least = "at least " if schedule == "zero_bubble" else ""
    raise ConfigError(
        f"{made} for parallel.pipeline={stages}, whose ranks would idle {least}{idle:.0%} of the "
        f"time: use {use}"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def warnings(config: Config, layout: Layout, local_world_size: int | None) -> list[str]:
    """What runs, but slower or worse than it could: a line each, for the log.

    Args:
        local_world_size: number of processes on this machine; None where it is not known.
    """
    tensor, ranks, lines = layout.tensor, layout.shard * layout.context, []
    if local_world_size is not None and local_world_size % tensor:
        machines = -(-tensor // local_world_size)
        spans = f"spans {machines} machines" if machines > 1 else "has groups that span 2 machines"
        lines.append(
            f"parallel.tensor={tensor} {spans} of {local_world_size} processes: its collectives, "
            f"two a block and direction, then cross the slow network; use "
            f"{math.gcd(tensor, local_world_size)}, or another divisor of {local_world_size}"
        )
    if config.gradients.algorithm == "ring" and ranks > LARGEST_RING:
        lines.append(
            f"gradients.algorithm=ring over {ranks} ranks rounds {ranks} times: in E5M2 the mean "
            f"of random gradients is 13% off over 8 ranks, 23% over 32, 43% over 128; "
            f"gradients.algorithm=all_to_all is 5.3% off over any number"
        )
    return lines
