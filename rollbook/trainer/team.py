"""Several ranks that train one model. Rank 0 is the trainer process: it talks to the ledger, publishes and writes manifests.

The other ranks are its children, or run on other machines as processes of the run (`rollbook.run.processes.rank`). Each holds its
shard of the model and repeats each call that rank 0 makes; with a batch it gets its own share of the passes. Calls are sent as
messages (`distributed.calls`), not by a collective, because a trainer may wait for a batch far longer than a collective may.
"""

import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.concurrency.child_process.process import BlockingChild, ChildSpec
from rollbook.contracts.batch import PassSplit, TrainingBatch
from rollbook.contracts.decoding import convert
from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.weights import AdapterKind
from rollbook.trainer.checkpoints.checkpoints import Checkpoint, Checkpoints
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Minibatch, PlanSettings
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.distributed.calls import (
    InvalidCallError,
    RankCall,
    decode_call,
    encode_call,
    read_passes,
    read_rows,
)
from rollbook.trainer.distributed.links import Invitation, Link, RankListener, connect, end_process, interface_of
from rollbook.trainer.distributed.sharding import Ranks
from rollbook.trainer.exactness import LogprobComparison
from rollbook.trainer.memory_errors import PassMemoryError, StepMemoryError
from rollbook.trainer.step import LearnerSnapshot, TrainStep
from rollbook.trainer.step_report import StepReport

