"""Backends that are GEMMs under our own layer: `emulated` and `torch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fp8train.precision.backends.protocol import Installed, Job, replace
from fp8train.precision.delayed import DelayedState
from fp8train.precision.linear import Gemms, Numerics, QuantizedLinear, Smoothing
from fp8train.precision.quantize import Payload
from fp8train.precision.quantizers import Delayed, Quantizer, Rounding, Scaled
from fp8train.precision.recipes import ROLES, DelayedScaling


class PayloadGemms(Gemms, Protocol):
    """GEMMs that say in which form they take quantised values."""

    @property
    def payload(self) -> Payload: ...


@dataclass(frozen=True)
class QuantizedLayers:
    """Our quantisers and `QuantizedLinear` over one backend's GEMMs."""

    name: str
    gemms: PayloadGemms

    def install(self, job: Job) -> Installed:
        delayed = {
            name: layer.recipe
            for name, layer in job.plans.items()
            if isinstance(layer.recipe, DelayedScaling)
        }
        state = DelayedState(delayed, job.device) if delayed else None
        installed = Installed(delayed=state)
        for name, layer in job.plans.items():
            quantizers: dict[str, Quantizer] = {}
            for role in ROLES:
                recipe, payload = layer.recipe, self.gemms.payload
                split = job.split(name, role)
                rounding = Rounding(role in recipe.stochastic, name, role, job.seed, split)
                if isinstance(recipe, DelayedScaling):
                    assert state is not None
                    rows = state.rows(name, role)
                    quantizers[role] = Delayed(recipe, role, payload, state, rows, rounding)
                else:
                    quantizers[role] = Scaled(recipe, role, payload, rounding, split)
            numerics = Numerics(quantizers, self.gemms, job.position)
            installed.numerics[name] = numerics
            smooth = Smoothing(job.split(name, "input").rows) if layer.recipe.smooth else None
            replacement = QuantizedLinear.take_over(
                job.linear(name), numerics, cache=job.cache, smooth=smooth
            )
            replace(job.model, name, replacement)
        return installed
