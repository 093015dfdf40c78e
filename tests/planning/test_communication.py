"""Traffic by hand for a small model, and the wire's bytes against the codecs' own."""

import pytest

from fp8train.layout import Layout
from fp8train.planning.communication import Traffic, communication
from tests.planning.conftest import MODELS, compose

BATCH = ("trainer.global_batch_size=16", "trainer.micro_batch_size=2")
ROWS, D = 2 * 128, 128  # tokens of a micro batch; hidden size of llama_tiny, whose F is 512
BLOCK, ENDS = 246_016, 2 * 320 * 128 + 128


def traffic(layout: Layout, *overrides: str, pipeline: int = 0) -> dict[tuple[str, str], Traffic]:
    """Rows by group and what."""
    rows = communication(compose(*BATCH, *overrides), layout, pipeline)
    found = {(row.group, row.what): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_one_rank_sends_nothing() -> None:
    for precision in ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise"):
        assert traffic(Layout(), f"precision={precision}") == {}


def test_sequence_parallelism_by_hand() -> None:
    """Two ranks, so half of each tensor; 8 micro batches of 4 blocks."""
    rows = traffic(Layout(tensor=2, sequence=True), "precision=bf16")
    half = ROWS * D * 2 // 2
    for part in ("attention", "MLP"):
        for what, collective in (
            (f"{part} input", "all-gather"),
            (f"{part} output", "reduce-scatter"),
            (f"{part} output gradient", "all-gather"),
            (f"{part} input gradient", "reduce-scatter"),
        ):
            row = rows.pop(("tensor", what))
            assert row == Traffic("tensor", what, collective, "bf16", 32, 32 * half)
    for what, collective in (
        ("embedding", "reduce-scatter"),
        ("embedding gradient", "all-gather"),
        ("head input", "all-gather"),
        ("head input gradient", "reduce-scatter"),
    ):
        row = rows.pop(("tensor", what))
        assert row == Traffic("tensor", what, collective, "bf16", 8, 8 * half)
    loss = rows.pop(("tensor", "cross entropy"))  # one number a token, then two
    assert loss == Traffic("tensor", "cross entropy", "all-reduce", "fp32", 16, 8 * 3 * ROWS * 4)
    norms = rows.pop(("tensor", "norm gradients"))
    assert norms == Traffic("tensor", "norm gradients", "all-reduce", "fp32", 9, 9 * D * 4)
    assert not rows


def test_tensor_parallelism_alone_reduces_whole_tensors() -> None:
    """Four ranks: an all-reduce sends 3/2 of the tensor."""
    rows = traffic(Layout(tensor=4), "precision=bf16", "model.num_kv_heads=4")
    sent = ROWS * D * 2 * 3 // 2
    for part in ("attention", "MLP"):
        for what in (f"{part} output", f"{part} input gradient"):
            row = rows.pop(("tensor", what))
            assert (row.collective, row.count, row.bytes) == ("all-reduce", 32, 32 * sent)
    assert {what for _, what in rows} == {"embedding", "head input gradient", "cross entropy"}


def test_inputs_travel_in_eight_bits() -> None:
    long = "trainer.sequence_length=256"  # a rank has as many tokens as a block
    rows = traffic(Layout(tensor=2, sequence=True), "precision=fp8_block", long)
    tokens = 2 * ROWS
    for part in ("attention", "MLP"):
        row, again = rows["tensor", f"{part} input"], rows["tensor", f"{part} input, for wgrad"]
        assert (row.dtype, row.count, row.bytes) == ("e4m3", 32, 32 * tokens * D // 2)
        assert (again.dtype, again.count, again.bytes) == ("e4m3", 32, row.bytes)
        # 1×128 blocks: a scale a row; 128×1: a scale for each column and 128 rows.
        assert rows["tensor", f"{part} input scales"].bytes == 32 * tokens * 4 // 2
        assert rows["tensor", f"{part} input scales, for wgrad"].bytes == 32 * 4 * D * 4 // 2
        assert rows["tensor", f"{part} output gradient"].dtype == "bf16"
    assert rows["tensor", "head input"].dtype == "bf16"
    current = traffic(Layout(tensor=2, sequence=True), "precision=fp8_current")
    assert not [what for _, what in current if "scales" in what]  # each rank has the tensor's


def test_a_copy_in_bf16_travels_as_such() -> None:
    rows = traffic(Layout(tensor=2, sequence=True), "precision=fp8_rowwise_bf16_wgrad")
    assert rows["tensor", "MLP input"].dtype == "e4m3"
    assert rows["tensor", "MLP input, for wgrad"].bytes == 32 * ROWS * D * 2 // 2


def test_tokens_that_blocks_do_not_divide_travel_in_bf16() -> None:
    rows = traffic(Layout(tensor=2, sequence=True), "precision=fp8_block")
    assert rows["tensor", "MLP input"].dtype == "bf16"


def test_linears_that_do_not_agree_take_bf16() -> None:
    mixed = ("precision=fp8_current", "precision.exclude=[*.k_proj]")
    rows = traffic(Layout(tensor=2, sequence=True), *mixed)
    assert rows["tensor", "attention input"].dtype == "bf16"
    assert ("tensor", "attention input, for wgrad") not in rows
    assert rows["tensor", "MLP input"].dtype == "e4m3"
    te = ("precision=fp8_current", "precision.backend=transformer_engine")
    assert traffic(Layout(tensor=2, sequence=True), *te)["tensor", "MLP input"].dtype == "bf16"


def test_tied_embeddings_exchange_their_gradients() -> None:
    for pipeline in (0, 1, 2):
        layout, tied = Layout(pipeline=3, shard=2), "model.tie_embeddings=true"
        row = traffic(layout, tied, pipeline=pipeline).get(
            ("pipeline", "tied embedding's gradient")
        )
        assert row is None if pipeline == 1 else row is not None
        assert row is None or (row.collective, row.bytes) == ("send", 4 * 320 * 128 // 2)


def test_more_stages_than_stay_are_gathered_again() -> None:
    given = ("model.num_layers=10", "parallel.pipeline_schedule=interleaved", "precision=bf16")
    few = traffic(Layout(pipeline=2, virtual_stages=2, shard=2), *given)["shard", "weights"]
    many = traffic(Layout(pipeline=2, virtual_stages=5, shard=2), *given)["shard", "weights"]
    assert few.count == 5 + 1  # its blocks, and the embedding
    assert many.count > 5 + 1


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("sequence", [True, False])
def test_recomputation_stops_before_the_last_sum(mode: str, sequence: bool) -> None:
    given = ("precision=bf16", f"parallel.activation_checkpoint={mode}")
    rows = traffic(Layout(tensor=2, context=2, sequence=sequence), *given)
    again = {what.removesuffix(", recomputed") for _, what in rows if what.endswith("recomputed")}
    gathers = {"attention input", "MLP input"} if sequence else set()
    assert again == gathers | {"attention output", "keys and values"}


def test_context_parallelism_by_hand() -> None:
    """Four ranks of a quarter of the tokens; two key/value heads of 32, in BF16."""
    rows = traffic(Layout(context=4), "precision=bf16")
    whole = ROWS * 64 * 2
    keys, grads = rows["context", "keys and values"], rows["context", "their gradients"]
    assert (keys.collective, keys.count, keys.bytes) == ("all-gather", 32, 2 * 32 * whole * 3 // 4)
    assert (grads.collective, grads.count, grads.bytes) == ("all-to-all", 32, keys.bytes)


def test_pipeline_by_hand() -> None:
    """Eight micro batches: ends of the pipeline send one way, the middle both."""
    layout = Layout(pipeline=4, tensor=2, sequence=True)
    part = ROWS * D * 2 // 2
    sent = [traffic(layout, pipeline=stage) for stage in range(4)]
    for stage, rows in enumerate(sent):
        forward, backward = (
            rows.get(("pipeline", what)) for what in ("hidden states", "their gradients")
        )
        for row, there in ((forward, stage < 3), (backward, stage > 0)):
            assert (row is not None) == there
            assert row is None or (row.collective, row.count, row.bytes) == ("send", 8, 8 * part)
    virtual = Layout(pipeline=2, virtual_stages=2)
    counts = [traffic(virtual, pipeline=rank)["pipeline", "hidden states"].count for rank in (0, 1)]
    assert counts == [16, 8]


def test_weights_are_gathered_for_forward_and_backward() -> None:
    rows = traffic(Layout(shard=2), "precision=bf16", "trainer.global_batch_size=32")
    gathers = rows["shard", "weights"]
    assert gathers.count == 8 * (1 + 2 * 4)
    assert gathers.bytes == pytest.approx(8 * 2 * (ENDS + 2 * 4 * BLOCK) / 2, rel=1e-3)
    stages = traffic(Layout(pipeline=2, shard=2), "precision=bf16", pipeline=1)["shard", "weights"]
    assert stages.count == 3
    assert stages.bytes == pytest.approx(2 * (2 * BLOCK + 320 * 128 + 128) / 2, rel=1e-3)


@pytest.mark.parametrize(
    "given, wire, width",
    [
        ("precision=bf16", "fp32", 4.0),
        ("precision=fp8_current", "e5m2", 129 / 128),
        ("gradients.reduce=e4m3 gradients.scaling=tensor", "e4m3", 1.0),
        ("gradients.reduce=bf16", "bf16", 2.0),
    ],
)
def test_gradients_travel_once_a_step(given: str, wire: str, width: float) -> None:
    rows = traffic(Layout(shard=4), *given.split())
    gradients = rows["shard", "gradients"]
    assert (gradients.collective, gradients.dtype, gradients.count) == ("all-to-all", wire, 5)
    assert gradients.bytes == pytest.approx(width * MODELS["llama_tiny"] * 3 / 4, rel=1e-3)


def test_each_micro_batch_s_gradients_travel() -> None:
    given = ("trainer.global_batch_size=64", "gradients.accumulate=sharded")
    assert traffic(Layout(shard=2), *given)["shard", "gradients"].count == 16 * 5


def test_the_mean_travels_between_replicas() -> None:
    rows = traffic(Layout(shard=2, replicate=4), "precision=fp8_current")
    inside = rows["shard", "gradients"]
    assert (inside.collective, inside.dtype) == ("all-to-all", "bf16")
    assert inside.bytes == pytest.approx(2 * MODELS["llama_tiny"] / 2, rel=1e-3)
    there, back = rows["replicate", "gradients"], rows["replicate", "mean gradients"]
    assert (there.collective, back.collective) == ("all-to-all", "all-gather")
    for row in (there, back):
        assert (row.dtype, row.count) == ("e5m2", 5)
        shard = MODELS["llama_tiny"] / 2
        assert row.bytes == pytest.approx(129 / 128 * shard * 3 / 4, rel=1e-3)


def test_a_ring_sends_as_much() -> None:
    rows = traffic(Layout(shard=4), "gradients.algorithm=ring")
    gradients = rows["shard", "gradients"]
    assert (gradients.collective, gradients.dtype, gradients.count) == ("send", "e5m2", 3 * 5)
    assert gradients.bytes == pytest.approx(MODELS["llama_tiny"] * 3 / 4, rel=1e-3)
    assert rows["shard", "gradients' amax"].count == 5


def amaxes(layout: Layout, *overrides: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(count, bytes) of a step's reductions of amaxes, in one micro batch of one block."""
    small = ("model.num_layers=1", "trainer.micro_batch_size=16")
    return {
        (group, what.removeprefix("amax of ")): (row.count, row.bytes)
        for (group, what), row in traffic(layout, *small, *overrides).items()
        if what.startswith("amax of")
    }


def test_amaxes_of_tensors_that_are_divided() -> None:
    """Two ranks send 4 bytes for a scalar."""
    given = "precision=fp8_current"
    # Inputs of o and down, all weights, output gradients of q, k, v, gate and up.
    assert amaxes(Layout(tensor=2), given) == {
        ("tensor", "inputs"): (2, 8),
        ("tensor", "weights"): (7, 28),
        ("tensor", "grad outputs"): (5, 20),
    }
    # And what comes from the residual stream, once for attention and once for the MLP.
    assert amaxes(Layout(tensor=2, sequence=True), given) == {
        ("tensor", "inputs"): (4, 16),
        ("tensor", "weights"): (7, 28),
        ("tensor", "grad outputs"): (5, 20),
    }
    assert amaxes(Layout(tensor=2, sequence=True), given, "precision.amax_groups=te") == {
        ("tensor", "inputs"): (2, 8),
    }
    assert amaxes(Layout(context=2), given) == {
        ("context", "inputs"): (7, 28),
        ("context", "grad outputs"): (7, 28),
    }
    assert amaxes(Layout(tensor=2, context=2), given) == {
        ("context", "inputs"): (5, 20),
        ("context × tensor", "inputs"): (2, 12),
        ("tensor", "weights"): (7, 28),
        ("context", "grad outputs"): (2, 8),
        ("context × tensor", "grad outputs"): (5, 30),
    }


def test_amaxes_are_taken_again_in_recomputation_and_weights_once_if_cached() -> None:
    full = amaxes(Layout(tensor=2), "precision=fp8_current", "parallel.activation_checkpoint=full")
    assert {what: count for (_, what), (count, _) in full.items()} == {
        "inputs": 4,
        "weights": 14,
        "grad outputs": 5,
    }
    cached = ("precision=fp8_current", "precision.cache_weights=true", "trainer.micro_batch_size=2")
    rows = traffic(Layout(tensor=2), "model.num_layers=1", *cached)
    assert rows["tensor", "amax of weights"].count == 7
    assert rows["tensor", "amax of inputs"].count == 2 * 8


def test_amaxes_of_other_shapes() -> None:
    assert amaxes(Layout(tensor=2, sequence=True, context=2), "precision=fp8_block") == {}
    nvfp4 = amaxes(Layout(tensor=2), "precision=nvfp4")
    assert nvfp4["tensor", "inputs"] == (4, 16)  # both copies have a scale of the tensor
    rows = amaxes(Layout(tensor=2), "precision=fp8_rowwise")
    # Rows of the row-wise input lie on both ranks: an amax for each of 16 · 128 tokens.
    assert rows["tensor", "inputs"] == (2, 2 * 4 * 16 * 128)


def test_delayed_scaling_shares_one_maximum_a_step() -> None:
    rows = traffic(
        Layout(shard=2, tensor=2), "precision=fp8_delayed", "precision.exclude=[*.o_proj]"
    )
    maximum = rows["shard × tensor", "amax histories"]
    assert (maximum.collective, maximum.count) == ("all-reduce", 1)
    assert maximum.bytes == 2 * 3 * (4 * 6 * 3 * 4) // 4
    assert not [what for _, what in rows if what.startswith("amax of")]
    stage = traffic(Layout(shard=2, pipeline=2), "precision=fp8_delayed", pipeline=1)
    assert stage["shard", "amax histories"].bytes == 2 * 7 * 3 * 4