COLLECTIVE_S = 600.0
"""How long a rank waits for the others within a step. A rank that is lost is noticed earlier (`distributed.links`)."""
CHECKPOINT_S = 3600.0
"""How long a rank waits for the others to begin or to finish a checkpoint."""
STOP_S = 20.0
POLL_S = 0.5
LOCAL = "127.0.0.1"
INVITATION = "ranks.json"
STORE = ".ranks-"
OPTIMIZER = "optimizer"
"""Starts the report of a rank whose optimizer did not fit into memory."""
START = "start"
"""Starts the report of a rank that ran out of memory outside of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRanks:
    """Ranks on other machines. They find rank 0 by the invitation in `directory`, which all of them see."""

    count: int
    host: str
    """Address of this machine, which the others reach."""
    directory: Path
    is_stopping: Callable[[], bool] = lambda: False
    doing: Callable[[str], None] = lambda text: None


class _Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 sends to a rank first."""

    rank: int
    size: int
    store: str
    """The file by which the ranks find each other."""
    device: str
    checkpoints: dict[str, Any]
    """`Checkpoints.to_wire`."""
    checkpoint: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The files by which ranks find rank 0 and each other, and the address on which it listens."""

    host: str
    invitation: Path
    store: Path

    @classmethod
    def make(cls, directory: Path, host: str) -> "_Place":
        directory.mkdir(exist_ok=True)
        for store in directory.glob(f"{STORE}*"):  # of a trainer that was killed
            store.unlink(missing_ok=True)
        return cls(host=host, invitation=directory / INVITATION, store=directory / f"{STORE}{uuid.uuid4().hex}")


class StoppedBeforeAssemblyError(Exception):
    """The run was stopped while rank 0 waited for ranks to join."""


class Team:
    """The learner at rank 0 with its followers. Has the methods of a single `TrainStep`."""

    def __init__(self, place: "_Place", *, end: Callable[[RunError], None]) -> None:
        self._place = place
        self._end = end
        self._learner: TrainStep
        self._links: list[Link] = []
        self._children: list[BlockingChild] = []
        self._failure_of: Callable[[PassMemoryError, int], StepMemoryError] | None = None
        """What to do if a rank runs out of memory in the step or probe that the ranks compute."""
        self.on_out_of_memory: Callable[[StepMemoryError], None] = lambda error: None
        """Called in a thread when another rank ran out of memory, before this process ends."""

    @classmethod
    def assemble(
        cls,
        checkpoints: Checkpoints,
        checkpoint: Checkpoint | None,
        *,
        size: int,
        device: str,
        remote: RemoteRanks | None = None,
        end: Callable[[RunError], None] | None = None,
    ) -> "Team":
        """Start the ranks of this machine, wait for those of other machines, and restore the same checkpoint at every rank.

        `end`: ends this process with an error that another rank reported; by default it is printed.
        """
        num_local = size - (0 if remote is None else remote.count)
        if device == "cuda" and torch.cuda.device_count() < num_local:
            raise RunError(
                f"{num_local} trainer ranks on this machine need as many GPUs, and {torch.cuda.device_count()} are visible."
                " Lower trainer.ranks, or make more visible (CUDA_VISIBLE_DEVICES)."
            )
        local = (checkpoints.directory, LOCAL)
        place = _Place.make(*(local if remote is None else (remote.directory, remote.host)))
        team = cls(place, end=end or _print_and_exit)
        try:
            team._gather(checkpoints, checkpoint, size=size, num_local=num_local, device=device, remote=remote)
        except BaseException:
            team.close()
            raise
        return team

    def _gather(
        self,
        checkpoints: Checkpoints,
        checkpoint: Checkpoint | None,
        *,
        size: int,
        num_local: int,
        device: str,
        remote: RemoteRanks | None,
    ) -> None:
        place = self._place
        listener = RankListener(place.host, place.invitation)
        try:
            for number in range(1, num_local):
                spec = ChildSpec(module="rollbook.trainer.team", arguments=[str(place.invitation), str(number)])
                self._children.append(BlockingChild(spec))
            while (missing := size - 1 - len(self._links)) > 0:
                if remote is not None:
                    remote.doing(f"waiting for {missing} of {size} trainer ranks to join")
                    if remote.is_stopping():
                        raise StoppedBeforeAssemblyError
                for child in self._children:
                    child.require_alive()
                if (sock := listener.joined(POLL_S)) is not None:
                    rank = len(self._links) + 1
                    report = partial(self._rank_failed, rank)
                    self._links.append(Link(sock, _lost(f"trainer rank {rank}"), on_message=report))
        finally:
            listener.close()
        for rank, link in enumerate(self._links, start=1):
            welcome = _Welcome(
                rank=rank,
                size=size,
                store=str(place.store),
                device=device,
                checkpoints=checkpoints.to_wire(),
                checkpoint=None if checkpoint is None else {**asdict(checkpoint), "path": str(checkpoint.path)},
            )
            link.send(encode_call("welcome", welcome))
        host = None if remote is None else remote.host
        _join(place.store, rank=0, size=size, device=device, gpu=0, host=host)
        checkpoints.use_group(_checkpoint_group())
        self._learner = checkpoints.restore(checkpoint)

    @property
    def step(self) -> int:
        return self._learner.step

    @property
    def num_parameters(self) -> int:
        return self._learner.num_parameters

    @property
    def vocabulary_size(self) -> int:
        return self._learner.vocabulary_size

    @property
    def inexact_because(self) -> str | None:
        return self._learner.inexact_because

    @property
    def comparison(self) -> LogprobComparison:
        return self._learner.comparison

    @property
    def plan_settings(self) -> PlanSettings:
        return self._learner.plan_settings

    def run(self, batch: TrainingBatch) -> StepReport:
        return self.train(self._learner.plan_batch(batch), step=batch.step, split=batch.split)

    def train_rows(self, rows: Sequence[TrainRow], *, step: int, split: PassSplit | None = None) -> StepReport:
        return self.train(self._learner.plan_rows(rows, step=step, split=split), step=step, split=split)

    def mean_logprob(self, rows: Sequence[TrainRow]) -> float:
        """Every rank computes all passes: layers are gathered by all ranks together."""
        for rank in range(1, len(self._links) + 1):
            self._send(rank, "mean_logprob", rows)
        return self._learner.mean_logprob(rows)

    def train(self, minibatches: Sequence[Minibatch], *, step: int, split: PassSplit | None = None) -> StepReport:
        """Send each rank its own passes, and train."""
        size = len(self._links) + 1
        split = split or self.plan_settings.split
        self._failure_of = lambda error, rank: self._learner.memory_error(
            error, minibatches, step=step, split=split, rank=rank
        )
        for rank in range(1, size):
            ranks = Ranks(rank=rank, size=size)
            own = [ranks.own_passes(part.microbatches) for part in minibatches]
            self._send(rank, "train", (step, split.checkpointing, own))
        return self._learner.train(minibatches, step=step, split=split)

    def probe(self, split: PassSplit) -> None:
        """The pass of each rank has this size."""
        self._failure_of = lambda error, rank: self._learner.probe_error(error, split=split, rank=rank)
        for rank in range(1, len(self._links) + 1):
            self._send(rank, "probe", (split.max_tokens, split.checkpointing))
        self._learner.probe(split)

    def _rank_failed(self, rank: int, message: bytes) -> None:
        """Another rank ran out of memory. This one waits for it in a collective, which cannot be interrupted: end the process.

        The trainer is restarted with all ranks, and continues as `on_out_of_memory` recorded.
        """
        kind, _, detail = message.decode().partition(":")
        if kind == START or self._failure_of is None:
            self._end(RunError(f"trainer rank {rank} has no memory for its part of the model: {detail}"))
            return
        failure = self._failure_of(PassMemoryError(detail, is_optimizer=kind == OPTIMIZER), rank)
        if failure.smaller is None:
            self._end(failure)
            return
        self.on_out_of_memory(failure)
        _print_and_exit(f"{failure} All ranks are restarted, and continue with {failure.smaller}.")

    def publish_adapters(self) -> AdapterKind:
        self._send_all("publish_adapters")
        return self._learner.publish_adapters()

    def snapshot(self, *, on_gpu: bool = False) -> Mapping[str, Tensor]:
        self._send_all("snapshot")
        return self._learner.snapshot(on_gpu=on_gpu)

    def state_snapshot(self, weights: Mapping[str, Tensor]) -> LearnerSnapshot:
        self._send_all("state_snapshot")
        return self._learner.state_snapshot(weights)

    def close(self) -> None:
        for link in self._links:
            with suppress(OSError):
                link.send_last(encode_call("stop"))
        for child in self._children:
            child.join(STOP_S)
        for link in self._links:
            link.wait_closed(STOP_S)
            link.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._place.store.unlink(missing_ok=True)

    def _send_all(self, method: str) -> None:
        for rank in range(1, len(self._links) + 1):
            self._send(rank, method)

    def _send(self, rank: int, method: str, argument: Any = None) -> None:
        try:
            self._links[rank - 1].send(encode_call(method, argument))
        except OSError as error:
            raise ChildProcessError(f"trainer rank {rank} is lost ({error}); the trainer is restarted") from error


Learner = TrainStep | Team


def fitting_split(learner: Learner, split: PassSplit, on_failure: Callable[[StepMemoryError], None]) -> PassSplit:
    """The largest split, at most this one, whose passes fit into memory: tried before the first step. Blocks.

    `on_failure` is called with each failure after which a smaller split is tried. Raises `StepMemoryError` if nothing fits, and
    `ChildProcessError` if the other ranks must be restarted before the next attempt.
    """
    while True:
        try:
            learner.probe(split)
            return split
        except StepMemoryError as error:
            failure = error
        if failure.smaller is None:
            raise failure
        on_failure(failure)
        if not failure.can_retry:
            raise ChildProcessError(f"{failure} The trainer is restarted, and tries {failure.smaller}.")
        split = failure.smaller


def restored_learner(
    checkpoints: Checkpoints,
    checkpoint: Checkpoint | None,
    config: TrainerConfig,
    *,
    remote: RemoteRanks | None = None,
    end: Callable[[RunError], None] | None = None,
) -> Learner:
    """A learner in this process, or a team of ranks that shard the model. `end`: see `Team.assemble`."""
    if config.ranks == 1:
        return checkpoints.restore(checkpoint)
    return Team.assemble(checkpoints, checkpoint, size=config.ranks, device=config.device, remote=remote, end=end)


def _print_and_exit(cause: object) -> None:
    sys.stderr.write(f"{cause}\n")
    sys.stderr.flush()
    os._exit(1)


def _lost(who: str) -> Callable[[str], None]:
    return lambda cause: end_process(f"{who} {cause}")


def _join(store: Path, *, rank: int, size: int, device: str, gpu: int, host: str | None) -> None:
    """`host`: the address of this machine, if ranks are on several."""
    if device == "cuda":
        torch.cuda.set_device(gpu)
    if host is not None and (interface := interface_of(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]  # torch leaves it untyped
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


def _checkpoint_group() -> Any:
    """A group for writing checkpoints while the next step trains."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_S))


