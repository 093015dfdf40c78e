"""From a plain model to one that trains over all ranks, in the order of these steps.

Before processes meet, `precise_model` makes the model on the meta device and decides which layers
run under which recipe. After that, for each pipeline stage of this rank:

1. pipeline: keep the stage's blocks, embedding or head;
2. tensor parallel: make the parameters DTensors, divided over the tensor ranks;
3. precision: swap the chosen linears for quantised ones, which learn who shares their tensors;
4. tensor and context parallel: put the collectives between the modules;
5. activation checkpointing: have each block's backward recompute what the configuration says;
6. compile each block, if asked;
7. FSDP: shard each block and the rest over the data-parallel ranks of a replica. FP32 shards are
   the master weights, compute is BF16, gradients are accumulated in FP32, and our reduction takes
   the place of FSDP2's reduce-scatter and of its all-reduce between replicas;
8. initial values, a function of seed and name alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8train.config import Config, ConfigError, ModelConfig
from fp8train.layout import Layout, micro_batches, padded_vocabulary, stage_blocks
from fp8train.models.llama import AttentionCore, Llama, initial_std
from fp8train.parallel import context, tensor
from fp8train.parallel.activation_checkpoint import checkpoint_blocks
from fp8train.parallel.execution import Execution, MicroBatch, Pipelined, Sequential
from fp8train.parallel.mesh import Mesh
from fp8train.parallel.parameter_gather import ParameterGather
from fp8train.parallel.pipeline import Examples, Stage, keep_stage, put_off_wgrads, schedule
from fp8train.parallel.quantized_gather import quantized_gathers
from fp8train.parallel.reduction import GradientReduction, Method
from fp8train.parallel.vocabulary import cross_entropy
from fp8train.precision.backends.nvidia import fuse_norms
from fp8train.precision.convert import Conversion, convert
from fp8train.precision.linear import LaterWgrads, Numerics
from fp8train.precision.plan import LayerPlan, plan
from fp8train.precision.wire import codec
from fp8train.rules import wire_types


@dataclass
class Part:
    """One pipeline stage of the model on this rank; the whole model without a pipeline.

    Attributes:
        index: of the stage.
        model: its modules, sharded; parameters are FP32 DTensors.
        conversion: which of its layers run in FP8, and their state.
        later: its weight gradients that wait for a W pass; None where none do.
    """

    index: int
    model: Llama
    conversion: Conversion
    later: LaterWgrads | None = None


@dataclass
class ParallelModel:
    """A model ready to train.

    Attributes:
        model: all parameters of this rank, under the names that they have in the whole model.
        parts: the pipeline stages that it consists of.
        mesh: who shares what with whom.
        execution: runs micro batches.
        reduction: how its gradients travel.
        gather: of weights as bytes; None where all are gathered in the type of computation.
        tied: embedding and head are one parameter.
    """

    model: nn.Module
    parts: list[Part]
    mesh: Mesh
    execution: Execution
    reduction: GradientReduction
    gather: ParameterGather | None = None
    tied: bool = False

    @property
    def tied_across_stages(self) -> bool:
        """Whether the first and the last stage have a copy each of one parameter."""
        return self.tied and self.mesh.layout.pipeline > 1

    def conversions(self) -> list[Conversion]:
        return [part.conversion for part in self.parts]

    def numerics(self) -> dict[str, Numerics]:
        """Of this rank's quantised layers, by full name."""
        return {
            name: numerics
            for conversion in self.conversions()
            for name, numerics in conversion.numerics.items()
        }

    def delayed_state(self) -> dict[str, Tensor]:
        """Histories and scales of delayed scaling on this rank; empty without."""
        state: dict[str, Tensor] = {}
        for conversion in self.conversions():
            if conversion.delayed is not None:
                state |= conversion.delayed.state_dict()
        return state

    def train(
        self, batches: list[MicroBatch], weight: float, before: Callable[[MicroBatch], None]
    ) -> Tensor:
        """As `Execution.train`; the gradients are complete after it."""
        self._prepare()
        total = self.execution.train(batches, weight, before)
        self.reduction.finish()
        return total

    def evaluate(self, batches: list[MicroBatch], before: Callable[[MicroBatch], None]) -> Tensor:
        """As `Execution.evaluate`."""
        self._prepare()
        return self.execution.evaluate(batches, before)

    def _prepare(self) -> None:
        if self.gather is not None:
            self.gather.prepare()

    def release_weights(self) -> None:
        """Free the gathered weights, which FSDP2 keeps for a backward, after a forward that has
        none."""
        for part in self.parts:
            for module in part.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def precise_model(
    config: Config, device: torch.device, backend: str = "emulated"
) -> tuple[Llama, Conversion]:
    """The configured model on the meta device, its linears under the configured precision.

    Args:
        device: where it will run.
        backend: as `choose_backend` gives it.
    Raises:
        ConfigError: a layer pattern that matches nothing, or nothing to gather in eight bits.
    """
    model = meta_model(config.model, device)
    conversion = convert(
        model,
        config.precision,
        device,
        AttentionCore,
        backend=backend,
        seed=config.trainer.seed,
    )
    recipes = [layer.recipe for layer in conversion.layers.values()]
    gathered = any(recipe.weight_travels_as_bytes for recipe in recipes)
    if config.parameters.gather == "fp8" and not gathered:
        raise ConfigError(
            "parameters.gather=fp8: precision.formats leaves no layer one eight-bit weight for "
            "fprop and dgrad; use parameters.gather=bf16"
        )
    return model, conversion


