"""The rules between configuration keys, and what `auto` stands for.

Nothing heavy is imported here either: `check` runs before any process group exists.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

from fp8train.config import (
    FORMATS,
    FP8_RECIPES,
    RECIPES,
    ROLES,
    Config,
    ConfigError,
    PrecisionConfig,
)
from fp8train.layout import Layout, micro_batches, padded_vocabulary

LARGEST_LOSS_SCALE = 2.0**126  # its reciprocal is the smallest normal of FP32
CHOICES = {
    "precision.recipe": ("bf16", "fp32", *RECIPES),
    "precision.backend": ("auto", "emulated", "torch", "transformer_engine"),
    "precision.format": (None, "hybrid", "e4m3"),
    "precision.amax_compute": ("max", "most_recent"),
    "precision.amax_groups": ("all", "te"),
    "precision.emulation": ("fast", "exact"),
    "precision.accumulate": ("fp32", "hopper"),
    "gradients.reduce": ("auto", "e5m2", "bf16", "fp32", "fp16"),
    "parallel.pipeline_schedule": ("1f1b", "interleaved", "zero_bubble"),
    "parallel.activation_checkpoint": ("none", "selective", "full"),
    "optimizer.name": ("adamw",),
    "schedule.name": ("cosine", "constant"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.loss_scale.mode": ("auto", "none", "static", "dynamic"),
    "logging.wandb.mode": ("auto", "online", "offline", "disabled"),
    "resume": ("none", "auto"),
}
AT_LEAST = {
    "trainer.steps": 1,
    "trainer.global_batch_size": 1,
    "trainer.micro_batch_size": 1,
    "trainer.sequence_length": 2,
    "trainer.validate_every": 0,
    "trainer.validation_samples": 1,
    "trainer.clip_grad_norm": 0,
    "trainer.loss_scale.value": 1,
    "trainer.loss_scale.growth_factor": 1,
    "trainer.loss_scale.growth_interval": 1,
    "trainer.loss_scale.minimum": 1,
    "trainer.seed": 0,
    "model.vocab_size": 2,
    "model.hidden_size": 1,
    "model.intermediate_size": 1,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.norm_eps": 0,
    "model.init_std": 0,
    "model.rope_theta": 1,
    "model.rope_scaling.factor": 1,
    "precision.amax_history_length": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.context": 1,
    "parallel.virtual_stages": 1,
    "model.vocab_multiple": 1,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "optimizer.weight_decay": 0,
    "schedule.warmup_steps": 0,
    "schedule.min_lr_ratio": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "logging.every": 1,
    "data.bpe_vocab_size": 257,
    "precision.margin": -16,
    "precision.bf16_first_blocks": 0,
    "precision.bf16_last_blocks": 0,
    "precision.telemetry.every": 0,
}
BLOCK_SIZES = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
TE_MULTIPLE = 16  # of the tokens that Transformer Engine's GEMMs get
AT_MOST = {
    "trainer.seed": 2**63 - 1,
    "trainer.loss_scale.value": LARGEST_LOSS_SCALE,
    "trainer.loss_scale.growth_factor": LARGEST_LOSS_SCALE,
    "optimizer.lr": 1e6,  # infinity is no learning rate
    "model.norm_eps": 1,
    "model.init_std": 1e38,
    "precision.margin": 32,  # beyond, a scale could underflow
    "precision.amax_history_length": 2**20,
    "schedule.min_lr_ratio": 1,
}


def get(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check(config: Config, world_size: int) -> None:
    """Hold the configuration to the rules between its groups.

    Args:
        world_size: number of processes of the run.
    Raises:
        ConfigError: naming the key, its value, and what would work.
    """
    for key, choices in CHOICES.items():
        value = get(config, key)
        if value not in choices:
            named = ", ".join("null" if choice is None else choice for choice in choices)
            raise ConfigError(f"{key}={value}: choose one of {named}")
    for key, least in AT_LEAST.items():
        value = get(config, key)
        if not value >= least:
            raise ConfigError(f"{key}={value}: must be at least {least}")
    for key, most in AT_MOST.items():
        value = get(config, key)
        if not value <= most:
            raise ConfigError(f"{key}={value}: must be at most {most}")
    if config.world_size is not None and config.world_size < 1:
        raise ConfigError(f"world_size={config.world_size}: must be at least 1")
    if config.world_size is not None and not config.dry_run:
        raise ConfigError(
            f"world_size={config.world_size} is for dry runs: add dry_run=true, or start as many "
            f"processes and leave it out"
        )
    _check_precision(config)
    _check_model_and_data(config)
    _check_parallel(config)

    def fits(layout: Layout) -> bool:
        try:
            _check_layout(config, layout)
        except ConfigError:
            return False
        return True

    _check_layout(config, Layout.of(config.parallel, world_size, fits))
    _check_optimizer(config)
    _check_loss_scale(config)


def _check_precision(config: Config) -> None:
    precision = config.precision
    for key, name in _formats_set(precision):
        if name not in FORMATS:
            raise ConfigError(f"{key}={name}: choose one of {', '.join(FORMATS)}")
    for role in precision.stochastic_rounding or []:
        if role not in ROLES:
            raise ConfigError(
                f"precision.stochastic_rounding={precision.stochastic_rounding}: {role} is no "
                f"role; there are {', '.join(ROLES)}"
            )
    for layers in precision.layer_recipes:
        if layers.recipe not in ("bf16", *RECIPES):
            raise ConfigError(
                f"precision.layer_recipes: {layers.recipe} for {layers.pattern} is no recipe; "
                f"choose one of bf16, {', '.join(RECIPES)}"
            )
    if precision.recipe == "fp32" and precision.layer_recipes:
        raise ConfigError(
            "precision.layer_recipes: precision=fp32 computes everything in FP32; use "
            "precision=bf16 for the layers that match no pattern, or leave it out"
        )
    _check_recipe_options(precision, recipes_used(precision))


def recipes_used(precision: PrecisionConfig) -> set[str]:
    """Recipes that some layer may have."""
    return {precision.recipe, *(layers.recipe for layers in precision.layer_recipes)}


def _check_recipe_options(precision: PrecisionConfig, used: set[str]) -> None:
    """Options that a recipe in use can't have."""
    on_blackwell = sorted(used & {"mxfp8", "nvfp4", "mxfp4"})
    if precision.accumulate == "hopper" and on_blackwell:
        raise ConfigError(
            f"precision.accumulate=hopper: Hopper has no {on_blackwell[0]}; use "
            f"precision.accumulate=fp32, or a recipe that it has, as precision=fp8_block"
        )
    fixed = "nvfp4" in used if precision.power_of_two_scales else bool(on_blackwell)
    if precision.power_of_two_scales is not None and fixed:
        raise ConfigError(
            f"precision.power_of_two_scales={str(precision.power_of_two_scales).lower()}: the "
            f"scales of {on_blackwell[-1]} are part of its format; set it to null"
        )
    four_bit = sorted(used & {"nvfp4", "mxfp4"})
    if precision.format is not None and four_bit:
        raise ConfigError(
            f"precision.format={precision.format}: {four_bit[0]} is E2M1; set it to null"
        )
    for key, name in _formats_set(precision):
        if four_bit and name not in ("e2m1", "bf16"):
            raise ConfigError(
                f"{key}={name}: {four_bit[0]}, which this run uses, has e2m1 and bf16 only, and "
                f"precision.formats holds for all of its layers; leave it out"
            )


