"""The typed schema of every configuration key, and the rules between them.

Nothing heavy is imported here, so that a wrong configuration is refused in the first second.
`Config` is registered in Hydra's ConfigStore (see `fp8train/cli.py`); after composition it is
rebuilt by `from_container` and checked by `check`, before any process group exists.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException


class ConfigError(Exception):
    """A mistake in what the user gave us. The message is one line: what, where, what to do."""


@dataclass
class RunConfig:
    name: str = "${model.name}-${precision.recipe}-s${trainer.seed}"
    dir: str = "outputs/${run.name}"
    experiment: str = "${model.name}"  # W&B group: the runs that are meant to be compared
    recipe: str | None = None  # NAME of +recipe=NAME; set from there
    overwrite: bool = False  # delete the run that is in run.dir and start anew


@dataclass
class LossScaleConfig:
    """Powers of two change nothing but the range of the gradients."""

    mode: str = "auto"  # auto (dynamic with fp16 gradients, else none) | none | static | dynamic
    value: float = 65536.0  # the static scale, or the first of a dynamic one
    growth_factor: float = 2.0  # dynamic: after growth_interval good steps in a row
    backoff_factor: float = 0.5  # dynamic: after a step whose gradients are not finite
    growth_interval: int = 2000  # steps
    minimum: float = 1.0  # dynamic: no back-off goes below


@dataclass
class TrainerConfig:
    steps: int = 100
    global_batch_size: int = 16  # samples an optimizer step, over all ranks
    micro_batch_size: int = 8  # samples a forward pass on one rank
    sequence_length: int = 128  # tokens a sample
    seed: int = 1234
    device: str = "auto"  # auto | cpu | cuda
    validate_every: int = 50  # steps; 0: at the start and the end only
    validation_samples: int = 64
    clip_grad_norm: float = 1.0  # 0: off
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)


@dataclass
class RopeScalingConfig:
    """Llama 3.1's frequency scaling; a factor of 1 leaves the frequencies alone."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass
class ModelConfig:
    name: str = MISSING
    vocab_size: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    max_sequence_length: int = 8192
    rope_theta: float = 500000.0
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02


@dataclass
class FpropFormatsConfig:
    input: str | None = None
    weight: str | None = None


@dataclass
class DgradFormatsConfig:
    grad_output: str | None = None
    weight: str | None = None


@dataclass
class WgradFormatsConfig:
    grad_output: str | None = None
    input: str | None = None


@dataclass
class FormatsConfig:
    """A format for each role, and one for each operand of each GEMM, which goes before it; null:
    that of `precision.format`."""

    input: str | None = None
    weight: str | None = None
    grad_output: str | None = None
    fprop: FpropFormatsConfig = field(default_factory=FpropFormatsConfig)
    dgrad: DgradFormatsConfig = field(default_factory=DgradFormatsConfig)
    wgrad: WgradFormatsConfig = field(default_factory=WgradFormatsConfig)


@dataclass
class TelemetryConfig:
    every: int = 50  # steps between samples, the first step included; 0: off


@dataclass
class LayerRecipeConfig:
    pattern: str = MISSING  # on module names
    recipe: str = MISSING


@dataclass
class PrecisionConfig:
    recipe: str = MISSING  # set by the chosen file of configs/precision; read-only
    backend: str = "auto"  # auto | emulated | torch | transformer_engine
    # How values and scales are formed; null: the recipe's own choice (docs/precision.md).
    format: str | None = None  # hybrid: E4M3 forward, E5M2 output gradients; e4m3: E4M3 throughout
    formats: FormatsConfig = field(default_factory=FormatsConfig)
    margin: int = 0  # scale = max·2^-margin / amax
    power_of_two_scales: bool | None = None
    stochastic_rounding: list[str] | None = None  # roles: input, weight, grad_output
    amax_history_length: int = 1024  # delayed scaling
    amax_compute: str = "max"  # delayed scaling: max | most_recent
    hadamard: bool = True  # nvfp4: random Hadamard transform of wgrad's operands
    # Which layers.
    include: list[str] = field(default_factory=lambda: ["layers.*"])  # patterns on module names
    exclude: list[str] = field(default_factory=list)
    bf16_first_blocks: int = 0  # so many blocks stay in BF16
    bf16_last_blocks: int = 0
    layer_recipes: list[LayerRecipeConfig] = field(default_factory=list)  # another for some layers
    # Outliers of SwiGLU, in the linear after it (*.down_proj).
    bf16_inputs: list[str] = field(default_factory=list)  # patterns of layers: input stays in BF16
    smooth_swiglu: bool = False  # channels are levelled before they are quantised
    # How it is computed.
    cache_weights: bool = False  # quantise weights once a step, not once a micro batch
    emulation: str = "fast"  # fast: BF16 GEMM where the CPU has one; exact: one rounding always
    accumulate: str = "fp32"  # emulated: fp32, or hopper for the sums of an H100's tensor cores
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


