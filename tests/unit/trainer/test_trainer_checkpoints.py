"""Checkpoints: complete, verified by digests, and loadable by transformers."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollbook.contracts.errors import RunError
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.model.weights import copied_through, digest_of
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def checkpoints(tmp_path: Path, model_dir: Path, **settings: object) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=quick(**settings))


def trained(model_dir: Path, steps: int) -> TrainStep:
    learner = initial_learner(model_dir, quick())
    for step in range(1, steps + 1):
        learner.run(recorded_batch(step))
    return learner


def save(store: Checkpoints, learner: TrainStep) -> Path:
    return store.save(learner, weights_digest=learner.model.digest()).path


def test_transformers_loads_the_model_of_a_checkpoint(tmp_path: Path, model_dir: Path) -> None:
    learner = trained(model_dir, 1)
    path = save(checkpoints(tmp_path, model_dir), learner)
    module = AutoModelForCausalLM.from_pretrained(str(path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(str(path / "model"))
    assert digest_of(named_weights(module)) == learner.model.digest()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7 11"}], tokenize=False) == "<bos>7 11 "


def test_restoring_a_checkpoint_restores_weights_optimizer_and_random_states(tmp_path: Path, model_dir: Path) -> None:
    learner = trained(model_dir, 2)
    store = checkpoints(tmp_path, model_dir)
    save(store, learner)
    drawn = (random.random(), float(np.random.random()), float(torch.rand(1)))
    restored = store.restore(store.latest())
    assert (random.random(), float(np.random.random()), float(torch.rand(1))) == drawn
    assert (restored.step, restored.model.digest()) == (2, learner.model.digest())
    learner.run(recorded_batch(3))
    restored.run(recorded_batch(3))
    assert restored.model.digest() == learner.model.digest()


def test_an_incomplete_checkpoint_is_ignored_and_removed(tmp_path: Path, model_dir: Path) -> None:
    store = checkpoints(tmp_path, model_dir)
    learner = trained(model_dir, 1)
    save(store, learner)
    incomplete, temporary = tmp_path / "checkpoints" / "step-000002", tmp_path / "checkpoints" / ".step-000002.77.tmp"
    for directory in (incomplete, temporary):
        (directory / "model").mkdir(parents=True)
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    learner.run(recorded_batch(2))
    save(store, learner)
    latest = store.latest()
    assert latest is not None
    assert latest.step == 2
    assert not temporary.exists()


@pytest.mark.parametrize("name", ["model/model.safetensors", "trainer.pt", "model/tokenizer.json"])
def test_a_corrupt_checkpoint_stops_the_run_with_its_path(tmp_path: Path, model_dir: Path, name: str) -> None:
    store = checkpoints(tmp_path, model_dir)
    path = save(store, trained(model_dir, 1))
    data = bytearray((path / name).read_bytes())
    data[-5] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(RunError, match=rf"step-000001 is corrupt: {name}"):
        store.latest()
    (path / name).unlink()
    with pytest.raises(RunError, match=rf"step-000001 is corrupt: {name}"):
        store.latest()


def test_an_unreadable_manifest_stops_the_run(tmp_path: Path, model_dir: Path) -> None:
    store = checkpoints(tmp_path, model_dir)
    path = save(store, trained(model_dir, 1))
    (path / "checkpoint.json").write_text('{"step": 1')
    with pytest.raises(RunError, match=r"step-000001: checkpoint\.json cannot be read"):
        store.latest()


def test_a_checkpoint_whose_weights_do_not_match_its_digest_is_rejected(tmp_path: Path, model_dir: Path) -> None:
    store = checkpoints(tmp_path, model_dir)
    store.save(trained(model_dir, 1), weights_digest="another")
    with pytest.raises(RunError, match="but another was saved"):
        store.restore(store.latest())


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, model_dir: Path) -> None:
    store = checkpoints(tmp_path, model_dir, keep_checkpoints=2)
    learner = initial_learner(model_dir, quick())
    for step in (1, 2, 3):
        learner.run(recorded_batch(step))
        save(store, learner)
    assert store.steps() == [2, 3]


def test_a_checkpoint_whose_removal_is_interrupted_is_incomplete(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpoints(tmp_path, model_dir, keep_checkpoints=1)
    learner = trained(model_dir, 1)
    save(store, learner)
    learner.run(recorded_batch(2))

    def interrupted(path: Path, **options: object) -> None:
        if path.name == "step-000001":
            raise KeyboardInterrupt
        shutil_rmtree(path, **options)

    shutil_rmtree: Any = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(store, learner)
    assert store.steps() == [2]


def test_saving_an_existing_checkpoint_does_not_change_it(tmp_path: Path, model_dir: Path) -> None:
    store = checkpoints(tmp_path, model_dir)
    learner = trained(model_dir, 1)
    path = save(store, learner)
    written = (path / "checkpoint.json").stat().st_mtime_ns
    save(store, learner)
    assert (path / "checkpoint.json").stat().st_mtime_ns == written


def test_the_manifest_records_the_settings_of_the_step(tmp_path: Path, model_dir: Path) -> None:
    path = save(checkpoints(tmp_path, model_dir, lr=0.01), trained(model_dir, 1))
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["settings"]["lr"] == 0.01
    assert "keep_checkpoints" not in manifest["settings"]


def test_an_unwritable_directory_gives_one_clear_error(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    with pytest.raises(RunError, match=r"step-000001 could not be written \(FileExistsError"):
        save(checkpoints(tmp_path, model_dir), trained(model_dir, 1))


def test_settings_of_the_optimizer_come_from_the_config_and_not_from_the_checkpoint(
    tmp_path: Path, model_dir: Path
) -> None:
    save(checkpoints(tmp_path, model_dir), trained(model_dir, 1))
    store = checkpoints(tmp_path, model_dir, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.1)
    matrices, vectors = store.restore(store.latest()).optimizer.param_groups
    assert (tuple(matrices["betas"]), matrices["eps"], matrices["weight_decay"]) == ((0.5, 0.6), 1e-3, 0.1)
    assert vectors["weight_decay"] == 0.0


@pytest.mark.parametrize("chunk_bytes", [1, 8, 12, 1000])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(30.0).reshape(5, 6).t(),
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0, 3),
        torch.arange(9).bfloat16(),
    ],
    ids=["transposed", "one number", "empty", "bfloat16"],
)
def test_a_tensor_copied_in_chunks_is_the_same_tensor(tensor: torch.Tensor, chunk_bytes: int) -> None:
    chunk = torch.empty(chunk_bytes, dtype=torch.uint8)
    waits: list[None] = []
    copy = copied_through(chunk, tensor, lambda: waits.append(None))
    assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert len(waits) == -(-tensor.nbytes // chunk_bytes)
