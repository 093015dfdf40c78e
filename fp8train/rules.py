"""The rules between configuration keys, and what `auto` stands for.

Nothing heavy is imported here either: `check` runs before any process group exists.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8train.config import (
    FORMATS,
    FP8_RECIPES,
    RECIPES,
    ROLES,
    Config,
    ConfigError,
    PrecisionConfig,
    written,
)
from fp8train.layout import Layout
from fp8train.layout_rules import check_divides, check_layout

EIGHT_BIT = {"e5m2", "e4m3"}  # wire formats of gradients that have scales
LARGEST_LOSS_SCALE = 2.0**126  # its reciprocal is the smallest normal of FP32
CHOICES = {
    "precision.recipe": ("bf16", "fp32", *RECIPES),
    "precision.backend": ("auto", "emulated", "torch", "transformer_engine"),
    "precision.format": (None, "hybrid", "e4m3"),
    "precision.amax_compute": ("max", "most_recent"),
    "precision.amax_groups": ("all", "te"),
    "precision.emulation": ("fast", "exact"),
    "precision.accumulate": ("fp32", "hopper"),
    "gradients.reduce": ("auto", "e5m2", "e4m3", "bf16", "fp32", "fp16"),
    "parameters.gather": ("bf16", "fp8"),
    "gradients.inside": ("auto", "bf16", "fp32", "fp16", "e5m2", "e4m3"),
    "gradients.scaling": ("block", "tensor", "none"),
    "gradients.rounding": ("nearest", "stochastic"),
    "gradients.residual": ("fp32", "bf16"),
    "gradients.algorithm": ("all_to_all", "ring"),
    "gradients.accumulate": ("unsharded", "sharded"),
    "parallel.pipeline_schedule": ("1f1b", "interleaved", "zero_bubble"),
    "parallel.activation_checkpoint": ("none", "selective", "full"),
    "optimizer.name": ("adamw",),
    "schedule.name": ("cosine", "constant"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.loss_scale.mode": ("auto", "none", "static", "dynamic"),
    "logging.wandb.mode": ("auto", "online", "offline", "disabled"),
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
    "checkpoint.keep_every": 0,
    "gradients.audit_every": 0,
    "logging.every": 1,
    "data.bpe_vocab_size": 257,
    "precision.margin": -16,
    "precision.bf16_first_blocks": 0,
    "precision.bf16_last_blocks": 0,
    "precision.telemetry.every": 0,
}
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
    resume = config.resume
    if resume not in ("none", "auto") and not (Path(resume) / "manifest.json").is_file():
        raise ConfigError(
            f"resume={resume}: choose one of none, auto, or a checkpoint's folder, which has a "
            f"manifest.json"
        )
    _check_precision(config)
    _check_model_and_data(config)
    _check_parallel(config)

    def fits(layout: Layout) -> bool:
        try:
            check_divides(config, layout)  # the batch can follow the layout
        except ConfigError:
            return False
        return True

    layout = Layout.of(config.parallel, world_size, fits, planned=config.dry_run)
    check_layout(config, layout)
    _check_optimizer(config)
    _check_loss_scale(config)
    _check_gradients(config, layout)
    _check_gather(config)


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
    _check_recipe_options(precision, precision.recipes())


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


def _check_gradients(config: Config, layout: Layout) -> None:
    gradients, types = config.gradients, wire_types(config, layout)
    eight_bit = {types.shard, types.replicate} & EIGHT_BIT
    for key, default in (("rounding", "nearest"), ("error_feedback", False), ("scaling", "block")):
        value = getattr(gradients, key)
        if value != default and not eight_bit:
            raise ConfigError(
                f"gradients.{key}={written(value)} is for eight bits, and gradients.reduce="
                f"{gradients.reduce} sends {types.replicate}: leave it out, or use "
                f"gradients.reduce=e5m2"
            )
    if layout.replicate == 1 and gradients.inside != "auto":
        raise ConfigError(
            f"gradients.inside={gradients.inside} is for replicas, and parallel.replicate=1: leave "
            f"it out, or use gradients.reduce"
        )
    ring = gradients.algorithm == "ring"
    if gradients.scaling == "none" and not ring:
        raise ConfigError(
            "gradients.scaling=none loses small gradients and is there to show it, with "
            "gradients.algorithm=ring alone: use block or tensor"
        )
    if ring:
        _check_ring(config, layout)
    _check_replicated(config, layout)
    if gradients.error_feedback and loss_scaling(config) == "dynamic":
        raise ConfigError(
            "gradients.error_feedback=true with a dynamic loss scale: what is kept for the next "
            "step would have another scale; use trainer.loss_scale.mode=none or static"
        )
    if gradients.accumulate == "sharded" and layout.pipeline > 1:
        raise ConfigError(
            f"gradients.accumulate=sharded does not run with parallel.pipeline={layout.pipeline}, "
            f"whose schedules reduce once a step: use unsharded"
        )


def _check_replicated(config: Config, layout: Layout) -> None:
    """Tensor ranks hold copies of norms. A scale for a whole message is that of other weights too,
    another on each rank, and E4M3 is so narrow that copies could then round differently."""
    gradients, types = config.gradients, wire_types(config, layout)
    one_scale = gradients.scaling == "tensor" or gradients.algorithm == "ring"
    if layout.tensor > 1 and "e4m3" in {types.shard, types.replicate} and one_scale:
        raise ConfigError(
            f"gradients.reduce=e4m3 with one scale a message and parallel.tensor={layout.tensor}: "
            f"copies of a norm's gradient could differ; use gradients.reduce=e5m2, or "
            f"gradients.scaling=block with gradients.algorithm=all_to_all"
        )


def _check_ring(config: Config, layout: Layout) -> None:
    """What a sum from rank to rank can't have."""
    gradients = config.gradients
    if layout.replicate > 1:
        raise ConfigError(
            f"gradients.algorithm=ring does not run with parallel.replicate={layout.replicate}: "
            f"use all_to_all, or parallel.replicate=1"
        )
    for key, value in (("rounding", "stochastic"), ("error_feedback", True)):
        if getattr(gradients, key) == value:
            raise ConfigError(
                f"gradients.{key}={written(value)} does not run with gradients.algorithm=ring, "
                f"which rounds at every rank: use all_to_all"
            )


