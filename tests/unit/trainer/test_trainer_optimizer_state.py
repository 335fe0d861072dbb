"""The averages of AdamW in main memory and with 8 bits: the update, checkpoints, memory, and what is refused."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import MissingExtraError
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.optimizer import build_optimizer
from rollbook.trainer.optimizer_state.chunked_adamw import ChunkedAdamW, HostStorage, chunks_of
from rollbook.trainer.optimizer_state.eight_bit import BLOCK, EightBitStorage
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import BUILD, batch_of, quick, recorded_batch, row, sample, tiny_model_dir

KINDS = ("device", "host", "8bit")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights of more than 4,096 numbers, which are quantised."""
    build = BUILD.model_copy(update={"hidden_size": 64, "intermediate_size": 96})
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model", build=build)


def weights_of(learner: TrainStep) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in learner.model.checkpointed_weights().items()}


def parameters(*sizes: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return found


@pytest.mark.parametrize("chunk", [256, 1024, 1 << 22])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_state_in_main_memory_gives_the_bits_of_torchs_update_with_any_chunk(chunk: int, threads: int) -> None:
    torch.set_num_threads(threads)
    sizes = (1, 255, 256, 257, 3000, 70, 5, 1024)
    ours, theirs = parameters(*sizes), parameters(*sizes)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}

    def groups(found: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": found[:5], "weight_decay": 0.1}, {"params": found[5:], "weight_decay": 0.0}]

    chunked = ChunkedAdamW(groups(ours), HostStorage(), **settings, chunk=chunk)
    plain = torch.optim.AdamW(groups(theirs), **settings, fused=True)
    try:
        for number in range(4):
            # A weight without a gradient is not updated, and its steps are not counted.
            ours[2].grad = theirs[2].grad = None if number == 1 else torch.full((256,), float(number))
            chunked.step()
            plain.step()
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    states = (chunked.state_dict()["state"], plain.state_dict()["state"])
    assert [state.keys() for state in states[0].values()] == [state.keys() for state in states[1].values()]
    assert all(torch.equal(states[0][n][name], states[1][n][name]) for n in states[1] for name in states[1][n])


def test_chunks_cover_every_number_once_and_cut_weights_at_blocks() -> None:
    found = parameters(1, 999, 5000, 64, 7)
    chunks = [*chunks_of(found, 1024)]
    assert all(sum(piece.stop - piece.start for piece in chunk) <= 1024 for chunk in chunks)
    for parameter in found:
        pieces = [piece for chunk in chunks for piece in chunk if piece.parameter is parameter]
        assert (pieces[0].start, pieces[-1].stop) == (0, parameter.numel())
        assert all(a.stop == b.start for a, b in pairwise(pieces))
        assert all(piece.start % BLOCK == 0 for piece in pieces)


def test_a_run_with_the_state_in_main_memory_has_the_same_bits_and_checkpoints(model_dir: Path, tmp_path: Path) -> None:
    """The checkpoint of one is continued by the other."""
    configs = {kind: quick(compute_dtype="bfloat16", optimizer_state=kind) for kind in ("device", "host")}
    assert configs["host"].numeric_settings() == configs["device"].numeric_settings()
    learners = {kind: initial_learner(model_dir, config) for kind, config in configs.items()}
    for learner in learners.values():
        learner.run(recorded_batch(1))
    digest = learners["device"].model.digest()
    assert learners["host"].model.digest() == digest
    restored = []
    for kind, other in (("host", "device"), ("device", "host"), ("host", "host")):
        store = Checkpoints(tmp_path / f"{kind}-{other}", model_dir=model_dir, config=configs[kind])
        saved = store.save(learners[kind], weights_digest=digest)
        reader = Checkpoints(tmp_path / f"{kind}-{other}", model_dir=model_dir, config=configs[other])
        restored.append(reader.restore(saved))
    for learner in (*learners.values(), *restored):
        learner.run(recorded_batch(2))
    after = [weights_of(learner) for learner in (*learners.values(), *restored)]
    assert all(torch.equal(after[0][name], one[name]) for one in after[1:] for name in one)


@pytest.mark.parametrize("shards", [False, True])
def test_an_8_bit_state_continues_from_a_checkpoint_with_the_same_bits(
    model_dir: Path, tmp_path: Path, shards: bool
) -> None:
    config = quick(optimizer_state="8bit", shards_path=str(tmp_path / "shards") if shards else None)
    learner = initial_learner(model_dir, config)
    learner.run(recorded_batch(1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=config)
    snapshot = learner.state_snapshot(learner.snapshot())
    held = learner.optimizer.state_dict()["state"]
    before = {(n, name): value.clone() for n, state in held.items() for name, value in state.items()}
    digest = learner.model.digest()
    learner.run(recorded_batch(2))
    checkpoints.write(snapshot, weights_digest=digest)
    restored = checkpoints.restore(checkpoints.latest())
    found = restored.optimizer.state_dict()["state"]
    assert before.keys() == {(n, name) for n, state in found.items() for name in state}
    assert all(torch.equal(found[n][name], value) for (n, name), value in before.items())
    restored.run(recorded_batch(2))
    assert restored.model.digest() == learner.model.digest()


def test_an_8_bit_state_takes_a_quarter_of_the_memory(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick(optimizer_state="8bit"))
    learner.run(recorded_batch(1))
    states = learner.optimizer.state_dict()["state"].values()
    quantised = [state for state in states if "exp_avg_scale" in state]
    numbers = sum(state["exp_avg"].numel() for state in quantised)
    assert numbers > 0.8 * learner.num_parameters
    assert {state["exp_avg"].dtype for state in quantised} == {torch.uint8}
    assert sum(value.nbytes for state in quantised for value in state.values() if value.ndim) < 2.1 * numbers
    assert {state["exp_avg"].dtype for state in states if "exp_avg_scale" not in state} == {torch.float32}


def test_quantised_averages_are_near_the_values_that_were_written() -> None:
    storage = EightBitStorage()
    (parameter,) = parameters(70 * BLOCK + 13)
    held = storage.new(parameter)
    generator = torch.Generator().manual_seed(2)
    signed = torch.randn(parameter.numel(), generator=generator) * torch.logspace(-6, 0, parameter.numel())
    for chunk in chunks_of([parameter], 16 * BLOCK):
        for piece in chunk:
            for name, values in (("exp_avg", signed), ("exp_avg_sq", signed.square())):
                storage.write(held, name, piece, piece.of(values))
                found = torch.empty(piece.stop - piece.start)
                storage.read(held, name, piece, found)
                scale = piece.of(values).abs().max()
                assert (found - piece.of(values)).abs().max() <= 0.02 * scale
    storage.write(held, "exp_avg", piece, torch.zeros_like(piece.weights))
    storage.read(held, "exp_avg", piece, found)
    assert found.eq(0).all(), "zeros stay zeros"


def repeated_batch(step: int) -> TrainingBatch:
    """The same sequences in every step: samples with a reward repeat one token, the others another."""
    good, bad = ([1, *[token] * 12] for token in (5, 9))
    return batch_of(
        step, [[sample(row(ids, range(1, 13)), reward=reward) for ids, reward in ((good, 1.0), (bad, 0.0))]]
    )


def test_with_8_bits_the_policy_learns_as_with_float32(model_dir: Path) -> None:
    gains = {}
    for kind in KINDS:
        config = quick(lr=1e-3, loss="reinforce", optimizer_state=kind)
        learner = initial_learner(model_dir, config)
        start = rewarded_logprob(learner)
        for step in range(1, 16):
            learner.run(repeated_batch(step))
        gains[kind] = rewarded_logprob(learner) - start
    assert gains["device"] > 1.0
    assert gains["host"] == gains["device"]
    assert gains["8bit"] == pytest.approx(gains["device"], rel=0.1)


def rewarded_logprob(learner: TrainStep) -> float:
    batch = batch_of(1, [[sample(row([1, *[5] * 12], range(1, 13)))]])
    [minibatch] = learner.plan_batch(batch)
    with torch.no_grad():
        return float(torch.cat([learner.model.token_logprobs(micro)[0] for micro in minibatch.microbatches]).mean())


@pytest.mark.parametrize("kind", ["host", "8bit"])
def test_other_optimizers_and_several_ranks_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="for the averages of AdamW"):
        quick(optimizer_state=kind, optimizer="muon")
    with pytest.raises(ValueError, match="needs one rank, and ranks is 2"):
        quick(optimizer_state=kind, ranks=2)


def test_a_checkpoint_with_a_state_of_another_form_is_refused(model_dir: Path, tmp_path: Path) -> None:
    learner = initial_learner(model_dir, quick())
    learner.run(recorded_batch(1))
    saved = Checkpoints(tmp_path, model_dir=model_dir, config=quick()).save(
        learner, weights_digest=learner.model.digest()
    )
    changed = Checkpoints(tmp_path, model_dir=model_dir, config=quick(optimizer_state="8bit"))
    with pytest.raises(RunError, match=r"trainer\.optimizer_state = device, but the setting is 8bit now"):
        changed.restore(saved)
    with pytest.raises(RunError, match=r"was saved with another trainer\.optimizer_state"):
        initial_learner(model_dir, quick(optimizer_state="8bit")).load_optimizer(learner.optimizer.state_dict())


def test_without_torchao_the_error_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "rollbook.trainer.optimizer_state.eight_bit")
    with pytest.raises(MissingExtraError, match=r"'torchao(\.optim)?' is not installed"):
        build_optimizer(nn.Linear(2, 2), quick(optimizer_state="8bit"), rate=0.1)
