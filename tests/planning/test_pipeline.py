"""Bubbles against closed forms, and orders against what torch's schedules really run."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B

from fp8train.config import ConfigError
from fp8train.layout import Layout
from fp8train.planning.pipeline import Action, InFlight, actions, bubble, most_in_flight

SHAPES = [(2, 2), (4, 4), (4, 8), (8, 24)]


@pytest.mark.parametrize("p, m", SHAPES)
def test_bubble_of_1f1b(p: int, m: int) -> None:
    assert bubble(Layout(pipeline=p), "1f1b", m) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p, m", SHAPES)
def test_bubble_of_interleaved(p: int, m: int, v: int) -> None:
    layout = Layout(pipeline=p, virtual_stages=v)
    assert bubble(layout, "interleaved", m) == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("p, m", SHAPES)
def test_bubble_of_zero_bubble(p: int, m: int) -> None:
    """ZB-H1 idles (p − 1)(F + I − W) a step, which is 3m units of work otherwise."""
    found = bubble(Layout(pipeline=p), "zero_bubble", m)
    assert found == pytest.approx((p - 1) / (3 * m + p - 1))


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "interleaved"])
def test_one_stage_never_waits(name: str) -> None:
    assert bubble(Layout(shard=4), name, 3) == 0
    assert actions(Layout(), name, 1) == [[Action("F", 0, 0), Action("B", 0, 0)]]


@pytest.mark.parametrize(
    "name, v", [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]
)
def test_every_micro_batch_goes_through_every_stage_once(name: str, v: int) -> None:
    layout = Layout(pipeline=4, virtual_stages=v)
    seen = Counter(action for order in actions(layout, name, 8) for action in order)
    kinds = "FIW" if name == "zero_bubble" else "FB"
    assert seen == {
        Action(kind, stage, m): 1 for kind in kinds for stage in range(4 * v) for m in range(8)
    }
    for rank, order in enumerate(actions(layout, name, 8)):
        assert {action.stage for action in order} == set(layout.stages_of(rank))


class Recorder(SimpleNamespace):
    """A stage that computes nothing: what its schedule asks it for, in order."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append(Action("F", self.stage_index, index))

    def backward_one_chunk(self, index: int, **kwargs: Any) -> None:
        self.seen.append(Action("B", self.stage_index, index))


@pytest.mark.parametrize("p, m", [(1, 3), (4, 4), (4, 7)])
def test_1f1b_is_what_torch_runs(p: int, m: int) -> None:
    for stage, order in enumerate(actions(Layout(pipeline=p), "1f1b", m)):
        recorder = Recorder(stage_index=stage, num_stages=p, is_last=False, seen=[])
        schedule = Schedule1F1B(recorder, m, loss_fn=None)
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * m, [{}] * m)
        assert recorder.seen == order


def held(order: list[Action], wgrads: int = 1) -> InFlight:
    return most_in_flight(order, lambda f: 3 * f.activations.total() + wgrads * f.wgrads.total())


def test_in_flight_under_1f1b() -> None:
    """As many as there are stages from this one to the last."""
    orders = actions(Layout(pipeline=4), "1f1b", 8)
    assert [held(order).activations.total() for order in orders] == [4, 3, 2, 1]


def test_in_flight_under_interleaved() -> None:
    """Narayanan et al. 2021: (v − 1)·p + 2·(p − 1 − rank) forwards ahead, and the one that runs."""
    orders = actions(Layout(pipeline=4, virtual_stages=2), "interleaved", 8)
    assert [held(order).activations.total() for order in orders] == [11, 9, 7, 5]


def test_in_flight_under_zero_bubble() -> None:
    """As 1F1B's, and weight gradients that wait: p on every rank (Qi et al. 2023, ZB-H1)."""
    found = [held(order) for order in actions(Layout(pipeline=4), "zero_bubble", 8)]
    assert [one.activations.total() for one in found] == [4, 3, 2, 1]
    assert [one.wgrads.total() for one in found] == [0, 1, 2, 3]


def test_the_largest_goes_by_size() -> None:
    """Weight gradients that weigh nothing leave the moment of most activations, and heavy ones
    make another the largest."""
    order = [Action(kind, 0, m) for m in (0, 1) for kind in "FI"] + [Action("W", 0, 0)]
    assert held(order, wgrads=0).wgrads.total() == 0
    assert held(order, wgrads=9).wgrads.total() == 2


def test_numbers_without_an_order_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        bubble(Layout(pipeline=4, virtual_stages=2), "interleaved", 9)
    assert "parallel.pipeline_schedule=interleaved" in str(error.value)
    assert "9 micro batches" in str(error.value)
    assert "\n" not in str(error.value)