def meta_model(config: ModelConfig, device: torch.device) -> Llama:
    """The plain model on the meta device, with apex's norms where it will run on a GPU."""
    with torch.device("meta"):
        model = llama(config)
        fuse_norms(model, device)
    return model


def parallelize(config: Config, device: torch.device, backend: str = "emulated") -> ParallelModel:
    """Divide the configured model over all ranks of the default process group and fill it.

    Raises:
        ConfigError: as `Layout.of` and `precise_model`.
    """
    layout = Layout.of(config.parallel, torch.distributed.get_world_size())
    mesh = Mesh.of(layout, device)
    reduction = gradient_reduction(config, mesh)
    parts = sharded_parts(config, mesh, device, backend, reduction)
    for part in parts:
        part.model.to_empty(device=device)
        initialize(part.model, config.model, config.trainer.seed)
    models, gather = [part.model for part in parts], None
    if config.parameters.gather == "fp8" and mesh.fsdp.size() > 1:
        gather = ParameterGather.of(models, mesh.fsdp)
    return ParallelModel(
        union(models),
        parts,
        mesh,
        execution(parts, config, mesh, device, reduction),
        reduction,
        gather,
        config.model.tie_embeddings,
    )


def sharded_parts(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    backend: str,
    reduction: GradientReduction,
) -> list[Part]:
    """This rank's stages on the meta device, steps 1 to 7."""
    layout, model = mesh.layout, config.model
    plans = plan(linear_names(meta_model(model, device)), config.precision)
    blocks = stage_blocks(model, layout.stages)
    parts = []
    for index in layout.stages_of(mesh.place.pipeline):
        part = build_part(index, blocks[index], config, mesh, plans, device, backend)
        shard(part.model, config, mesh, reduction, index)
        parts.append(part)
    return parts


def build_part(
    index: int,
    blocks: range,
    config: Config,
    mesh: Mesh,
    plans: dict[str, LayerPlan],
    device: torch.device,
    backend: str,
) -> Part:
    """A stage on the meta device, steps 1 to 6."""
    layout, parallel, precision = mesh.layout, config.parallel, config.precision
    model = meta_model(config.model, device)
    keep_stage(model, blocks, first=index == 0, last=index == layout.stages - 1)
    if layout.tensor > 1:
        tensor.shard_weights(model, mesh)
    length = config.trainer.sequence_length
    ours = plans if backend != "transformer_engine" else {}
    quantized = quantized_gathers(tensor.branches(model), ours, layout, length)
    zero_bubble = layout.pipeline > 1 and parallel.pipeline_schedule == "zero_bubble"
    conversion = convert(
        model,
        precision,
        device,
        AttentionCore,
        backend=backend,
        seed=config.trainer.seed,
        plans={name: plans[name] for name in linear_names(model) if name in plans},
        splits=tensor.splits(model, mesh, precision.amax_groups, quantized),
        all_linears=zero_bubble,
    )
    later = put_off_wgrads(model) if zero_bubble else None
    if layout.tensor > 1:
        tensor.communicate(model, mesh, quantized)
    if layout.context > 1:
        context.install(model, mesh.context, length)
    elif layout.sequence:  # the residual stream is shorter than the sequence
        model.rope = context.ContextRope(model.rope, length, mesh.context)
    checkpoint_blocks(model.layers.values(), parallel.activation_checkpoint, conversion.position)
    if parallel.compile:
        for block in model.layers.values():
            block.compile()
    return Part(index, model, conversion, later)


