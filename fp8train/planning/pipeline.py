"""What a pipeline schedule costs: idle time and micro batches in flight.

Both are read off the lists of actions of every rank, which torch's own schedules make, so what is
planned is what runs. Known closed forms: with p stages and m micro batches, 1F1B idles
(p − 1)/(m + p − 1) of a step, and interleaved with v stages a rank (p − 1)/(v·m + p − 1) (Narayanan
et al. 2021, arXiv 2104.04473, section 2.2); of zero bubble's ZB-H1 Qi et al. 2023, arXiv
2401.10241, give about a third of 1F1B's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from torch.distributed.pipelining.schedules import Schedule1F1B

from fp8train.config import ConfigError
from fp8train.layout import Layout
from fp8train.parallel.pipeline import Schedule, schedule

KINDS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # of time; each of a linear's three GEMMs is one


class Action(NamedTuple):
    """Something that a rank computes: F, B, or B's halves I (for the input) and W (for weights)."""

    kind: str
    stage: int
    micro_batch: int


class Gather(NamedTuple):
    """A rank gathers a stage's weights, or frees them."""

    begins: bool
    stage: int


@lru_cache(maxsize=4)  # all ranks' lists at once, and each rank asks for its own
def actions(layout: Layout, name: str, micro_batches: int) -> list[list[Action]]:
    """What each pipeline coordinate computes in a step, in order.

    Args:
        name: of the schedule, a value of `parallel.pipeline_schedule`.
    Raises:
        ConfigError: numbers that torch's schedule has no order for.
    """
    if name == "1f1b" or layout.stages == 1:
        return [_1f1b(layout.pipeline, stage, micro_batches) for stage in range(layout.pipeline)]
    order = _built(layout, name, micro_batches).pipeline_order
    assert order is not None
    return [
        [
            Action(KINDS[action.computation_type.name], action.stage_index, micro_batch)
            for action in order[rank]
            if action is not None and (micro_batch := action.microbatch_index) is not None
        ]
        for rank in range(layout.pipeline)
    ]


def gathers(layout: Layout, name: str, micro_batches: int, pipeline: int) -> list[Gather]:
    """When a rank of a pipeline coordinate gathers the weights of its stages in a step.

    Once, but with many virtual stages: torch's runtime keeps the three stages that come next.

    Raises:
        ConfigError: as `actions`.
    """
    if name == "1f1b" or layout.stages == 1:
        return [Gather(True, pipeline)]
    built = _built(layout, name, micro_batches)
    assert not isinstance(built, Schedule1F1B)
    return [
        Gather(action.computation_type.name == "UNSHARD", action.stage_index)
        for action in built.pipeline_order_with_comms[pipeline]
        if action.computation_type.name in ("UNSHARD", "RESHARD")
    ]


@lru_cache(maxsize=4)
def _built(layout: Layout, name: str, micro_batches: int) -> Schedule:
    """torch's schedule, which makes the lists of all ranks from its stages' numbers alone."""
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=layout.stages,
            group_rank=0,
            group_size=layout.pipeline,
            submod=None,
        )
        for stage in layout.stages_of(0)
    ]
    try:
        return schedule(name, cast(Any, stages), micro_batches, lambda output, target: output)
    except ValueError as error:
        raise ConfigError(
            f"parallel.pipeline_schedule={name} has no order for {micro_batches} micro batches a "
            f"rank and {layout.pipeline} pipeline ranks: {' '.join(str(error).split())}"
        ) from error


def _1f1b(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """As `Schedule1F1B` runs; the list that it makes for show begins wrongly on the last rank."""
    ahead = min(micro_batches, stages - stage)  # forwards before the first backward
    forward = [Action("F", stage, m) for m in range(micro_batches)]
    backward = [Action("B", stage, m) for m in range(micro_batches)]
    steady = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return [*forward[:ahead], *steady, *backward[micro_batches - ahead :]]


def bubble(layout: Layout, name: str, micro_batches: int) -> float:
    """Share of a step that the ranks of a pipeline wait, with equal stages and no time to send.

    Raises:
        ConfigError: as `actions`.
    """
    orders = actions(layout, name, micro_batches)
    ended: dict[Action, int] = {}
    clocks = [0] * len(orders)
    queues = [list(reversed(order)) for order in orders]
    while any(queues):
        waiting = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and all(need in ended for need in _needs(queue[-1], layout.stages)):
                action = queue.pop()
                ready = [ended[need] for need in _needs(action, layout.stages)]
                clocks[rank] = max(clocks[rank], *ready, 0) + UNITS[action.kind]
                ended[action] = ended[_alias(action)] = clocks[rank]
        assert sum(map(len, queues)) < waiting, "the schedule waits for itself"
    busy = sum(UNITS[action.kind] for order in orders for action in order)
    return 1 - busy / (max(clocks) * len(orders))


def _alias(action: Action) -> Action:
    """A whole backward serves as its first half, which the stage before waits for."""
    return action._replace(kind="I") if action.kind == "B" else action


def _needs(action: Action, stages: int) -> list[Action]:
    """The actions whose results an action takes."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro_batch)]
    after = [Action("I", stage + 1, micro_batch)] if stage + 1 < stages else []
    return [Action("F", stage, micro_batch), *after]


@dataclass
class InFlight:
    """Micro batches that a rank holds something of, by stage.

    Attributes:
        activations: forward is done, backward for the input is not.
        wgrads: backward for the input is done, that for the weights is not.
    """

    activations: Counter[int] = field(default_factory=Counter)
    wgrads: Counter[int] = field(default_factory=Counter)


def most_in_flight(order: list[Action], size: Callable[[InFlight], int]) -> InFlight:
    """The largest of all that a rank holds during a step.

    Args:
        order: the rank's actions.
        size: what is largest, as bytes.
    """
    now, largest = InFlight(), InFlight()
    for kind, stage, _ in order:
        if kind == "F":
            now.activations[stage] += 1
        elif kind == "W":
            now.wgrads[stage] -= 1
        else:
            now.activations[stage] -= 1
            now.wgrads[stage] += kind == "I"
        if size(now) > size(largest):
            largest = InFlight(+now.activations, +now.wgrads)
    return largest
