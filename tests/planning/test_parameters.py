"""Parameters of a rank: by hand for a small model, and in sum the published counts."""

from pathlib import Path

import pytest
import torch

from fp8train.layout import Layout, padded_vocabulary
from fp8train.parallel.parallelize import llama
from fp8train.parallel.pipeline import keep_stage
from fp8train.planning.parameters import (
    ROOT,
    Weight,
    plans,
    rank_weights,
    stage_weights,
    units,
)
from tests.planning.conftest import MODELS, compose

LAYOUTS = [
    Layout(),
    Layout(tensor=8, sequence=True),
    Layout(pipeline=4, tensor=2, shard=3),
    Layout(pipeline=2, virtual_stages=2, tensor=4, context=2),
]


def test_every_model_that_is_shipped_is_counted(repo: Path) -> None:
    assert sorted(path.stem for path in (repo / "configs/model").glob("*.yaml")) == sorted(MODELS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama_tiny"])
def test_the_ranks_together_hold_the_published_count(name: str, layout: Layout) -> None:
    model = compose(f"model={name}").model
    matrices = norms = 0
    for pipeline in range(layout.pipeline):
        for weight in rank_weights(model, layout, pipeline):
            if weight.divided:
                matrices += layout.tensor * weight.size
            else:
                norms += weight.size
    head = padded_vocabulary(model) * model.hidden_size
    twice = head if model.tie_embeddings and layout.stages > 1 else 0
    assert matrices + norms - twice == MODELS[name]


def test_llama_tiny_by_hand() -> None:
    model = compose().model  # D 128, F 512, four heads of 32, two for keys and values, V 320
    block = 2 * 128 + 128 * (128 + 64 + 64 + 128) + 3 * 128 * 512
    whole = Layout()
    sizes = {
        unit: sum(weight.size for weight in part)
        for unit, part in units(rank_weights(model, whole, 0)).items()
    }
    assert sizes.pop(ROOT) == 2 * 320 * 128 + 128
    assert list(sizes.values()) == [block] * 4
    assert 4 * block + 2 * 320 * 128 + 128 == MODELS["llama_tiny"]
    half = Layout(tensor=2, pipeline=2)
    halved = 2 * 128 + 64 * (128 + 64 + 64 + 128) + 3 * 64 * 512
    first, last = (rank_weights(model, half, pipeline) for pipeline in (0, 1))
    assert sum(w.size for w in first) == 2 * halved + 160 * 128
    assert sum(w.size for w in last) == 2 * halved + 160 * 128 + 128


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("stages", [1, 3])
def test_names_and_shapes_are_those_of_the_model(stages: int, tied: str) -> None:
    config = compose("model.vocab_size=300", f"model.tie_embeddings={tied}").model
    layout = Layout(pipeline=stages)
    config.vocab_size = padded_vocabulary(config)
    seen = 0
    for stage in range(stages):
        with torch.device("meta"):
            model = llama(config)
        weights = {
            f"{w.name}.weight": (w.rows, w.columns) for w in stage_weights(config, layout, stage)
        }
        numbers = [int(name.split(".")[1]) for name in weights if name.startswith("layers.")]
        if stages > 1:
            keep_stage(
                model,
                range(min(numbers), max(numbers) + 1),
                first=stage == 0,
                last=stage == stages - 1,
            )
        real = {name: (*p.shape, 1)[:2] for name, p in model.named_parameters()}
        assert weights == real
        seen += len(set(numbers))
    assert seen == config.num_layers


@pytest.mark.parametrize("rows, ranks", [(128, 4), (5, 4), (3, 8), (320, 3), (1, 2)])
def test_the_largest_shard_is_the_first_chunk_of_rows(rows: int, ranks: int) -> None:
    weight = Weight("w", rows, 7, ROOT, True)
    assert weight.shard(ranks) == torch.empty(rows, 7).chunk(ranks)[0].numel()


def test_vocabulary_is_padded() -> None:
    model = compose("model.vocab_size=300").model
    embedding = stage_weights(model, Layout(tensor=2), 0)[0]
    assert (embedding.name, embedding.rows) == ("embed_tokens", 160)


def test_plans_are_the_configured_ones() -> None:
    config = compose("precision=fp8_block", "precision.bf16_first_blocks=1")
    assert len(plans(config)) == 3 * 7
    assert "layers.0.mlp.up_proj" not in plans(config)
    assert "lm_head" not in plans(config)
    assert plans(compose("precision=bf16")) == {}
