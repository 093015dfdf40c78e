"""Holds a candidate run against its baseline: gaps, gates, and what they can't show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8train.analysis.runs import Run, number
from fp8train.config import ConfigError

EMA_DECAY = 0.9
MILESTONES = 5  # equally spaced steps at which the smoothed training losses are compared
LATE_FAILURES = 200_000_000_000  # tokens; failures of FP8 are known to appear only after so many
# Runs that differ in one of these saw other samples, or measured validation on others.
DATA_KEYS = (
    "trainer.seed",
    "trainer.sequence_length",
    "trainer.global_batch_size",
    "trainer.validation_samples",
)
# What a comparison of precisions varies, what has no influence on a loss, and the data, whose
# equality the fingerprint shows better than a path does.
FREE_SECTIONS = ("precision", "gradients", "data", "logging", "checkpoint", "parallel")


@dataclass(frozen=True)
class Gate:
    """One condition of the verdict; `value` is NaN where it could not be measured."""

    name: str
    value: float
    limit: float
    passed: bool
    reason: str


@dataclass(frozen=True)
class GapPoint:
    """Both losses (nats a token) at one step, and (candidate - baseline) / baseline."""

    step: int
    candidate: float
    baseline: float
    gap: float


@dataclass(frozen=True)
class Difference:
    """A configuration key whose value is not the same in both runs."""

    key: str
    candidate: Any
    baseline: Any


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        gates: the conditions of the verdict.
        validation: the gap at every step where both runs validated.
        training: the gap of the smoothed training losses at a few equally spaced steps.
        time_ratio: median seconds a step, candidate over baseline; NaN where not logged.
        differences: configuration keys that differ, the run's own name and folder left out.
        notes: one-line remarks on what the numbers can't show.
    """

    candidate: Run
    baseline: Run
    gates: list[Gate]
    validation: list[GapPoint]
    training: list[GapPoint]
    time_ratio: float
    differences: list[Difference]
    notes: list[str]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    @property
    def validation_gap(self) -> float:
        """The signed relative gap of the final validation losses."""
        return relative_gap(
            self.candidate.final_validation_loss, self.baseline.final_validation_loss
        )


def relative_gap(candidate: float, baseline: float) -> float:
    """(candidate - baseline) / baseline; NaN where that is not a number."""
    if not math.isfinite(candidate) or not math.isfinite(baseline) or baseline == 0:
        return math.nan
    return (candidate - baseline) / baseline


def smooth(losses: Mapping[int, float], decay: float = EMA_DECAY) -> dict[int, float]:
    """Exponential moving average by step, without the pull of a zero start.

    A NaN makes everything after it NaN, so that it can't be overlooked.
    """
    average, weight = 0.0, 0.0
    smoothed: dict[int, float] = {}
    for step, loss in losses.items():
        average = decay * average + (1 - decay) * loss
        weight = decay * weight + (1 - decay)
        smoothed[step] = average / weight
    return smoothed


