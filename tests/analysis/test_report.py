"""What a comparison shows and writes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from fp8train.analysis.compare import Comparison, compare
from fp8train.analysis.report import markdown_table, percent, print_table, times, write_report
from fp8train.analysis.runs import load_run
from fp8train.config import ConfigError

MakeRun = Callable[..., Path]


@pytest.fixture
def comparison(make_run: MakeRun) -> Comparison:
    candidate = load_run(make_run("fp8-run", "fp8_current", gap=0.004, seconds=0.3))
    return compare(candidate, load_run(make_run("bf16-run")), 0.01)


def test_numbers_that_are_none_show_as_a_dash() -> None:
    assert percent(0.00251, sign=True) == "+0.25%"
    assert percent(-0.00001, sign=True) == "+0.00%"
    assert percent(math.nan) == times(math.nan) == "-"


def test_the_console_shows_one_row_a_metric(comparison: Comparison) -> None:
    stream = io.StringIO()
    print_table(comparison, Console(file=stream, width=80))
    text = stream.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:5]]
        for line in text.splitlines()
        if line.startswith("│")
    }
    assert cells["gradient reduction"] == ["e5m2", "fp32", ""]
    assert cells["seconds a step, median"] == ["0.3000", "0.2000", "1.50x"]
    assert cells["block GEMM FLOPs in FP8"] == ["100.0%", "0.0%", ""]
    assert cells["final validation loss"][2] == percent(comparison.validation_gap, sign=True)
    assert cells["skipped steps"] == ["0", "0", ""]
    assert "PASS  validation_gap" in text


def test_the_files_agree_with_the_comparison(comparison: Comparison, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "deep"
    write_report(comparison, folder, [("train the candidate", "torchrun launch/train.py a=1")])
    result = json.loads((folder / "comparison.json").read_text())
    assert result["passed"] is True
    assert result["validation_gap"] == pytest.approx(comparison.validation_gap)
    assert result["gates"][0]["limit"] == 0.01
    assert result["candidate"]["gradient_reduction"] == "e5m2"
    assert result["baseline"]["gradient_reduction"] == "fp32"
    assert [point["step"] for point in result["validation"]] == [0, 50, 100, 150, 200]
    report = (folder / "report.md").read_text()
    assert "](loss.png)" in report
    assert "**Pass** (validation_gap)" in report
    assert "`precision.recipe`" in report
    assert "torchrun launch/train.py a=1" in report
    assert "200 billion tokens" in report
    picture = imread(folder / "loss.png")
    assert picture.shape[:2] == (1050, 1350)
    assert picture[..., :3].std() > 0.05  # not a blank page


def test_a_broken_run_still_gets_strict_json_and_a_picture(
    make_run: MakeRun, tmp_path: Path
) -> None:
    candidate = make_run("a", "fp8_current", summary={"final_validation_loss": math.nan})
    metrics = candidate / "metrics.jsonl"
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    for line in lines:
        line |= {key: math.nan for key in ("loss", "validation_loss") if key in line}
    metrics.write_text("\n".join(json.dumps(line) for line in lines))
    result = compare(load_run(candidate), load_run(make_run("b")), 0.01)
    write_report(result, tmp_path / "out")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "out" / "comparison.json").read_text()
    written = json.loads(text, parse_constant=refuse)
    assert written["passed"] is False
    assert written["validation_gap"] is None
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    assert "**Fail**" in (tmp_path / "out" / "report.md").read_text()


def test_a_folder_that_cannot_be_made_is_one_line(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compare.dir=.*file.* can't be made"):
        write_report(comparison, tmp_path / "file" / "out")


def test_markdown_tables_are_aligned() -> None:
    assert markdown_table(("key", "n"), [("a", "1,000"), ("long", "2")]).splitlines() == [
        "| key  |     n |",
        "| ---- | ----: |",
        "| a    | 1,000 |",
        "| long |     2 |",
    ]
