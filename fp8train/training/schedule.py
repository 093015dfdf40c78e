"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from fp8train.config import ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate of a step, counted from 1 to `steps`.

    Linear warm-up reaches the peak at step `warmup_steps`; then level (constant), or half a
    cosine that reaches peak·min_lr_ratio at the last step.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    floor = schedule.min_lr_ratio
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
