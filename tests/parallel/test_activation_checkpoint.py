"""Recomputation changes what is kept, and not one bit of what is learned.

Real processes train with and without it, under every precision: gradients, masters, scales and
histories of several optimizer steps must be the same, and so must what travels between ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8train.config import Config, ConfigError, from_container
from fp8train.models.llama import Llama
from fp8train.parallel.activation_checkpoint import checkpoint_blocks
from fp8train.parallel.parallelize import ParallelModel, initialize, parallelize, precise_model
from fp8train.precision import convert
from fp8train.precision.backends import emulated
from fp8train.precision.convert import Conversion
from fp8train.rules import CHOICES, check
from tests.conftest import REPO
from tests.ranks import on_ranks

CPU = torch.device("cpu")
RECIPES = [recipe for recipe in CHOICES["precision.recipe"] if recipe is not None]
VARIANTS = {recipe: [f"precision={recipe}"] for recipe in RECIPES} | {
    "cached weights": ["precision=fp8_delayed", "precision.cache_weights=true"],
    "FP32 block scales": ["precision=fp8_block", "precision.power_of_two_scales=false"],
    "BF16 layers": ["precision=fp8_current", "precision.exclude=[*.o_proj,*.up_proj]"],
    "smooth, stochastic": [
        *("precision=fp8_current", "precision.smooth_swiglu=true"),
        "precision.stochastic_rounding=[input,weight,grad_output]",
    ],
}
MODES = ("selective", "full")
SMALL = (
    *("model.vocab_size=64", "model.hidden_size=32", "model.intermediate_size=64"),
    *("model.num_layers=1", "precision.amax_history_length=2"),
)
SMALL_BATCH, SMALL_LENGTH = 2, 16


def compose(*overrides: str) -> Config:
    ConfigStore.instance().store(name="train_schema", node=Config)
    with hydra.initialize_config_dir(str(REPO / "configs"), version_base="1.3"):
        container = OmegaConf.to_container(hydra.compose("train", list(overrides)), resolve=True)
    return from_container(container)


def train(config: Config, steps: int = 2, micro_batches: int = 2) -> dict[str, Any]:
    """Some optimizer steps on random tokens with random upstream gradients, and all they leave."""
    parallel = parallelize(config, CPU)
    (part,) = parallel.parts
    model, conversion = part.model, part.conversion
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
    seen: dict[str, Any] = {"grads": [], "scales": [], "histories": [], "outputs": []}
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    rows = torch.arange(SMALL_BATCH * SMALL_LENGTH).view(SMALL_BATCH, -1)
    traffic = CommDebugMode()
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(micro_batches):
            first = (step * micro_batches + index) * ranks * SMALL_BATCH
            conversion.begin_micro_batch(step, first, rows + rank * rows.numel())
            model.set_requires_gradient_sync(index == micro_batches - 1)
            last = (step, index) == (steps - 1, micro_batches - 1)
            with traffic if last else nullcontext():  # it makes a step twice as slow
                seen["outputs"].append(forward_backward(parallel, generator))
        parallel.reduction.finish()
        seen["grads"] += [local(p.grad) for p in model.parameters()]
        optimizer.step()
        if conversion.delayed:
            state = conversion.delayed.state_dict()
            seen["histories"] += [value.clone() for value in state.values()]  # staged, not rolled
        conversion.end_step(parallel.mesh.stage)
        if conversion.delayed:
            seen["scales"] += [value.clone() for value in conversion.delayed.state_dict().values()]
    seen["bytes"] = parallel.reduction.take_bytes()
    seen["traffic"] = {str(op): count for op, count in traffic.get_comm_counts().items()}
    seen["masters"] = [local(p) for p in model.parameters()]
    seen["names"] = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    return seen


def forward_backward(parallel: ParallelModel, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(64, (SMALL_BATCH, SMALL_LENGTH), generator=generator)
    logits = parallel.model(tokens)
    # Amaxes that move over the steps, so that a scale of another step would not be the same.
    upstream = torch.randn(logits.shape, generator=generator).exp().to(logits.dtype)
    logits.backward(upstream)
    return logits.detach()


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().clone()


def train_all(configs: dict[str, Config]) -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for name, config in configs.items():
        for mode in ("none", *MODES):
            config.parallel.activation_checkpoint = mode
            moves = (
                config.precision.recipe == "fp8_delayed"
            )  # from step to step, beside the weights
            results[name, mode] = train(config, steps=2 if moves else 1)
    return results


@pytest.fixture(scope="module")
def trained() -> list[dict[Any, dict[str, Any]]]:
    """By rank, what each variant and mode left."""
    configs = {name: compose(*overrides, *SMALL) for name, overrides in VARIANTS.items()}
    return on_ranks(2, train_all, configs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_to_the_last_bit(
    trained: list[dict[Any, dict[str, Any]]], variant: str, mode: str
) -> None:
    for results in trained:
        plain, recomputed = results[variant, "none"], results[variant, mode]
        for what in ("outputs", "grads", "histories", "scales", "masters"):
            assert len(plain[what]) == len(recomputed[what])
            assert all(map(torch.equal, plain[what], recomputed[what])), what
        assert all(torch.isfinite(grad).all() for grad in plain["grads"])
        assert any(grad.any() for grad in plain["grads"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_exchange_the_same(
    trained: list[dict[Any, dict[str, Any]]], variant: str, mode: str
) -> None:
    for results in trained:
        plain, recomputed = results[variant, "none"], results[variant, mode]
        assert plain["bytes"] == recomputed["bytes"]
        assert plain["traffic"] == recomputed["traffic"]
        assert plain["bytes"] > 0 and len(plain["traffic"]) > 1
        assert plain["names"] == recomputed["names"]
        assert plain["names"][1][1] == "layers.0.input_layernorm.weight"


@pytest.mark.slow
def test_delayed_scales_move_while_they_are_watched(
    trained: list[dict[Any, dict[str, Any]]],
) -> None:
    """Else recomputation under another step's scales would go unseen above."""
    for results in trained:
        scales = results["fp8_delayed", "none"]["scales"]
        first, second = scales[: len(scales) // 2], scales[len(scales) // 2 :]
        assert not all(map(torch.equal, first, second))


def model_of(recipe: str, *overrides: str) -> tuple[Llama, Conversion]:
    """An unsharded model in its compute type, on this process alone."""
    config = compose(f"precision={recipe}", *overrides)
    model, conversion = precise_model(config, CPU)
    model.to_empty(device=CPU)
    initialize(model, config.model, 0)
    compute = torch.float32 if recipe == "fp32" else torch.bfloat16
    return model.to(compute), conversion


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_under_other_scales_is_seen(mode: str) -> None:
    """The negative control: a roll between forward and backward changes the gradients."""
    grads = {}
    for use in ("none", mode):
        model, conversion = model_of("fp8_delayed", *SMALL)
        checkpoint_blocks(model.layers.values(), use, conversion.position)
        torch.manual_seed(0)
        logits = model(torch.randint(64, (SMALL_BATCH, SMALL_LENGTH)))
        assert conversion.delayed is not None
        conversion.delayed.roll()
        logits.backward(torch.randn_like(logits))
        grads[use] = [p.grad for p in model.parameters()]
    assert not all(map(torch.equal, grads["none"], grads[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_plain_linears_beside_quantised_ones(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where what is not quantised stays an `nn.Linear`: each finds its own result."""
    for module in (convert, emulated):
        monkeypatch.setattr(module, "has_fast_bf16", lambda device: True)
    # FP32 block scales: a GEMM is made of the same operator as an `nn.Linear`.
    mixed = ("precision.exclude=[*.k_proj,*.gate_proj]", "precision.power_of_two_scales=false")
    grads = {}
    for use in ("none", mode):
        model, conversion = model_of("fp8_block", *mixed, *SMALL)
        assert {type(m).__name__ for m in model.modules()} >= {"Linear", "QuantizedLinear"}
        checkpoint_blocks(model.layers.values(), use, conversion.position)
        torch.manual_seed(0)
        logits = model(torch.randint(64, (SMALL_BATCH, SMALL_LENGTH)))
        logits.backward(torch.randn_like(logits))
        grads[use] = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, grads["none"], grads[mode]))


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made while it is on and are still held.

    Args:
        before: what was there; a view of it makes no storage.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in self.before:
                self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def total(self) -> int:
        gc.collect()
        return sum(size for storage, size in self.made.values() if not storage.expired())


def kept_bytes(recipe: str, mode: str) -> int:
    """What a forward of llama_tiny's first block and its head keeps for the backward."""
    model, conversion = model_of(recipe, "model.num_layers=1")
    checkpoint_blocks(model.layers.values(), mode, conversion.position)
    with LiveBytes(model.parameters()) as live:
        logits = model(torch.randint(320, (1, 128)))
    return live.total() - logits.untyped_storage().nbytes()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "fp32"])
def test_less_is_kept(recipe: str) -> None:
    none, selective, full = (kept_bytes(recipe, mode) for mode in ("none", *MODES))
    assert full < selective < 0.6 * none
    assert full < 0.25 * none


def test_transformer_engine_is_refused_by_name() -> None:
    overrides = ("precision.backend=transformer_engine", "parallel.activation_checkpoint=full")
    with pytest.raises(ConfigError) as error:
        check(compose("precision=fp8_current", *overrides), world_size=1)
    assert "parallel.activation_checkpoint=full" in str(error.value)
    assert "\n" not in str(error.value)
    check(compose("precision=bf16", *overrides), world_size=1)  # TE has no part in it


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of none, selective, full"):
        check(compose("parallel.activation_checkpoint=blocks"), world_size=1)
