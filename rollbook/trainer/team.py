"""Several ranks that train one model. Rank 0 is the trainer: it talks to the ledger, publishes and writes checkpoints.

The others are its children. They hold their part of the model and do what they are told over a pipe: restore, train this batch,
give your part for a copy. A pipe and not a collective, because a trainer may wait for a batch far longer than a collective may.
A rank that dies ends the others: rank 0's next exchange fails, or the followers' pipe closes. The run resumes as after any crash.
"""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollbook.contracts.adapter import AdapterKind
from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.checkpoints import Checkpoint, Checkpoints
from rollbook.trainer.step import LearnerSnapshot, StepReport, TrainStep

EXCHANGE_S = 600.0
"""How long a rank waits for the others within a step."""
JOIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a rank stands."""

    rank: int
    size: int
    port: int
    device: str


class Team:
    """The learner at rank 0, with its followers. Does what a lone `TrainStep` does."""

    def __init__(self, learner: TrainStep, followers: list[tuple[BaseProcess, Connection]]) -> None:
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
        store = _meeting_place(0, is_master=True)
        spawn = multiprocessing.get_context("spawn")
        followers: list[tuple[BaseProcess, Connection]] = []
        for rank in range(1, size):
            ours, theirs = spawn.Pipe()
            place = _Place(rank=rank, size=size, port=store.port, device=device)
            process = spawn.Process(
                target=_follow, args=(theirs, place, checkpoints, checkpoint), name=f"trainer-rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            followers.append((process, ours))
        try:
            _join(_Place(rank=0, size=size, port=store.port, device=device), store)
            return cls(checkpoints.restore(checkpoint), followers)
        except BaseException:
            _dismiss(followers)
            raise

    @property
    def step(self) -> int:
        return self._learner.step

    @property
    def num_parameters(self) -> int:
        return self._learner.num_parameters

    def run(self, batch: TrainingBatch) -> StepReport:
        self._tell("run", batch)
        return self._learner.run(batch)

    def publish_adapters(self) -> AdapterKind:
        """Never: adapters are trained by one process."""
        return self._learner.publish_adapters()

    def snapshot(self) -> dict[str, Tensor]:
        self._tell("snapshot", None)
        return self._learner.snapshot()

    def state_snapshot(self, weights: Mapping[str, Tensor]) -> LearnerSnapshot:
        self._tell("copied", None)
        return self._learner.state_snapshot(weights)

    def close(self) -> None:
        _dismiss(self._followers)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tell(self, what: str, argument: Any) -> None:
        for process, pipe in self._followers:
            if not process.is_alive():
                raise ChildProcessError(
                    f"{process.name} ended with exit code {process.exitcode}; the trainer starts again"
                )
            pipe.send((what, argument))


def _meeting_place(port: int, *, is_master: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)  # type: ignore[attr-defined]  # untyped


def _join(place: _Place, store: Any) -> None:
    if place.device == "cuda":
        torch.cuda.set_device(place.rank)
    backend = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=EXCHANGE_S)
    )


def _follow(pipe: Connection, place: _Place, checkpoints: Checkpoints, checkpoint: Checkpoint | None) -> None:
    """The life of a follower: the same calls in the same order as rank 0 makes them."""
    # An interrupt from the terminal reaches every process; what it means for the run is rank 0's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _join(place, _meeting_place(place.port, is_master=False))
    learner = checkpoints.restore(checkpoint)
    while True:
        try:
            what, argument = pipe.recv()
        except EOFError:
            # Rank 0 is gone. Nothing here is worth keeping: what was learned lies in the ledger and the last checkpoint.
            os._exit(1)
        if what == "run":
            learner.run(argument)
        elif what == "snapshot":
            learner.snapshot()
        elif what == "copied":
            learner.state_snapshot({})
        else:
            dist.destroy_process_group()
            return


def _dismiss(followers: list[tuple[BaseProcess, Connection]]) -> None:
    for process, pipe in followers:
        if process.is_alive():
            try:
                pipe.send(("stop", None))
            except OSError:
                continue
    for process, _ in followers:
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
            process.join()