def _formats_set(precision: PrecisionConfig) -> list[tuple[str, str]]:
    """The keys of `precision.formats` that are set, with their values."""
    found = []
    for item in fields(precision.formats):
        value = getattr(precision.formats, item.name)
        if is_dataclass(value):
            inner = [(f"{item.name}.{sub.name}", getattr(value, sub.name)) for sub in fields(value)]
        else:
            inner = [(item.name, value)]
        found += [
            (f"precision.formats.{name}", value) for name, value in inner if value is not None
        ]
    return found


def _check_model_and_data(config: Config) -> None:
    model, length = config.model, config.trainer.sequence_length
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads} does not divide model.hidden_size="
            f"{model.hidden_size}: choose a divisor"
        )
    if (model.hidden_size // model.num_heads) % 2:
        raise ConfigError(
            f"model.num_heads={model.num_heads} gives an odd head size of "
            f"{model.hidden_size // model.num_heads}: rotary embedding needs an even one"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads="
            f"{model.num_heads}: choose a divisor"
        )
    if length > model.max_sequence_length:
        raise ConfigError(
            f"trainer.sequence_length={length} is above model.max_sequence_length="
            f"{model.max_sequence_length}: lower the first or raise the second"
        )
    if not (config.data.name or config.data.path):
        raise ConfigError("data.path is not set: give data.path=FILE_OR_FOLDER or data.name=NAME")
    if not config.run.name:
        raise ConfigError("run.name is empty: give run.name=NAME")
    ids = {"bytes": 257, "bpe": config.data.bpe_vocab_size}.get(config.data.tokenizer, 0)
    if model.vocab_size < ids:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is below the {ids} ids of data.tokenizer="
            f"{config.data.tokenizer}: raise it, or use data.tokenizer=bytes (257 ids)"
        )
    if not 0 < config.data.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={config.data.validation_fraction}: must lie between 0 and 1"
        )


