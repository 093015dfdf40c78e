"""Put a model under a precision: swap its linears for ones that compute by their recipe.

Embedding, norms, attention core and LM head stay in BF16; the linears of the blocks are quantised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8train.config import PrecisionConfig
from fp8train.precision.backends.emulated import Emulated, WideAttentionCore, has_fast_bf16
from fp8train.precision.backends.protocol import History, Job, replace
from fp8train.precision.backends.select import load_backend
from fp8train.precision.linear import Numerics, QuantizedLinear, WeightCache
from fp8train.precision.plan import LayerPlan, kinds, plan
from fp8train.precision.quantizers import HighPrecision, Position
from fp8train.precision.recipes import ROLES
from fp8train.precision.split import Splits


@dataclass
class Conversion:
    """What was done to a model, and the state that its layers share.

    Attributes:
        layers: the quantised linears by full name.
        table: rows (layer kind, count, recipe, formats, backend) for the log.
        delayed: the model's amax histories, under delayed scaling.
        numerics: of the layers that compute here; empty under Transformer Engine.
    """

    layers: dict[str, LayerPlan] = field(default_factory=dict)
    table: list[tuple[str, int, str, str, str]] = field(default_factory=list)
    delayed: History | None = None
    numerics: dict[str, Numerics] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    cache: WeightCache = field(default_factory=WeightCache)

    def begin_micro_batch(self, step: int, micro_batch: int, rows: Tensor | None = None) -> None:
        """Tell stochastic rounding where training is; see `Position`."""
        position = self.position
        position.step, position.micro_batch, position.rows = step, micro_batch, rows

    def end_step(self, group: dist.ProcessGroup | None = None, *, skipped: bool = False) -> None:
        """After the last backward of an optimizer step, and the step itself.

        Args:
            group: the ranks that hold a piece of the same tensors, for delayed scaling.
            skipped: masters stayed as they were, so amaxes are forgotten.
        """
        # After a skipped step too: the next one takes the weights' amaxes anew.
        self.cache.version += 1
        if self.delayed is not None:
            if skipped:
                self.delayed.discard()
            else:
                self.delayed.roll(group)


def convert(
    model: nn.Module,
    precision: PrecisionConfig,
    device: torch.device,
    attention_core: type[nn.Module] | None = None,
    *,
    backend: str = "emulated",
    seed: int = 0,
    plans: dict[str, LayerPlan] | None = None,
    splits: Splits | None = None,
    all_linears: bool = False,
) -> Conversion:
    """Swap the chosen linears of the model for quantised ones, in place.

    On a CPU without fast BF16 the other linears and the attention cores are swapped too, for ones
    that give BF16's numbers through FP32 GEMMs.

    Args:
        model: any module tree with `nn.Linear`s; may be on the meta device.
        device: where the model will run.
        attention_core: the model's class of q, k, v → output, causal; None if it has none.
        backend: as `choose_backend` gives it.
        seed: of stochastic rounding.
        plans: of the linears to quantise, where the model is a part of the one that the patterns
            are about; None to make them here.
        splits: how ranks share the linears' matrices; None if each has them whole.
        all_linears: swap the linears that stay in high precision too, for ours.
    Raises:
        ConfigError: a pattern that matches no layer.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    conversion = Conversion(plan(list(linears), precision) if plans is None else plans)
    conversion.cache.enabled = precision.cache_weights
    if conversion.layers:
        shared = (conversion.position, conversion.cache, splits or {})
        job = Job(model, conversion.layers, device, seed, *shared)
        installed = load_backend(backend, precision, device).install(job)
        conversion.numerics, conversion.delayed = installed.numerics, installed.delayed
    slow_bf16 = precision.recipe != "fp32" and not has_fast_bf16(device)
    if slow_bf16 or all_linears:
        emulation = "exact" if precision.recipe == "fp32" else "fast"
        numerics = Numerics(dict.fromkeys(ROLES, HighPrecision()), Emulated.on(device, emulation))
        for name in linears.keys() - conversion.layers.keys():
            replace(model, name, QuantizedLinear.take_over(linears[name], numerics))
    for name, module in list(model.named_modules()):
        if slow_bf16 and attention_core is not None and isinstance(module, attention_core):
            replace(model, name, WideAttentionCore())
    conversion.table = table(list(linears), conversion.layers, precision, backend)
    return conversion


def table(
    names: list[str], layers: dict[str, LayerPlan], precision: PrecisionConfig, backend: str
) -> list[tuple[str, int, str, str, str]]:
    """Rows (layer kind, count, recipe, formats of input/weight/grad_output, backend)."""
    high = "fp32" if precision.recipe == "fp32" else "bf16"
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for name in names:
        layer = layers.get(name)
        if layer is None:
            about = (high, high.upper(), "torch")
        else:
            smooth = ", smooth" if layer.recipe.smooth else ""
            about = (layer.name + smooth, str(layer.recipe.formats), backend)
        rows[kinds([name])[0], *about] += 1
    return [(kind, count, *rest) for (kind, *rest), count in rows.items()]  # type: ignore[misc]
