"""The report of a dry run: what a person reads, and the same as plain rows."""

import io
import json

import pytest
from rich.console import Console

from fp8train.layout import Layout
from fp8train.planning.memory import GIB
from fp8train.planning.report import amount, merged, named, report, span
from tests.planning.conftest import MODELS, compose


def printed(layout: Layout, *overrides: str) -> tuple[str, dict]:  # type: ignore[type-arg]
    out = io.StringIO()
    rows = report(compose(*overrides), layout, Console(file=out, width=200))
    return out.getvalue(), rows


def test_llama3_405b_fits() -> None:
    config = compose("+recipe=llama3_405b_fp8")
    layout = Layout.of(config.parallel, 512)
    text, rows = printed(layout, "+recipe=llama3_405b_fp8")
    assert rows["world_size"] == 512
    most = max(row["total"] for row in rows["memory"])
    assert 30 * GIB < most < 0.6 * 80e9  # room for what the formulas leave out
    matrices = sum(row["parameters"] * len(row["ranks"]) for row in rows["memory"]) * 8
    assert matrices == pytest.approx(MODELS["llama3_405b"], rel=1e-3)
    assert rows["bubble"] == pytest.approx(15 / (512 + 15))
    assert "a step: 2,048 samples of 8,192 tokens" in text
    assert "activation checkpointing: full" in text
    assert "pipeline bubble 2.8%: 1f1b, 16 stages, 512 micro batches" in text
    for group in ("tensor", "shard"):
        assert any(line.split()[:2] == [group, "all"] for line in text.splitlines())
    assert max(map(len, text.splitlines())) < 200


def test_a_narrow_terminal_gets_whole_tables() -> None:
    """No cell is cut or wrapped at 80 columns; what has no room there is said, and left out."""
    config, out = compose("+recipe=llama3_405b_fp8"), io.StringIO()
    layout = Layout.of(config.parallel, 512)
    report(config, layout, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    (total,) = (line for line in lines if line.split()[:1] == ["total"])
    assert total.split()[1::2] == ["39.8", "33.7–37.1", "29.6", "33.0"]
    assert any("one by one in a terminal of" in line for line in lines)
    wide, _ = printed(layout, "+recipe=llama3_405b_fp8")
    assert "attention input, for wgrad" in wide and "terminal" not in wide


def test_rows_are_plain() -> None:
    text, rows = printed(Layout(shard=2), "trainer.global_batch_size=32")
    assert json.loads(json.dumps(rows)) == rows
    assert rows["memory"][0]["ranks"] == [0]
    assert "bubble" not in text
    assert {row["what"] for row in rows["communication"]} == {"weights", "gradients"}


def test_one_rank() -> None:
    text, rows = printed(Layout())
    assert "one rank: nothing to send" in text
    assert rows["communication"] == []
    assert rows["layout"]["tensor"] == 1
    assert "1.1 M" in text


def test_every_kind_of_rank_has_its_rows() -> None:
    _, rows = printed(Layout(pipeline=4), "trainer.global_batch_size=64")
    places = sorted(place for row in rows["memory"] for place in row["ranks"])
    assert places == [0, 1, 2, 3]
    sends = {
        place: row["count"]
        for row in rows["communication"]
        if row["what"] == "hidden states"
        for place in row["ranks"]
    }
    assert sends == {0: 8, 1: 8, 2: 8}


def test_words() -> None:
    layout = Layout(pipeline=6)
    assert merged(["a", "b", "b", "a"]) == [("a", [0, 3]), ("b", [1, 2])]
    assert named(layout, [0]) == "pipeline 0"
    assert named(layout, [1, 2, 3, 5]) == "pipeline 1 to 3, 5"
    assert named(layout, list(range(6))) == "all ranks"
    assert [amount(size) for size in (0, 512, 2048, 3 << 20, 3 * GIB, 48 * GIB, 2000 * GIB)] == [
        *("0", "512 B", "2.00 KiB", "3.00 MiB", "3.00 GiB", "48.0 GiB", "2,000 GiB")
    ]
    assert span([GIB, GIB]) == "1.00 GiB"
    assert span([3 * GIB, GIB]) == "1.00–3.00 GiB"
    assert span([3 * GIB, GIB // 2]) == "512 MiB–3.00 GiB"