def gradient_reduction(config: Config, mesh: Mesh) -> GradientReduction:
    """How the configured model's gradients travel over a mesh."""
    gradients, types = config.gradients, wire_types(config, mesh.layout)
    residual = {"fp32": torch.float32, "bf16": torch.bfloat16}[gradients.residual]
    ring = gradients.algorithm == "ring"
    method = Method(
        # A ring has one scale for all ranks, outside of its messages.
        codec(types.shard, "none" if ring else gradients.scaling),
        codec(types.replicate, gradients.scaling),
        stochastic=gradients.rounding == "stochastic",
        seed=config.trainer.seed,
        residual=residual if gradients.error_feedback else None,
        ring=ring,
        ring_scaled=gradients.scaling != "none",
    )
    replicas = mesh.replicas if mesh.layout.replicate > 1 else None
    # A GPU runs a module's reduction in a stream of its own, with nothing to be put off.
    return GradientReduction(method, replicas, deferred=mesh.fsdp.device_type == "cpu")


def shard(
    model: Llama, config: Config, mesh: Mesh, reduction: GradientReduction, stage: int
) -> None:
    """Divide parameters, gradients and optimizer states over the data-parallel ranks."""
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary tables stay FP32
    )
    # A stage runs many micro batches a step, and would gather its weights for each.
    keep = mesh.layout.pipeline > 1 or not config.parameters.reshard_after_forward
    reshard = False if keep else None
    blocks = {f"layers.{number}": block for number, block in model.layers.items()}
    for name, module in {**blocks, f"stage.{stage}": model}.items():
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard)
        assert isinstance(module, FSDPModule)
        ours = reduction.of_module(name)
        # By shape, not by class: FSDP2's ReduceScatter is not a public name.
        module.set_custom_reduce_scatter(ours)  # type: ignore[arg-type]
        if mesh.fsdp.size() == 1 and reduction.replicas is not None:
            module.set_all_reduce_hook(ours.between_replicas)


def execution(
    parts: list[Part],
    config: Config,
    mesh: Mesh,
    device: torch.device,
    reduction: GradientReduction,
) -> Execution:
    """How micro batches run through this rank's parts."""
    model, trainer, layout = config.model, config.trainer, mesh.layout
    rows = padded_vocabulary(model) // layout.tensor

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        group = mesh.tensor.get_group() if layout.tensor > 1 else None
        first = mesh.place.tensor * rows
        return cross_entropy(logits, targets, model.vocab_size, group, first).sum()

    if layout.pipeline == 1:
        sharded = config.gradients.accumulate == "sharded"
        keep = not config.parameters.reshard_after_forward
        return Sequential(parts[0].model, loss, reduction if sharded else None, keep)
    examples = Examples.of(
        layout,
        trainer.micro_batch_size,
        trainer.sequence_length,
        model.hidden_size,
        padded_vocabulary(model),
        compute_dtype(config),
    )
    stages = [
        Stage(part.model, part.index, mesh, device, examples.of_stage(*ends), part.later)
        for part in parts
        for ends in [(part.index == 0, part.index == layout.stages - 1)]
    ]
    count = micro_batches(config, layout)
    make = partial(schedule, config.parallel.pipeline_schedule, stages, count)
    return Pipelined(stages, make, loss, count)


def compute_dtype(config: Config) -> torch.dtype:
    return torch.float32 if config.precision.recipe == "fp32" else torch.bfloat16


def linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def union(models: list[Llama]) -> nn.Module:
    """The modules of several stages in one tree, under the names of the whole model."""
    if len(models) == 1:
        return models[0]
    tree = nn.Module()
    tree.layers = nn.ModuleDict(
        {number: block for model in models for number, block in model.layers.items()}
    )
    for name in ("embed_tokens", "norm", "lm_head"):
        for model in models:
            if (module := getattr(model, name)) is not None:
                setattr(tree, name, module)
    return tree


def llama(config: ModelConfig) -> Llama:
    """The plain model of a configuration, on the current default device."""
    return Llama(
        vocab_size=padded_vocabulary(config),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        rope_theta=config.rope_theta,
        rope_scaling=asdict(config.rope_scaling),
        norm_eps=config.norm_eps,
        tie_embeddings=config.tie_embeddings,
    )


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter; each depends on seed and name only, so no layout changes it."""
    for name, parameter in model.named_parameters():
        if config.tie_embeddings and name == "lm_head.weight":
            name = "embed_tokens.weight"  # one parameter, even where two stages have a copy each
        std = initial_std(name, config.num_layers, config.init_std)
        full = initial_values(name, parameter.shape, std, seed, parameter.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            part = distribute_tensor(full, mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(full)


def initial_values(
    name: str, shape: torch.Size, std: float | None, seed: int, device: torch.device
) -> Tensor:
    """FP32 values of one parameter: normal with that deviation, ones without."""
    if std is None:
        return torch.ones(shape, device=device)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