def gap_course(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> list[GapPoint]:
    """The gap at every step that both have."""
    return [
        GapPoint(step, loss, baseline[step], relative_gap(loss, baseline[step]))
        for step, loss in candidate.items()
        if step in baseline
    ]


def validation_losses(run: Run) -> dict[int, float]:
    """The validation loss by step, in nats a token."""
    return {step: number(line["validation_loss"]) for step, line in run.validation.items()}


def compare(candidate: Run, baseline: Run, max_gap: float) -> Comparison:
    """Compare two finished runs that saw the same data in the same order.

    Args:
        max_gap: the gate on the signed relative gap of the final validation losses (0.01 = 1%).
    Raises:
        ConfigError: the runs can't be compared: one and the same run, another model, other data,
            or another number of steps.
    """
    if candidate.folder.resolve() == baseline.folder.resolve():
        raise ConfigError(f"{candidate.folder} is given twice: give a candidate and a baseline")
    _check_model(candidate, baseline)
    _check_data(candidate, baseline)
    if candidate.steps != baseline.steps:
        raise ConfigError(
            f"{candidate.name} has {candidate.steps} steps and {baseline.name} "
            f"{baseline.steps}: compare runs of the same length (trainer.steps)"
        )
    course = gap_course(smooth(candidate.losses), smooth(baseline.losses))
    differences = config_differences(candidate, baseline)
    gate = _validation_gate(candidate, baseline, max_gap)
    return Comparison(
        candidate=candidate,
        baseline=baseline,
        gates=[gate],
        validation=gap_course(validation_losses(candidate), validation_losses(baseline)),
        training=_milestones(course),
        time_ratio=_ratio(candidate.step_seconds, baseline.step_seconds),
        differences=differences,
        notes=_notes(candidate, baseline, differences, gate),
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def config_differences(candidate: Run, baseline: Run) -> list[Difference]:
    """Configuration keys with unequal values, the run's own name and folder left out."""
    ours, theirs = flatten(candidate.config), flatten(baseline.config)
    return [
        Difference(key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key) and not key.startswith("run.") and key != "resume"
    ]


def _check_model(candidate: Run, baseline: Run) -> None:
    different = [
        item for item in config_differences(candidate, baseline) if item.key.startswith("model.")
    ]
    if different:
        raise ConfigError(f"the models differ ({_listed(different)}): compare runs of one model")
    ours, theirs = candidate.summary.get("parameters"), baseline.summary.get("parameters")
    if ours != theirs:
        raise ConfigError(f"the models differ ({ours} and {theirs} parameters): compare one model")


def _check_data(candidate: Run, baseline: Run) -> None:
    ours = candidate.summary.get("data_fingerprint")
    theirs = baseline.summary.get("data_fingerprint")
    unequal = config_differences(candidate, baseline)
    order = [item for item in unequal if item.key in DATA_KEYS]
    if ours is not None and ours == theirs and not order:
        return
    sources = [item for item in unequal if item.key.startswith("data.")]
    if order or sources:
        reason = _listed([*order, *sources])
    elif ours is None or theirs is None:
        reason = "a run without one can't be compared"
    else:
        reason = "the configurations agree, so the texts differ, as between two machines"
    raise ConfigError(
        f"the data differ: fingerprint {ours} of {candidate.name}, {theirs} of {baseline.name}; "
        f"{reason}: train both on the same data in the same order"
    )


def _listed(differences: list[Difference]) -> str:
    return ", ".join(f"{item.key} {item.candidate} and {item.baseline}" for item in differences)


def _milestones(course: list[GapPoint]) -> list[GapPoint]:
    """A few equally spaced points of the course, the last one among them."""
    count = min(MILESTONES, len(course))
    return [course[round(len(course) * (index + 1) / count) - 1] for index in range(count)]


def _ratio(candidate: float, baseline: float) -> float:
    return candidate / baseline if baseline > 0 else math.nan


def _validation_gate(candidate: Run, baseline: Run, max_gap: float) -> Gate:
    gap = relative_gap(candidate.final_validation_loss, baseline.final_validation_loss)
    troubles = [
        f"{role} {trouble}"
        for role, run in (("the candidate", candidate), ("the baseline", baseline))
        if (trouble := _loss_trouble(run))
    ]
    if troubles:
        reason = "; ".join(troubles)
    else:
        sign = "at most" if gap <= max_gap else "above"
        reason = f"the gap of {gap:+.2%} is {sign} {max_gap:.2%}"
    return Gate("validation_gap", gap, max_gap, not troubles and gap <= max_gap, reason)


def _loss_trouble(run: Run) -> str:
    """Why the losses of a run prove nothing; empty where they do."""
    if not math.isfinite(run.final_validation_loss):
        return "has no finite final validation loss"
    if not run.losses:
        return "has no training losses"
    for step, loss in run.losses.items():
        if not math.isfinite(loss):
            return f"has no finite training loss at step {step}"
    for step, loss in validation_losses(run).items():
        if not math.isfinite(loss):
            return f"has no finite validation loss at step {step}"
    return ""


def _notes(candidate: Run, baseline: Run, differences: list[Difference], gate: Gate) -> list[str]:
    notes = []
    others = [item for item in differences if item.key.split(".")[0] not in FREE_SECTIONS]
    if others:
        notes.append(f"The runs also differ in {_listed(others)}: the gap has more than one cause.")
    if gate.value < -gate.limit:
        notes.append(
            f"The candidate is better than its baseline by more than {gate.limit:.2%}: "
            f"look for a fault in the baseline."
        )
    if baseline.summary.get("gradient_reduction") not in ("fp32", "none"):
        notes.append(
            f"The baseline reduces its gradients in {baseline.summary.get('gradient_reduction')}: "
            f"what that costs is not in the gap."
        )
    emulated = [run for run in (candidate, baseline) if run.summary.get("backend") == "emulated"]
    if emulated:
        notes.append(
            "Emulated precision has the right numerics and no speed-up: "
            "the step times say nothing about a GPU."
        )
    elif _hardware(candidate) != _hardware(baseline):
        notes.append("The runs had different hardware or layouts: their speeds don't compare.")
    notes.append("One seed: how far BF16 itself varies between seeds is not measured here.")
    tokens = number(candidate.summary.get("tokens"))
    if not tokens >= LATE_FAILURES:
        notes.append(
            f"{tokens:,.0f} tokens: failures of FP8 that are known only after 200 billion tokens "
            f"can't show in this run."
        )
    return notes


def _hardware(run: Run) -> tuple[Any, Any]:
    return run.environment.get("hardware"), run.summary.get("world_size")
