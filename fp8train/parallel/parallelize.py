"""From a plain model to one that trains over all ranks, in the order of these steps.

Before processes meet:
1. `precise_model` makes the model on the meta device, swaps the chosen linears, and on a GPU
   the norms for apex's.
After that:
2. `checkpoint_blocks` has each block's backward recompute what `parallel.activation_checkpoint`
   says, inside of the sharding, so that recomputation finds the weights gathered;
3. `fully_shard` shards each block and the rest over the data-parallel ranks: FP32 shards are the
   master weights, compute is BF16, gradients are accumulated in FP32;
4. our reduce-scatter takes the place of FSDP2's;
5. every parameter gets its initial values, a function of seed and name alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8train.config import Config, ModelConfig
from fp8train.models.llama import AttentionCore, Llama, initial_std
from fp8train.parallel.activation_checkpoint import checkpoint_blocks
from fp8train.parallel.reduction import AllToAllReduceScatter
from fp8train.precision.backends.nvidia import fuse_norms
from fp8train.precision.convert import Conversion, convert
from fp8train.precision.wire import CODECS
from fp8train.rules import gradient_reduction


@dataclass
class ParallelModel:
    """A model ready to train.

    Attributes:
        model: the sharded Llama; its parameters are FP32 DTensors.
        mesh: the data-parallel ranks.
        reduction: counts the gradient bytes this rank sends.
        conversion: which layers run in FP8, and their state.
    """

    model: Llama
    mesh: DeviceMesh
    reduction: AllToAllReduceScatter
    conversion: Conversion

    def synchronize_gradients(self, on: bool) -> None:
        """Whether the next backward reduces gradients; off, they add up unsharded in FP32."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(on)

    def release_weights(self) -> None:
        """Free the root's gathered weights, which FSDP2 keeps for a backward, after a forward
        that has none."""
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()


def precise_model(
    config: Config, device: torch.device, backend: str = "emulated"
) -> tuple[Llama, Conversion]:
    """The configured model on the meta device, its linears under the configured precision.

    Args:
        device: where it will run.
        backend: as `choose_backend` gives it.
    Raises:
        ConfigError: a layer pattern that matches nothing.
    """
    with torch.device("meta"):
        model = llama(config.model)
        fuse_norms(model, device)
    conversion = convert(
        model,
        config.precision,
        device,
        AttentionCore,
        backend=backend,
        seed=config.trainer.seed,
    )
    return model, conversion


def parallelize(
    model: Llama, conversion: Conversion, config: Config, device: torch.device
) -> ParallelModel:
    """Shard a meta-device model over all ranks of the default process group and fill it."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    compute = torch.float32 if config.precision.recipe == "fp32" else torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary tables stay FP32
    )
    checkpoint_blocks(model.layers, config.parallel.activation_checkpoint)
    reduction = AllToAllReduceScatter(CODECS[gradient_reduction(config)])
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        # By shape, not by class: FSDP2's ReduceScatter is not a public name.
        module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
    model.to_empty(device=device)
    initialize(model, config.model, config.trainer.seed)
    return ParallelModel(model, mesh, reduction, conversion)


def llama(config: ModelConfig) -> Llama:
    """The plain model of a configuration, on the current default device."""
    return Llama(
        vocab_size=config.vocab_size,
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
        std = initial_std(name, config.num_layers, config.init_std)
        full = initial_values(name, parameter.shape, std, seed, parameter.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shard = distribute_tensor(full, mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
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