def _check_parallel(config: Config) -> None:
    """What needs no number of processes."""
    parallel = config.parallel
    if (
        parallel.activation_checkpoint != "none"
        and config.precision.backend == "transformer_engine"
        and config.precision.recipe in FP8_RECIPES
    ):
        # Recomputation has to enter TE's autocast again, which is not torch's checkpoint's to do.
        raise ConfigError(
            f"parallel.activation_checkpoint={parallel.activation_checkpoint} does not run with "
            f"precision.backend=transformer_engine: set it to none, or use "
            f"precision.backend=emulated"
        )
    if parallel.compile and config.precision.backend == "transformer_engine":
        raise ConfigError(
            "parallel.compile=true does not run with precision.backend=transformer_engine: "
            "use precision.backend=emulated or torch"
        )
    for name in ("replicate", "shard"):
        size = getattr(parallel, name)
        if size < 1 and size != -1:
            raise ConfigError(f"parallel.{name}={size}: must be at least 1, or -1 for the rest")


def _check_layout(config: Config, layout: Layout) -> None:
    """Whether the model, its recipes and the batch can be divided in this way."""
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
    _check_batch(config, layout.data)
    _check_micro_batches(config, layout)


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
    recipe, multiple = _largest_block(recipes_used(precision))
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
            use += ", or a recipe without blocks, as precision=fp8_current"
        raise ConfigError(
            f"parallel.tensor={tensor} leaves each rank {size // tensor} of {name} ({size}), and "
            f"{why}: {use}"
        )


def _sequence_multiples(config: Config, layout: Layout) -> list[tuple[int, str]]:
    """What a sequence's length must be a multiple of: (number, in words)."""
    precision, micro, context = config.precision, config.trainer.micro_batch_size, layout.context
    # mxfp4 has no blocks of tokens: it quantises weights alone.
    recipe, block = _largest_block({"bf16", *recipes_used(precision) & {*FP8_RECIPES}})
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
        fewer = max(size for size in _divisors(ranks) if size * virtual <= layers or size == 1)
        use = f"parallel.pipeline={fewer}"
        if fewer == 1 < virtual:
            use += " parallel.virtual_stages=1"
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


def _check_batch(config: Config, ranks: int) -> None:
    trainer = config.trainer
    step = trainer.micro_batch_size * ranks
    if trainer.global_batch_size % step:
        below = trainer.global_batch_size // step * step
        options = [str(size) for size in (below, below + step) if size]
        raise ConfigError(
            f"trainer.global_batch_size={trainer.global_batch_size} is not divisible by "
            f"trainer.micro_batch_size={trainer.micro_batch_size} times {ranks} data-parallel "
            f"rank{'s' if ranks > 1 else ''}: use {' or '.join(options)}"
        )