@dataclass
class GradientsConfig:
    reduce: str = "auto"  # auto (e5m2 under FP8, else fp32) | e5m2 | bf16 | fp32 | fp16


@dataclass
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    replicate: int = 1
    shard: int = -1  # -1: the rest of the ranks
    pipeline_schedule: str = "1f1b"
    activation_checkpoint: str = "none"  # none | selective | full: what backward recomputes


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass
class ScheduleConfig:
    name: str = "cosine"  # cosine | constant
    warmup_steps: int = 10
    min_lr_ratio: float = 0.1  # the last step's learning rate / lr


@dataclass
class DataConfig:
    name: str | None = "python-stdlib"  # python-stdlib, or a dataset of the Hugging Face hub
    path: str | None = None  # a text, jsonl or parquet file, or a folder of them; goes before name
    subset: str | None = None  # the hub dataset's configuration
    split: str = "train"
    text_field: str = "text"
    tokenizer: str = "bytes"  # bytes | bpe | a tokenizer.json or its folder | a hub name
    bpe_vocab_size: int = 4096  # for tokenizer=bpe, trained once on the training text and cached
    validation_fraction: float = 0.05  # documents held out by a hash of their text
    cache_dir: str = "~/.cache/fp8train"


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: at the end only
    keep: int = 2  # newest checkpoints that stay
    at_end: bool = True


@dataclass
class WandbConfig:
    mode: str = "auto"  # auto (online with a key, else offline) | online | offline | disabled
    project: str = "fp8train"


@dataclass
class LoggingConfig:
    every: int = 1  # steps between lines of metrics.jsonl
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    resume: str = "none"  # none | auto: go on from the newest complete checkpoint in run.dir


@dataclass
class CompareSettings:
    processes: int = 2  # torchrun processes of each run
    max_gap: float = 0.01  # gate: (candidate - baseline) / baseline of the validation loss
    dir: str | None = None  # default outputs/compare-CANDIDATE-BASELINE


@dataclass
class CompareConfig(Config):
    """launch/compare.py's schema: a training configuration and what to hold it against."""

    baseline: str = "bf16"  # precision of the run to compare with
    compare: CompareSettings = field(default_factory=CompareSettings)