def follow(
    link: Link, *, host: str | None = None, gpu: int = 0, on_welcome: Callable[[int], None] = lambda rank: None
) -> None:
    """Run a follower: the same calls in the same order as rank 0 makes them.

    `host`: the address of this machine, if ranks are on several. `gpu`: the number of its GPU, among those that it sees.
    """
    welcome = convert(decode_call(link.receive()).arguments, _Welcome)
    on_welcome(welcome.rank)
    store = Path(welcome.store)
    _join(store, rank=welcome.rank, size=welcome.size, device=welcome.device, gpu=gpu, host=host)
    checkpoints = Checkpoints.from_wire(welcome.checkpoints)
    checkpoints.use_group(_checkpoint_group())
    found = welcome.checkpoint
    with _reporting_memory(link):
        learner = checkpoints.restore(None if found is None else Checkpoint(**{**found, "path": Path(found["path"])}))
    writing = threading.Thread()
    while True:
        match decode_call(link.receive()):
            case RankCall("train", [step, checkpointing, passes]):
                with _reporting_memory(link):
                    learner.train_passes(read_passes(passes), step=step, checkpointing=checkpointing)
            case RankCall("probe", [num_tokens, checkpointing]):
                with _reporting_memory(link):
                    learner.probe_pass(num_tokens, checkpointing=checkpointing)
            case RankCall("mean_logprob", rows):
                learner.mean_logprob(read_rows(rows))
            case RankCall("snapshot"):
                learner.model.send_weights()
            case RankCall("publish_adapters"):
                learner.publish_adapters()
            case RankCall("state_snapshot"):
                # Rank 0 writes one checkpoint at a time, so the one before is complete.
                writing = threading.Thread(target=checkpoints.write_shard, args=[learner.state_snapshot({})])
                writing.start()
            case RankCall("stop"):
                if writing.is_alive():
                    writing.join()
                link.close()
                dist.destroy_process_group()
                return
            case RankCall(method):
                raise InvalidCallError(f"the other trainer rank sent an unknown call {method!r}")


