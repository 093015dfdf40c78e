"""Gaps, gates and refusals of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8train.analysis.compare import Comparison, compare, relative_gap, smooth
from fp8train.analysis.runs import load_run
from fp8train.config import ConfigError

MakeRun = Callable[..., Path]


def compared(candidate: Path, baseline: Path, max_gap: float = 0.01) -> Comparison:
    return compare(load_run(candidate), load_run(baseline), max_gap)


def test_the_gap_is_signed_and_relative_to_the_baseline() -> None:
    assert relative_gap(2.02, 2.0) == pytest.approx(0.01)
    assert relative_gap(1.98, 2.0) == pytest.approx(-0.01)
    assert math.isnan(relative_gap(math.nan, 2.0))
    assert math.isnan(relative_gap(2.0, 0.0))


def test_smoothing_is_an_ema_without_the_pull_of_zero() -> None:
    smoothed = smooth({1: 5.0, 2: 3.0, 4: 1.0})
    weights = [0.9 * 0.9, 0.9, 1.0]
    assert smoothed[1] == pytest.approx(5.0)
    assert smoothed[2] == pytest.approx((0.9 * 5 + 3) / 1.9)
    assert smoothed[4] == pytest.approx((weights[0] * 5 + weights[1] * 3 + 1) / sum(weights))


def test_a_nan_stays_in_the_smoothed_loss() -> None:
    assert [math.isnan(loss) for loss in smooth({1: 1.0, 2: math.nan, 3: 1.0}).values()] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("final", "passed"), [(2.0199, True), (2.0201, False), (2.0, True), (1.9, True)]
)
def test_the_gate_is_at_one_percent(make_run: MakeRun, final: float, passed: bool) -> None:
    candidate = make_run("a", "fp8_current", summary={"final_validation_loss": final})
    result = compared(candidate, make_run("b", summary={"final_validation_loss": 2.0}))
    assert result.validation_gap == pytest.approx(final / 2 - 1)
    assert result.passed is passed
    assert [gate.passed for gate in result.gates] == [passed]


def test_a_planted_gap_is_found_in_every_measure(make_run: MakeRun) -> None:
    result = compared(make_run("a", "fp8_current", gap=0.03, seconds=0.3), make_run("b"))
    assert not result.passed
    assert result.validation_gap == pytest.approx(0.03, abs=0.002)
    assert [point.step for point in result.training] == [40, 80, 120, 160, 200]
    # the average of decay 0.9 lags by some ten steps, and the planted gap grows linearly
    assert result.training[-1].gap == pytest.approx(0.03, abs=0.006)
    assert result.training[0].gap < result.training[-1].gap
    assert [point.step for point in result.validation] == [0, 50, 100, 150, 200]
    assert result.validation[2].gap == pytest.approx(0.015, abs=0.002)
    assert result.time_ratio == pytest.approx(1.5)


@pytest.mark.parametrize("broken", ["candidate", "baseline"])
@pytest.mark.parametrize("loss", ["loss", "validation_loss"])
def test_a_loss_that_is_not_finite_fails_the_gate(
    make_run: MakeRun, broken: str, loss: str
) -> None:
    folders = {"candidate": make_run("a", "fp8_current"), "baseline": make_run("b")}
    metrics = folders[broken] / "metrics.jsonl"
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    for line in lines:
        if line["step"] == 100 and loss in line:
            line[loss] = math.nan
    metrics.write_text("\n".join(json.dumps(line) for line in lines))
    result = compared(folders["candidate"], folders["baseline"])
    assert abs(result.validation_gap) < 0.01
    assert not result.passed
    word = "training loss" if loss == "loss" else "validation loss"
    assert result.gates[0].reason == f"the {broken} has no finite {word} at step 100"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_missing_final_loss_fails_the_gate(make_run: MakeRun, value: float | None) -> None:
    candidate = make_run("a", "fp8_current", summary={"final_validation_loss": value})
    result = compared(candidate, make_run("b"))
    assert not result.passed
    assert math.isnan(result.validation_gap)


def test_a_run_without_training_losses_fails_the_gate(make_run: MakeRun) -> None:
    candidate = make_run("a", "fp8_current")
    (candidate / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 5.8}\n')
    result = compared(candidate, make_run("b"))
    assert not result.passed
    assert result.training == []


def refusal(candidate: Path, baseline: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        compared(candidate, baseline)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unequal_fingerprints_are_refused_with_both_and_the_key(make_run: MakeRun) -> None:
    ours = make_run(
        "a",
        "fp8_current",
        config={"trainer": {"seed": 7}, "data": {"path": "mine.txt"}},
        summary={"data_fingerprint": "aaaa"},
    )
    message = refusal(ours, make_run("b", summary={"data_fingerprint": "bbbb"}))
    assert "fingerprint aaaa of a, bbbb of b" in message
    assert "trainer.seed 7 and 1234" in message
    assert "data.path mine.txt and None" in message
    assert "trainer.sequence_length" not in message


def test_unequal_texts_under_equal_configurations_are_explained(make_run: MakeRun) -> None:
    ours = make_run("a", "fp8_current", summary={"data_fingerprint": "aaaa"})
    assert "the texts differ, as between two machines" in refusal(ours, make_run("b"))


def test_a_missing_fingerprint_proves_nothing(make_run: MakeRun) -> None:
    nothing = {"data_fingerprint": None}
    message = refusal(make_run("a", "fp8_current", summary=nothing), make_run("b", summary=nothing))
    assert "a run without one can't be compared" in message


@pytest.mark.parametrize("key", ["seed", "sequence_length", "global_batch_size"])
def test_another_order_of_the_same_data_is_refused(make_run: MakeRun, key: str) -> None:
    ours = make_run("a", "fp8_current", config={"trainer": {key: 32}})
    assert f"trainer.{key} 32 and " in refusal(ours, make_run("b"))


def test_the_same_data_under_another_path_is_accepted(make_run: MakeRun) -> None:
    ours = make_run("a", "fp8_current", config={"data": {"path": "../mine.txt"}})
    result = compared(ours, make_run("b", config={"data": {"path": "mine.txt"}}))
    assert {item.key for item in result.differences} == {"precision.recipe", "data.path"}
    assert not any("also differ" in note for note in result.notes)


def test_other_models_lengths_and_the_same_folder_are_refused(make_run: MakeRun) -> None:
    baseline = make_run("b", steps=20)
    wider = make_run("wider", "fp8_current", steps=20, config={"model": {"hidden_size": 256}})
    assert "model.hidden_size 256 and 128" in refusal(wider, baseline)
    longer = make_run("longer", "fp8_current", steps=40)
    assert "longer has 40 steps and b 20" in refusal(longer, baseline)
    assert "is given twice" in refusal(baseline, baseline.parent / "." / "b")


def test_the_notes_say_what_the_numbers_cannot_show(make_run: MakeRun) -> None:
    ours = make_run("a", "fp8_current", gap=-0.05, config={"optimizer": {"lr": 0.1}})
    baseline = make_run("b", summary={"gradient_reduction": "e5m2"})
    notes = "\n".join(compared(ours, baseline).notes)
    assert "409,600 tokens" in notes
    assert "200 billion tokens" in notes
    assert "also differ in optimizer.lr 0.1 and 0.0003" in notes
    assert "look for a fault in the baseline" in notes
    assert "baseline reduces its gradients in e5m2" in notes
    assert "say nothing about a GPU" in notes


def test_enough_tokens_need_no_caveat(make_run: MakeRun) -> None:
    enough = {"tokens": 300_000_000_000}
    result = compared(make_run("a", "fp8_current", summary=enough), make_run("b", summary=enough))
    assert not any("200 billion" in note for note in result.notes)