def valid_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """All dotted keys of the schema, inner nodes too."""
    keys: list[str] = []
    instance = schema()
    for item in fields(instance):
        keys.append(prefix + item.name)
        value = getattr(instance, item.name)
        if is_dataclass(value):
            keys += valid_keys(type(value), f"{prefix}{item.name}.")
    return keys


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The innermost values of nested groups, by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def written(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def nearest(name: str, choices: list[str]) -> str:
    """A hint «; nearest: …» from the choices, empty when nothing is near."""
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return f"; nearest: {near[0]}" if near else ""


def unknown_key(key: str, schema: type[Config]) -> str:
    """One line for a key that the schema lacks, with the nearest valid ones."""
    keys = valid_keys(schema)
    group, _, last = key.rpartition(".")
    siblings = [name for name in keys if name.rpartition(".")[0] == group]
    namesakes = [name for name in keys if name.rpartition(".")[2] == last]
    if group and not siblings:
        return unknown_key(group, schema)
    hint = nearest(key, [*siblings, *([] if group else ["recipe"])])
    if hint.endswith(" recipe"):  # a group of files, not a key
        hint = "; nearest: +recipe=NAME"
    if not hint and namesakes:  # the last part alone may be right: `lr` for `optimizer.lr`
        hint = f"; nearest: {namesakes[0]}"
    if not hint:
        hint = f"; {group or 'the top level'} has {', '.join(siblings)}"
    return f"unknown key {key}{hint}"


WANTED = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


WANTED_BY_TYPE = {list: "a list, in brackets and quotes: '[one,another]'", bool: "true or false"}


def default_of(key: str, schema: type[Config]) -> Any:
    """The default at a dotted key of the schema; None if there is no such key."""
    value: Any = schema()
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def value_error(error: OmegaConfBaseException, schema: type[Config]) -> str:
    """One line for what OmegaConf refused: an unknown key or a value of the wrong type."""
    key = str(error.full_key or error.key)
    reason = str(error).splitlines()[0].rstrip(".")
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return unknown_key(key, schema)
    if match := re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", reason):
        return f"{key}={match[1]}: give {WANTED.get(match[2], match[2])}"
    if "is not Optional" in reason:
        return f"{key}=null: must have a value"
    kind = type(default_of(key, schema))
    kind = list if "is not a ListConfig" in reason else kind
    kind = bool if "not a valid bool" in reason else kind
    if wanted := WANTED_BY_TYPE.get(kind):
        return f"{key}: give {wanted}"
    if is_dataclass(default_of(key, schema)):
        first = fields(default_of(key, schema))[0].name
        return f"{key} is a group of keys: set one of them, as {key}.{first}=VALUE"
    return f"{key}: {reason}"


def from_container(container: dict[str, Any], schema: type[Config] = Config) -> Config:
    """Build the typed configuration from a plain, resolved container.

    Hydra's `+key=value` opens structs, so what was composed is merged once more into the schema.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a missing value.
    """
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), container))
    except OmegaConfBaseException as error:
        raise ConfigError(value_error(error, schema)) from error
    assert isinstance(config, Config)
    return config


# --- rules ------------------------------------------------------------------------------------

# Recipes whose three GEMMs take operands of eight bits or fewer; mxfp4 quantises weights alone.
FP8_RECIPES = (
    *("fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_rowwise_bf16_wgrad", "fp8_block"),
    *("mxfp8", "nvfp4"),
)
RECIPES = (*FP8_RECIPES, "mxfp4")
FORMATS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "bf16")
ROLES = ("input", "weight", "grad_output")
LARGEST_LOSS_SCALE = 2.0**126  # its reciprocal is the smallest normal of FP32
CHOICES = {
    "precision.recipe": ("bf16", "fp32", *RECIPES),
    "precision.backend": ("auto", "emulated", "torch", "transformer_engine"),
    "precision.format": (None, "hybrid", "e4m3"),
    "precision.amax_compute": ("max", "most_recent"),
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
NOT_YET = ("tensor", "pipeline", "context", "replicate")


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
    _check_precision(config)
    _check_model_and_data(config)
    _check_layout(config, world_size)
    _check_batch(config, data_parallel_size(config, world_size))
    _check_optimizer(config)
    _check_loss_scale(config)


def _check_precision(config: Config) -> None:
    precision, trainer = config.precision, config.trainer
    rows = trainer.micro_batch_size * trainer.sequence_length
    multiple = 32 if precision.recipe == "mxfp8" else 16
    if precision.backend == "transformer_engine" and rows % multiple:
        raise ConfigError(
            f"precision.backend=transformer_engine needs a multiple of {multiple} tokens a micro "
            f"batch: "
            f"trainer.micro_batch_size={trainer.micro_batch_size} times trainer.sequence_length="
            f"{trainer.sequence_length} is {rows}"
        )
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
    used = {precision.recipe, *(layers.recipe for layers in precision.layer_recipes)}
    _check_recipe_options(precision, used)


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


def _check_layout(config: Config, world_size: int) -> None:
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
    for name in NOT_YET:
        size = getattr(parallel, name)
        if size != 1:
            raise ConfigError(
                f"parallel.{name}={size}: {name} parallelism does not run yet; "
                f"set parallel.{name}=1 and use parallel.shard"
            )
    if parallel.shard not in (-1, world_size):
        raise ConfigError(
            f"parallel.shard={parallel.shard}: the product of the parallel sizes must be the world "
            f"size, {world_size}; set parallel.shard={world_size} or -1, or start "
            f"{parallel.shard} processes"
        )


def data_parallel_size(config: Config, world_size: int) -> int:
    """Number of ranks that see different samples."""
    other = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
    return world_size // other


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