@contextmanager
def _reporting_memory(link: Link) -> Iterator[None]:
    """Report missing memory to rank 0, which records it and ends. That ends this process too."""
    try:
        yield
    except (PassMemoryError, RuntimeError, MemoryError) as error:
        kind = "pass" if isinstance(error, PassMemoryError) else START
        if kind == START and not is_out_of_memory(error):
            raise
        if isinstance(error, PassMemoryError) and error.is_optimizer:
            kind = OPTIMIZER
        link.send(f"{kind}:{str(error) or type(error).__name__}".encode())
        link.wait_closed(COLLECTIVE_S)
        raise


def join_team(invitation: Invitation) -> Link:
    """Connect to rank 0. Raises `OSError` if it cannot be reached. If it is lost later, this process ends."""
    return connect(invitation, _lost("rank 0"))


def main(channel_fd: int, invitation_file: Path, gpu: int) -> None:
    """A rank on the machine of rank 0."""
    sock = connect_to_parent(channel_fd)
    die_with_parent(sock.fileno())
    invitation = Invitation.read(invitation_file)
    if invitation is None:
        os._exit(1)  # rank 0 is gone
    # On loopback, gloo chooses the interface itself, as at rank 0.
    follow(join_team(invitation), gpu=gpu, host=None if invitation.host == LOCAL else invitation.host)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