def _check_gather(config: Config) -> None:
    """Weights that travel as bytes have one eight-bit copy."""
    precision = config.precision
    if config.parameters.gather == "bf16":
        return
    if precision.backend == "transformer_engine":
        raise ConfigError(
            "parameters.gather=fp8 does not run with precision.backend=transformer_engine, whose "
            "layers quantise by themselves: use precision.backend=emulated or torch"
        )
    able = ("fp8_delayed", "fp8_current", "fp8_block")
    use = f"use parameters.gather=bf16, or a precision of {', '.join(able)}"
    if precision.recipe not in FP8_RECIPES:
        raise ConfigError(
            f"parameters.gather=fp8: precision={precision.recipe} has no FP8 weights; {use}"
        )
    for recipe in sorted(precision.recipes() - {*able, "bf16"}):
        raise ConfigError(
            f"parameters.gather=fp8: {recipe} has no single eight-bit copy of a weight that serves "
            f"both GEMMs; {use}"
        )
    if "weight" in (precision.stochastic_rounding or []):
        raise ConfigError(
            f"parameters.gather=fp8 rounds weights to nearest, and precision.stochastic_rounding="
            f"{written(precision.stochastic_rounding)}: leave weight out, or {use}"
        )


class WireTypes(NamedTuple):
    """Formats of gradients on the wire, by the dimension of the layout."""

    shard: str
    replicate: str


def wire_types(config: Config, layout: Layout) -> WireTypes:
    """What `gradients.reduce` and `gradients.inside` stand for: the first is for the slowest
    network that the layout has, between replicas if there are any."""
    reduce, inside = gradient_reduction(config), config.gradients.inside
    if layout.replicate == 1:
        return WireTypes(reduce, reduce)
    if inside == "auto":
        inside = "bf16" if reduce in EIGHT_BIT else reduce
    return WireTypes(inside, reduce)


def sent_as(config: Config, layout: Layout) -> str:
    """The type in which a run's gradients travel, as `bf16 inside, e5m2 between` where a replica is
    divided, or none where no rank shares a parameter."""
    types, divided = wire_types(config, layout), layout.shard * layout.context > 1
    if layout.replicate == 1 and not divided:
        return "none"
    if not divided or types.shard == types.replicate:
        return types.replicate
    return f"{types.shard} inside, {types.replicate} between"


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
