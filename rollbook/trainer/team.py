"""Several ranks that train one model. Rank 0 is the trainer process: it talks to the ledger, publishes and writes checkpoints.

The other ranks are its children (`python -m rollbook.trainer.team`). They hold their shard of the model and repeat each call that
rank 0 makes. Calls are sent as messages, not by a collective, because a trainer may wait for a batch far longer than a collective
may. When a rank dies, the others end: the next collective of rank 0 fails, or the connection of the followers closes. The run then
resumes as after any crash.
"""

import os
import pickle
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.concurrency.child_process.process import BlockingChild, ChildEndedError, ChildSpec
from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.weights import AdapterKind
from rollbook.trainer.checkpoints.checkpoints import Checkpoint, Checkpoints
from rollbook.trainer.step import LearnerSnapshot, StepReport, TrainStep

COLLECTIVE_S = 600.0
"""How long a rank waits for the others within a step."""
CHECKPOINT_S = 3600.0
"""How long a rank waits for the others to begin or to finish a checkpoint. A rank that died is noticed at once."""
STOP_S = 20.0


class Team:
    """The learner at rank 0 with its followers. Has the methods of a single `TrainStep`."""

    def __init__(self, learner: TrainStep, followers: list[BlockingChild]) -> None:
        self._learner = learner
        self._followers = followers

    @classmethod
    def assemble(cls, checkpoints: Checkpoints, checkpoint: Checkpoint | None, *, size: int, device: str) -> "Team":
        """Start the followers, and restore the same checkpoint at every rank."""
        if device == "cuda" and torch.cuda.device_count() < size:
            raise RunError(
                f"trainer.ranks = {size} needs as many GPUs, and {torch.cuda.device_count()} are visible here."
                " Lower it, or make more visible (CUDA_VISIBLE_DEVICES)."
            )
        store = _rendezvous(0, is_master=True)
        followers: list[BlockingChild] = []
        try:
            for rank in range(1, size):
                arguments = [str(rank), str(size), str(store.port), device]
                followers.append(BlockingChild(ChildSpec(module="rollbook.trainer.team", arguments=arguments)))
                followers[-1].send(pickle.dumps((checkpoints, checkpoint)))
            _join(store, rank=0, size=size, device=device)
            checkpoints.use_group(_checkpoint_group())
            return cls(checkpoints.restore(checkpoint), followers)
        except BaseException:
            _stop(followers)
            raise

    @property
    def step(self) -> int:
        return self._learner.step

    @property
    def num_parameters(self) -> int:
        return self._learner.num_parameters

    @property
    def vocabulary_size(self) -> int:
        return self._learner.vocabulary_size

    def run(self, batch: TrainingBatch) -> StepReport:
        self._send("run", batch)
        return self._learner.run(batch)

    def publish_adapters(self) -> AdapterKind:
        return self._learner.publish_adapters()

    def snapshot(self) -> dict[str, Tensor]:
        self._send("snapshot")
        return self._learner.snapshot()

    def state_snapshot(self, weights: Mapping[str, Tensor]) -> LearnerSnapshot:
        self._send("state_snapshot")
        return self._learner.state_snapshot(weights)

    def close(self) -> None:
        _stop(self._followers)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _send(self, method: str, argument: Any = None) -> None:
        payload = pickle.dumps((method, argument))
        for rank, follower in enumerate(self._followers, start=1):
            try:
                follower.send(payload)
            except ChildEndedError as error:
                raise ChildProcessError(f"trainer rank {rank} {error}; the trainer is restarted") from error


def _stop(followers: list[BlockingChild]) -> None:
    for follower in followers:
        with suppress(ChildEndedError):
            follower.send(pickle.dumps(("stop", None)))
    for follower in followers:
        follower.join(STOP_S)


def _rendezvous(port: int, *, is_master: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)  # type: ignore[attr-defined]  # untyped


def _join(store: Any, *, rank: int, size: int, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _checkpoint_group() -> Any:
    """A group for writing checkpoints while the next step trains."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_S))


def follow(channel_fd: int, rank: int, size: int, port: int, device: str) -> None:
    """Run a follower: the same calls in the same order as rank 0 makes them."""
    sock = connect_to_parent(channel_fd)
    die_with_parent(channel_fd)
    parent = BlockingFrames(sock)
    checkpoints, checkpoint = _receive(parent)
    _join(_rendezvous(port, is_master=False), rank=rank, size=size, device=device)
    checkpoints.use_group(_checkpoint_group())
    learner = checkpoints.restore(checkpoint)
    writing = threading.Thread()
    while True:
        match _receive(parent):
            case ("run", batch):
                learner.run(batch)
            case ("snapshot", _):
                learner.snapshot()
            case ("state_snapshot", _):
                # Rank 0 writes one checkpoint at a time, so the one before is complete.
                writing = threading.Thread(target=checkpoints.write_shard, args=[learner.state_snapshot({})])
                writing.start()
            case _:
                if writing.is_alive():
                    writing.join()
                dist.destroy_process_group()
                return


def _receive(parent: BlockingFrames) -> Any:
    payload = parent.receive()
    if payload is None:
        # Rank 0 is gone. This process has nothing to save: the ledger and the last checkpoint hold the progress.
        os._exit(1)
    return pickle.loads(payload)


if __name__ == "__main__":
    follow(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