def _check_micro_batches(config: Config, layout: Layout) -> None:
    """Micro batches enough to fill the pipeline, in a number that the schedule takes."""
    ranks, schedule = layout.pipeline, config.parallel.pipeline_schedule
    if ranks == 1:
        return
    trainer, count = config.trainer, micro_batches(config, layout)
    samples = trainer.global_batch_size // layout.data

    def takes(count: int) -> bool:
        # torch's schedules but 1F1B go in rounds of equally many micro batches.
        return count >= ranks and (schedule == "1f1b" or count % (count // ranks) == 0)

    if takes(count):
        return
    a_batch = trainer.micro_batch_size * layout.data
    smaller = [
        size
        for size in _divisors(samples)
        if size < trainer.micro_batch_size and takes(samples // size)
    ]
    instead = f", or trainer.micro_batch_size={max(smaller)}" if smaller else ""
    made = (
        f"trainer.global_batch_size={trainer.global_batch_size} makes {count} micro "
        f"batch{'es' if count > 1 else ''}"
    )
    if count < ranks:
        bubble = (ranks - 1) / (count + ranks - 1)
        raise ConfigError(
            f"{made} for parallel.pipeline={ranks}, whose ranks would idle {bubble:.0%} of the "
            f"time: use {ranks * a_batch} or more{instead}"
        )
    below = next(number for number in range(count, 0, -1) if takes(number))
    above = next(number for number in range(count, 2 * count + ranks) if takes(number))
    raise ConfigError(
        f"{made}, and parallel.pipeline_schedule={schedule} takes them in {count // ranks} equal "
        f"rounds of {ranks} or more: use {below * a_batch} or {above * a_batch}{instead}"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def warnings(config: Config, local_world_size: int) -> list[str]:
    """What runs, but slower than it could: a line each, for the log.

    Args:
        local_world_size: number of processes on this machine.
    """
    tensor = config.parallel.tensor
    if local_world_size % tensor == 0:
        return []
    machines = -(-tensor // local_world_size)
    spans = f"spans {machines} machines" if machines > 1 else "has groups that span 2 machines"
    return [
        f"parallel.tensor={tensor} {spans} of {local_world_size} processes: its collectives, two a "
        f"block and direction, then cross the slow network; use "
        f"{math.gcd(tensor, local_world_size)}, or another divisor of {local_world_size}"
    ]


def _check_optimizer(config: Config) -> None:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas={betas}: give two numbers in [0, 1)")


def _check_loss_scale(config: Config) -> None:
    settings = config.trainer.loss_scale
    if not 0 < settings.backoff_factor < 1:
        raise ConfigError(
            f"trainer.loss_scale.backoff_factor={settings.backoff_factor}: must lie between 0 and 1"
        )
    if settings.minimum > settings.value:
        raise ConfigError(
            f"trainer.loss_scale.minimum={settings.minimum} is above trainer.loss_scale.value="
            f"{settings.value}: lower the first or raise the second"
        )


def gradient_reduction(config: Config) -> str:
    """What `gradients.reduce=auto` stands for: e5m2 under an FP8 precision, fp32 otherwise."""
    if config.gradients.reduce != "auto":
        return config.gradients.reduce
    return "e5m2" if config.precision.recipe in FP8_RECIPES else "fp32"


def loss_scaling(config: Config) -> str:
    """What `trainer.loss_scale.mode=auto` stands for: dynamic with FP16 gradients, none otherwise.

    FP16 alone needs it: BF16 and FP32 have FP32's range, and E5M2 has a scale a block.
    """
    mode = config.trainer.loss_scale.mode
    if mode != "auto":
        return mode
    return "dynamic" if gradient_reduction(config) == "fp16" else "none"
