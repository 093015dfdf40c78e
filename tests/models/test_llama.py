"""The model: published sizes, rotary frequencies, causality, initial values."""

import math

import pytest
import torch
import yaml

from fp8train.config import Config, from_container
from fp8train.models.llama import AttentionCore, Llama, initial_std, rope_frequencies, rotate
from fp8train.parallel.parallelize import initialize, llama
from tests.conftest import REPO


def configured(name: str) -> Config:
    model = yaml.safe_load((REPO / f"configs/model/{name}.yaml").read_text())
    return from_container({"model": model, "precision": {"recipe": "bf16"}})


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("llama3_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = llama(configured(name).model)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_tiny_is_tiny() -> None:
    with torch.device("meta"):
        model = llama(configured("llama_tiny").model)
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 4e6


def test_rope_scaling_of_llama_3_1() -> None:
    plain = rope_frequencies(128, 500000.0)
    scaled = rope_frequencies(128, 500000.0, factor=8.0)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert ((scaled < plain) & (scaled > plain / 8))[between].all() and between.any()


def test_rotation_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16)
    angles = torch.outer(torch.arange(12).float(), rope_frequencies(16, 10000.0))
    cos, sin = angles.cos(), angles.sin()
    turned_q, turned_k = (rotate(x.expand(1, 1, 12, 16), cos, sin)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.t()
    for distance in range(11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(12))


def test_attention_is_causal_and_grouped() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 6, 4) for heads in (4, 2, 2))
    out = AttentionCore()(q, k, v)
    for head in range(4):
        for t in range(6):
            weights = (q[0, head, t] @ k[0, head // 2, : t + 1].t() / 2).softmax(-1)
            torch.testing.assert_close(out[0, head, t], weights @ v[0, head // 2, : t + 1])


def small(**changes: object) -> Llama:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    return Llama(**sizes, num_heads=4, num_kv_heads=2, **changes)


def test_later_tokens_don_t_change_earlier_logits() -> None:
    model = small()
    tokens = torch.randint(0, 50, (1, 10))
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_tied_embeddings_share_one_parameter() -> None:
    tied, untied = small(tie_embeddings=True), small()
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert sum(p.numel() for p in untied.parameters()) - 50 * 32 == sum(
        p.numel() for p in tied.parameters()
    )


def test_initial_values() -> None:
    config = configured("llama_tiny").model
    one, two, other = (llama(config) for _ in range(3))
    initialize(one, config, 1)
    initialize(two, config, 1)
    initialize(other, config, 2)
    for (name, p), q, r in zip(
        one.named_parameters(), two.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q)
        std = initial_std(name, config.num_layers, config.init_std)
        if std is None:
            assert (p == 1).all() and "norm" in name
        else:
            assert not torch.equal(p, r)
            assert p.std().item() == pytest.approx(std, rel=0.05)
    assert initial_std("layers.0.mlp.down_proj.weight", 8, 0.02) == pytest.approx(0.005)
