"""Sharded checkpoints: in a directory and in a bucket, restored with other numbers of ranks, incomplete ones ignored."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]  # the package ships no types
import pytest
from transformers import AutoModelForCausalLM

from rollbook.contracts.errors import RunError
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.checkpoints.checkpoints import Checkpoints
from rollbook.trainer.model.weights import digest_of
from rollbook.trainer.step import TrainStep
from rollbook.trainer.team import Team
from tests.parts.bucket import bucket_of_ministack
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir


def checkpoints(directory: Path, *, ranks: int = 1, shards: str | None = None) -> Checkpoints:
    config = quick(ranks=ranks, shards_path=shards, ppo_n_minibatches=2, max_tokens_per_microbatch=60)
    model_dir = tiny_model_dir(directory.parent / "model")
    return Checkpoints(directory, model_dir=model_dir, config=config)


def trained(store: Checkpoints, *, to: int) -> TrainStep:
    """A learner of one rank, trained from the latest checkpoint and saved at step `to`."""
    learner = store.restore(store.latest())
    while learner.step < to:
        learner.run(recorded_batch(learner.step + 1))
    store.save(learner, weights_digest=learner.model.digest())
    return learner


@pytest.fixture
def bucket() -> Iterator[str]:
    with bucket_of_ministack("checkpoints"):
        yield "s3://checkpoints/runs/a"


def keys() -> list[str]:
    listed = boto3.client("s3").list_objects_v2(Bucket="checkpoints")
    return [row["Key"] for row in listed.get("Contents", [])]


def test_a_resume_from_shards_in_a_bucket_continues_to_the_bit(tmp_path: Path, bucket: str) -> None:
    whole = trained(checkpoints(tmp_path / "whole"), to=4)
    trained(checkpoints(tmp_path / "halves", shards=bucket), to=2)
    assert any(key.endswith("/__0_0.distcp") for key in keys())
    resumed = trained(checkpoints(tmp_path / "halves", shards=bucket), to=4)
    assert resumed.model.digest() == whole.model.digest()
    module = AutoModelForCausalLM.from_pretrained(str(tmp_path / "halves" / "step-000004" / "model"))
    assert digest_of(named_weights(module)) == whole.model.digest()


def test_shards_in_a_bucket_are_removed_with_their_checkpoint(tmp_path: Path, bucket: str) -> None:
    store = checkpoints(tmp_path / "run", shards=bucket)
    learner = store.restore(None)
    for step in (1, 2, 3):
        learner.run(recorded_batch(step))
        store.save(learner, weights_digest=learner.model.digest())
    assert store.steps() == [2, 3]
    assert {key.split("/")[2].split("-")[1] for key in keys()} == {"000002", "000003"}
    boto3.client("s3").delete_object(Bucket="checkpoints", Key=next(key for key in keys() if "step-000003" in key))
    with pytest.raises(RunError, match=r"step-000003 is corrupt: .* in s3://checkpoints/runs/a/step-000003"):
        store.latest()


def test_a_bucket_that_does_not_exist_gives_one_clear_error(tmp_path: Path, bucket: str) -> None:
    store = checkpoints(tmp_path / "run", shards="s3://other/a")
    with pytest.raises(RunError, match="NoSuchBucket"):
        trained(store, to=1)
    assert store.steps() == []


def test_shards_without_a_manifest_are_ignored_and_removed(tmp_path: Path) -> None:
    """As after a kill between the shards of two ranks: one of them is written, and there is no manifest."""
    store = checkpoints(tmp_path / "run", shards=str(tmp_path / "shards"))
    trained(store, to=1)
    complete = next((tmp_path / "shards").iterdir())
    interrupted = tmp_path / "shards" / "step-000002-0123456789ab"
    interrupted.mkdir()
    shutil.copy(complete / "__0_0.distcp", interrupted)
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    store.clean()
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [complete.name]


def test_a_shard_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    store = checkpoints(tmp_path / "run", shards=str(tmp_path / "shards"))
    trained(store, to=1)
    shard = next((tmp_path / "shards").rglob("*.distcp"))
    data = bytearray(shard.read_bytes())
    at = data.index(b"archive/data/0") + 200
    data[at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RunError, match=r"cannot be read|have digest"):
        store.restore(store.latest())


def team(tmp_path: Path, name: str, ranks: int) -> tuple[Checkpoints, Team]:
    store = checkpoints(tmp_path / name, ranks=ranks)
    return store, Team.assemble(store, store.latest(), size=ranks, device="cpu")


def save(store: Checkpoints, learner: Team) -> str:
    weights = learner.snapshot()
    return store.write(learner.state_snapshot(weights), weights_digest=digest_of(weights)).weights_digest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_two_ranks_is_restored_with_one_two_and_three(tmp_path: Path) -> None:
    store, pair = team(tmp_path, "pair", 2)
    try:
        for step in (1, 2):
            pair.run(recorded_batch(step))
        digest = save(store, pair)
        shards = next((tmp_path / "pair" / "shards").iterdir())
        assert {file.name for file in shards.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        pair.run(recorded_batch(3))
        # Rank 1 cannot write its shard of step 3, as on a full disk: the checkpoint is not complete.
        blocked = tmp_path / "pair" / "shards" / shards.name.replace("000002", "000003") / "__1_0.distcp"
        blocked.mkdir(parents=True)
        with pytest.raises(RunError, match="IsADirectoryError"):
            save(store, pair)
    finally:
        pair.close()
    assert store.steps() == [2]
    for ranks in (1, 2, 3):
        shutil.copytree(tmp_path / "pair", tmp_path / str(ranks))
        store = checkpoints(tmp_path / str(ranks), ranks=ranks)
        store.clean()
        latest = store.latest()
        assert latest is not None
        learner = store.restore(latest) if ranks == 1 else Team.assemble(store, latest, size=ranks, device="cpu")
        try:
            assert (learner.step, digest_of(learner.snapshot())) == (2, digest)
            learner.run(recorded_batch(3))
        finally:
            learner.close()
