"""Layouts through the real command: resuming on another one, dry runs, compiled blocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.conftest import Launcher

TIED = ("model=llama_tiny", "model.tie_embeddings=true", "schedule.name=constant")
PIPELINE = ("parallel.tensor=2", "parallel.pipeline=2")


def losses(launcher: Launcher, name: str, *layouts: tuple[int, tuple[str, ...]]) -> list[float]:
    """The losses of six steps: of one layout, or of two with three steps each."""
    for number, (processes, layout) in enumerate(layouts, 1):
        done = launcher.train(
            name,
            *(*TIED, *layout, "precision=fp8_delayed", "gradients.reduce=fp32"),
            *(
                f"trainer.steps={6 * number // len(layouts)}",
                f"resume={'auto' if number > 1 else 'none'}",
            ),
            processes=processes,
        )
        assert done.code == 0, done.err
    return [line["loss"] for line in done.lines("loss")]


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(launcher: Launcher) -> None:
    """Masters, moments and amax histories find their places, the tied embedding's too."""
    alone = losses(launcher, "alone", (0, ()))
    apart = losses(launcher, "apart", (4, PIPELINE), (2, ("parallel.context=2",)))
    together = losses(launcher, "together", (2, ("parallel.context=2",)), (4, PIPELINE))
    # Another history or moment moves the loss by more than a hundredth here.
    np.testing.assert_allclose(apart, alone, rtol=2e-3)
    np.testing.assert_allclose(together, alone, rtol=2e-3)


@pytest.mark.slow
def test_dry_run_of_the_largest_recipe(launcher: Launcher) -> None:
    done = launcher.train(
        "dry", "+recipe=llama3_405b_fp8", "dry_run=true", "world_size=512", small=False
    )
    assert done.code == 0, done.err
    assert not done.folder.exists()
    for text in ("pipeline 16 × shard 4 × tensor 8", "pipeline bubble 2.8%", "a rank of each kind"):
        assert text in done.out


def test_dry_run_of_a_small_layout(launcher: Launcher) -> None:
    sizes = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2")
    done = launcher.train("dry", "model=llama_tiny", *sizes, "dry_run=true", "world_size=8")
    assert done.code == 0, done.err
    assert "pipeline 2 × context 2 × tensor 2" in done.out and "a rank of each kind" in done.out


def test_a_dry_run_warns_as_a_run_does(launcher: Launcher) -> None:
    ring = ("gradients.algorithm=ring", "gradients.reduce=e5m2", "dry_run=true", "world_size=64")
    done = launcher.train("dry", "model=llama_tiny", "trainer.global_batch_size=128", *ring)
    assert done.code == 0, done.err
    assert "gradients.algorithm=ring" in done.out and "64 ranks" in done.out


def test_world_size_is_for_dry_runs(launcher: Launcher) -> None:
    done = launcher.train("size", "model=llama_tiny", "world_size=8")
    assert done.code == 2 and "dry_run=true" in done.err and len(done.err.splitlines()) == 1


def compiled(recipe: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Losses and gradient norms with plain blocks and with compiled ones."""
    from tests.parallel import test_layouts as layouts

    return tuple(
        layouts.losses(layouts.small(recipe, tensor=2, compile=on), 2, steps=2)
        for on in (False, True)
    )  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "bound"), [("fp32", 1e-5), ("fp8_current", 5e-3)])
def test_compiled_blocks_train_the_same_model(recipe: str, bound: float) -> None:
    """Fused kernels round less often: in BF16 by an ulp, which FP8 makes a step of its grid."""
    for plain, fused in on_ranks(2, compiled, recipe, timeout=400):
        np.testing.assert_allclose(fused, plain, rtol=bound)
