"""launch/train.py end to end: layouts agree, resumes are exact, files are as documented."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.training.conftest import Finished, Launcher

pytestmark = pytest.mark.slow
FIELDS = {
    *("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second"),
    *("step_seconds", "peak_memory_bytes", "model_tflops_per_device", "bytes_reduced"),
    "skipped_steps",
}


@pytest.fixture(scope="module")
def one(launcher: Launcher) -> Finished:
    """FP32 on one process, without torchrun."""
    done = launcher.train("one", "precision=fp32")
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def delayed(launcher: Launcher) -> Finished:
    """Delayed scaling on two processes, with a checkpoint in the middle and offline W&B."""
    done = launcher.train(
        "delayed",
        *("precision=fp8_delayed", "checkpoint.every=3", "logging.wandb.mode=auto"),
        processes=2,
    )
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize("tied", [False, True])
def test_two_processes_train_the_same_model_as_one(
    launcher: Launcher, one: Finished, tied: bool
) -> None:
    overrides = ["precision=fp32", f"model.tie_embeddings={tied}"]
    alone = launcher.train("one-tied", *overrides) if tied else one
    two = launcher.train(f"two-{tied}", *overrides, "trainer.micro_batch_size=4", processes=2)
    assert two.code == 0, two.err
    for key in ("loss", "grad_norm", "validation_loss"):
        ours, theirs = two.lines(key), alone.lines(key)
        assert len(ours) == len(theirs) == (3 if key == "validation_loss" else 6)
        for a, b in zip(ours, theirs, strict=True):
            assert a[key] == pytest.approx(b[key], rel=1e-5), (key, a["step"])
    assert two.lines("loss")[-1]["loss"] < 0.9 * two.lines("loss")[0]["loss"]


def test_the_run_folder(delayed: Finished) -> None:
    config = yaml.safe_load((delayed.folder / "config.yaml").read_text())
    assert config["precision"]["recipe"] == "fp8_delayed"
    assert config["run"]["name"] == "delayed"
    environment = json.loads((delayed.folder / "environment.json").read_text())
    assert {"versions", "hardware", "git"} <= environment.keys()
    assert environment["versions"]["torch"]
    steps = delayed.lines("loss")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() == FIELDS for line in steps)
    assert [line["tokens"] for line in steps] == [256 * step for step in range(1, 7)]
    assert [line["step"] for line in delayed.lines("validation_loss")] == [0, 3, 6]
    assert delayed.summary["status"] == "finished"
    assert delayed.summary["gradient_reduction"] == "e5m2"
    assert delayed.summary["world_size"] == 2
    assert (
        delayed.summary["final_validation_loss"]
        == delayed.lines("validation_loss")[-1]["validation_loss"]
    )
    checkpoints = sorted(path.name for path in (delayed.folder / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_00000003", "step_00000006"]


def test_bytes_on_the_wire(delayed: Finished) -> None:
    """One rank of two sends half of its gradients: a byte each, and a scale a block of 128."""
    parameters = delayed.summary["parameters"]
    sent = {line["bytes_reduced"] for line in delayed.lines("loss")}
    assert len(sent) == 1
    assert 1.0 < sent.pop() / (parameters / 2) < 1.05  # padding of each bucket's shard to 128


def test_the_banner_and_progress(delayed: Finished) -> None:
    assert "emulated (right numerics, no speed-up)" in delayed.out
    assert "fingerprint" in delayed.out
    assert "offline; wandb sync outputs/delayed/wandb/offline-run-*" in delayed.out
    assert "E4M3/E4M3/E5M2" in delayed.out
    assert delayed.out.count("validation loss") == 3  # rank 0 alone
    assert "tokens/s" in delayed.out and "left" in delayed.out


def test_wandb_offline_files(delayed: Finished) -> None:
    folders = list((delayed.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 1
    (record,) = folders[0].glob("*.wandb")
    assert record.stat().st_size > 1000
    wandb = Path(sys.executable).with_name("wandb")
    shown = subprocess.run(
        [wandb, "sync", "--dry-run", folders[0]], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr


def test_a_resume_is_exact(launcher: Launcher, delayed: Finished) -> None:
    """Loss for loss to the last bit, amax histories included, as if nothing had happened."""
    copy = delayed.folder.with_name("resumed")
    shutil.copytree(delayed.folder, copy)
    shard = copy / "checkpoints/step_00000006/__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (copy / "checkpoints/.step_00000006.partial").mkdir()  # the save that was interrupted
    (copy / "summary.json").unlink()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "los')  # a line half-written
    again = launcher.train(
        "resumed", "precision=fp8_delayed", "checkpoint.every=3", "resume=auto", processes=2
    )
    assert again.code == 0, again.err
    assert again.err.count("step_00000006 is damaged and passed over: __1_0.distcp does not") == 1
    assert "from step 3" in again.out
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [(line["step"], line[key]) for line in again.lines(key)] == [
            (line["step"], line[key]) for line in delayed.lines(key)
        ]
    assert again.summary["initial_validation_loss"] == delayed.summary["initial_validation_loss"]


def test_a_resume_on_another_layout(launcher: Launcher, delayed: Finished) -> None:
    copy = delayed.folder.with_name("elsewhere")
    shutil.copytree(delayed.folder, copy)
    shutil.rmtree(copy / "checkpoints/step_00000006")
    alone = launcher.train("elsewhere", "precision=fp8_delayed", "resume=auto")
    assert alone.code == 0, alone.err
    for ours, theirs in zip(alone.lines("loss"), delayed.lines("loss"), strict=True):
        # One process sends no gradient, so it lacks the error of E5M2; nothing else differs.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)


def test_a_finished_run_is_left_alone(launcher: Launcher, one: Finished) -> None:
    before = one.summary
    again = launcher.train("one", "precision=fp32", "resume=auto")
    assert again.code == 0 and "nothing to do" in again.err
    assert again.summary == before


def test_a_folder_with_a_run_is_refused(launcher: Launcher, one: Finished) -> None:
    again = launcher.train("one", "precision=fp32")
    assert again.code == 2
    (line,) = again.err.strip().splitlines()
    assert all(hint in line for hint in ("resume=auto", "run.name=", "run.overwrite=true"))


def test_a_checkpoint_of_another_model_is_refused(launcher: Launcher, one: Finished) -> None:
    for override, message in (
        ("model.hidden_size=128", "model.hidden_size is 64 there and 128 here"),
        ("precision=fp8_block", "precision.recipe is fp32 there and fp8_block here"),
        ("gradients.reduce=bf16", "gradients.reduce is fp32 there and bf16 here"),
        ("trainer.seed=7", "other data"),
    ):
        other = launcher.train("one", "precision=fp32", "resume=auto", override)
        assert other.code == 2
        (line,) = other.err.strip().splitlines()
        assert message in line


def test_a_damaged_checkpoint_is_named_in_one_line(launcher: Launcher, one: Finished) -> None:
    copy = one.folder.with_name("damaged")
    shutil.copytree(one.folder, copy)
    (copy / "summary.json").unlink()
    (shard,) = (copy / "checkpoints/step_00000006").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    again = launcher.train("damaged", "precision=fp32", "resume=auto")
    assert again.code == 2
    (line,) = (line for line in again.err.splitlines() if line.startswith("error: "))
    assert "step_00000006: __0_0.distcp does not match SHA256SUMS)" in line
    assert "restore one, or begin anew" in line


def test_a_branch_of_a_checkpoint(launcher: Launcher, delayed: Finished) -> None:
    """Another run goes on from a checkpoint, as the first did, and is a run of its own."""
    chosen = delayed.folder / "checkpoints/step_00000003"
    umask = os.umask(0)
    try:
        branch = launcher.train(
            "branch",
            *("precision=fp8_delayed", f"resume={chosen}", "checkpoint.every=3"),
            "logging.wandb.mode=auto",
            processes=2,
        )
    finally:
        os.umask(umask)
    assert branch.code == 0, branch.err
    written = [branch.folder, *branch.folder.rglob("*")]
    assert not [path for path in written if path.lstat().st_mode & 0o002 and not path.is_symlink()]
    assert "from step 3" in branch.out
    losses = [(line["step"], line["loss"]) for line in branch.lines("loss")]
    assert losses == [(line["step"], line["loss"]) for line in delayed.lines("loss")][3:]
    manifest = "checkpoints/step_00000006/manifest.json"
    first, second = (
        json.loads((run.folder / manifest).read_text())["progress"]["wandb_id"]
        for run in (delayed, branch)
    )
    assert first and second and first != second


def test_a_branch_without_a_checkpoint_is_not_begun_anew(
    launcher: Launcher, delayed: Finished
) -> None:
    chosen = delayed.folder / "checkpoints/step_00000003"
    branch = delayed.folder.with_name("stopped")
    branch.mkdir()
    shutil.copy(delayed.folder / "environment.json", branch)
    (branch / "config.yaml").write_text(f"resume: {chosen}\n")
    again = launcher.train("stopped", "precision=fp8_delayed", "resume=auto")
    assert again.code == 2
    assert f"start it again with resume={chosen} run.overwrite=true" in again.err


def test_what_can_t_be_branched_off(launcher: Launcher, delayed: Finished) -> None:
    checkpoints = delayed.folder / "checkpoints"
    ended = launcher.train(
        "end", "precision=fp8_delayed", f"resume={checkpoints / 'step_00000006'}"
    )
    assert ended.code == 2 and "leaves nothing to train: raise trainer.steps" in ended.err
    assert not ended.folder.exists()
    older = launcher.train(
        "delayed", "precision=fp8_delayed", f"resume={checkpoints / 'step_00000003'}"
    )
    assert older.code == 2 and "step_00000006 after it" in older.err
    bf16 = launcher.train("end", "precision=bf16", f"resume={checkpoints / 'step_00000003'}")
    assert bf16.code == 2 and "is a checkpoint of another precision" in bf16.err


def test_a_bad_wandb_environment(launcher: Launcher) -> None:
    launcher.environment["WANDB_MODE"] = "foo"
    refused = launcher.train("wandb-mode", "precision=fp32", "logging.wandb.mode=auto")
    del launcher.environment["WANDB_MODE"]
    assert refused.code == 2 and "WANDB_MODE=foo" in refused.err
    assert not refused.folder.exists()
    launcher.environment["WANDB_API_KEY"] = "bad"
    short = ("trainer.steps=1", "schedule.warmup_steps=0", "checkpoint.at_end=false")
    done = launcher.train("wandb-key", "precision=fp32", "logging.wandb.mode=auto", *short)
    del launcher.environment["WANDB_API_KEY"]
    assert done.code == 0, done.err
    assert "wandb: offline, since the key can't be used" in done.err
    assert done.summary["steps"] == 1


def test_a_run_of_skipped_steps_alone_can_be_resumed(launcher: Launcher) -> None:
    """Its optimizer has no state yet when the checkpoint is written."""
    overrides = ("precision=fp8_delayed", "model.init_std=1e30", "schedule.warmup_steps=1")
    done = launcher.train("diverged", *overrides, "trainer.steps=2")
    assert done.code == 0, done.err
    assert done.summary["skipped_steps"] == 2
    assert "skipped, its gradients are not finite" in done.out
    more = launcher.train("diverged", *overrides, "trainer.steps=3", "resume=auto")
    assert more.code == 0, more.err
    assert more.summary["skipped_steps"] == 3


def test_a_run_that_ended_before_its_summary_gets_it(launcher: Launcher, one: Finished) -> None:
    copy = one.folder.with_name("unsummed")
    shutil.copytree(one.folder, copy)
    (copy / "summary.json").unlink()
    again = launcher.train("unsummed", "precision=fp32", "resume=auto")
    assert again.code == 0, again.err
    for key in ("initial_validation_loss", "final_validation_loss", "final_loss", "steps"):
        assert again.summary[key] == one.summary[key]


def test_a_sweep_trains_one_run_a_job(launcher: Launcher) -> None:
    small = ("trainer.steps=2", "trainer.validate_every=0", "checkpoint.at_end=false")
    done = launcher.train("sweep-${precision.recipe}", "precision=bf16,fp8_block", *small, "-m")
    assert done.code == 0, done.err
    runs = sorted(path.parent.name for path in done.folder.parent.glob("sweep-*/summary.json"))
    assert runs == ["sweep-bf16", "sweep-fp8_block"]


def test_torchrun_names_our_line_as_the_root_cause(launcher: Launcher) -> None:
    done = launcher.train("bad", "trainer.global_batch_size=7", processes=2)
    assert done.code == 1
    assert done.err.count("error: trainer.global_batch_size=7 is not divisible") == 1
    cause = done.err.partition("Root Cause")[2]
    assert "trainer.global_batch_size=7 is not divisible by" in cause
    assert not done.folder.exists()
