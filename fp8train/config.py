"""The typed schema of every configuration key; the rules between keys are in `rules.py`.

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


# Recipes whose three GEMMs take operands of eight bits or fewer; mxfp4 quantises weights alone.
FP8_RECIPES = (
    *("fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_rowwise_bf16_wgrad", "fp8_block"),
    *("mxfp8", "nvfp4"),
)
RECIPES = (*FP8_RECIPES, "mxfp4")
FORMATS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "bf16")
ROLES = ("input", "weight", "grad_output")


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
    micro_batch_size: int = 8  # samples a forward pass
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
    vocab_multiple: int = 64  # embedding and head are padded to a multiple; tensor must divide it
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
    amax_groups: str = "all"  # ranks that share a tensor share its amax; te: as TE does, fewer
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

    def recipes(self) -> set[str]:
        """Recipes that some layer may have."""
        return {self.recipe, *(layers.recipe for layers in self.layer_recipes)}


@dataclass
class GradientsConfig:
    """What travels, and how it is summed (docs/gradient-communication.md)."""

    reduce: str = "auto"  # auto (e5m2 under FP8, else fp32) | e5m2 | e4m3 | bf16 | fp32 | fp16
    inside: str = "auto"  # with replicas: inside one; auto (reduce, but eight bits → bf16)
    scaling: str = "block"  # of eight bits: block (of 128) | tensor | none (rings only)
    rounding: str = "nearest"  # of eight bits: nearest | stochastic
    error_feedback: bool = False  # what an eight-bit cast loses comes on top of the next gradient
    residual: str = "fp32"  # fp32 | bf16: what error feedback keeps, of unsharded size
    algorithm: str = "all_to_all"  # all_to_all (summed in FP32) | ring (summed in the wire format)
    accumulate: str = "unsharded"  # unsharded: one reduction a step; sharded: one a micro batch
    audit_every: int = 0  # steps between comparisons with an FP32 reduction; 0: off


@dataclass
class ParametersConfig:
    gather: str = "bf16"  # FP8 linears' weights: bf16, cast after it | fp8, cast by their owners
    # false: gathered once a step and kept for it; a pipeline's stages do so whatever this says
    reshard_after_forward: bool = True


@dataclass
class ParallelConfig:
    """Sizes multiply to the number of processes; replicate or shard may be -1, the rest of them."""

    tensor: int = 1  # ranks that share each matrix
    pipeline: int = 1  # ranks that hold different blocks
    context: int = 1  # ranks that share a sequence
    replicate: int = 1  # copies of the sharded parameters (HSDP)
    shard: int = -1  # ranks that parameters, gradients and optimizer states are divided over
    sequence: bool = True  # with tensor > 1: norms and residual stream are divided over its ranks
    pipeline_schedule: str = "1f1b"  # 1f1b | interleaved | zero_bubble
    virtual_stages: int = 1  # pipeline stages on each rank; interleaved takes 2 or more
    compile: bool = False  # torch.compile each block
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
    eod_mask_loss: bool = False  # a document's first token is no target
    cache_dir: str = "~/.cache/fp8train"


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: at the end only
    keep: int = 2  # newest checkpoints that stay
    keep_every: int = 0  # steps: checkpoints of their multiples stay too; 0: none does
    at_end: bool = True
    asynchronous: bool = True  # training goes on while a checkpoint is written


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
    parameters: ParametersConfig = field(default_factory=ParametersConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    resume: str = "none"  # none | auto: the newest whole checkpoint in run.dir | one's folder
    dry_run: bool = False  # lay the run out, say what it takes, and train nothing
    world_size: int | None = None  # processes of a dry run; null: those that were started


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
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


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
