"""The shards of a checkpoint: each rank writes and reads its own part of the weights and of the optimizer's state, concurrently.

They are stored in a directory that all ranks see, or in a bucket, in the format of `torch.distributed.checkpoint`. The folder of a
checkpoint has a name that is used once: a checkpoint is complete only if a manifest in the run directory names its folder.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.trainer.step import TrainStep

S3 = "s3://"
WEIGHT = "model."
OPTIMIZER = "optimizer."


class ShardStorage(Protocol):
    """Where shards are stored: `ShardDirectory`, or `S3Shards` for a bucket."""

    @property
    def location(self) -> str: ...

    def folders(self) -> set[str]:
        """The folders of all checkpoints, including incomplete ones."""

    def files(self, folder: str) -> dict[str, int]:
        """The files of a folder with their sizes in bytes."""

    def remove(self, folder: str) -> None: ...
    def writer(self, folder: str) -> FileSystemWriter: ...
    def reader(self, folder: str) -> FileSystemReader: ...


class ShardDirectory:
    """Satisfies `ShardStorage`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def location(self) -> str:
        return str(self._path)

    def folders(self) -> set[str]:
        return {path.name for path in self._path.iterdir()} if self._path.is_dir() else set()

    def files(self, folder: str) -> dict[str, int]:
        path = self._path / folder
        return {file.name: file.stat().st_size for file in path.iterdir()} if path.is_dir() else {}

    def remove(self, folder: str) -> None:
        shutil.rmtree(self._path / folder, ignore_errors=True)

    def writer(self, folder: str) -> FileSystemWriter:
        return FileSystemWriter(self._path / folder)

    def reader(self, folder: str) -> FileSystemReader:
        return FileSystemReader(self._path / folder)


def open_shards(location: str) -> ShardStorage:
    """The storage at a directory or an `s3://bucket/prefix`."""
    if not location.startswith(S3):
        return ShardDirectory(Path(location))
    storage: ShardStorage = load_on_demand("rollbook.trainer.checkpoints.s3:S3Shards")(location)
    return storage


def save_shards(storage: ShardStorage, folder: str, shards: Mapping[str, Tensor], group: Any = None) -> None:
    """Write this rank's part of `shards`. All ranks of `group` must call it; it returns when all have written theirs."""
    with _reported(f"the shards {storage.location}/{folder} could not be written"):
        save(dict(shards), storage_writer=storage.writer(folder), process_group=group, no_dist=group is None)


def load_shards(storage: ShardStorage, folder: str, learner: TrainStep, groups: list[dict[str, Any]]) -> None:
    """Read weights and optimizer state into the learner. The number of ranks may differ from the one that wrote them.

    `groups`: the parameter groups of the optimizer's state.
    """
    with _reported(f"the shards {storage.location}/{folder} cannot be read"):
        reader = storage.reader(folder)
        stored = reader.read_metadata().state_dict_metadata
        weights = {WEIGHT + name: tensor for name, tensor in learner.model.checkpointed_weights().items()}
        state = {key: _like(learner.trained[_number(key)], stored[key]) for key in stored if key.startswith(OPTIMIZER)}
        targets: dict[str, Any] = {**weights, **state}
        load(targets, storage_reader=storage.reader(folder), no_dist=not dist.is_initialized())
    by_parameter: dict[int, dict[str, Any]] = {}
    for key in state:
        by_parameter.setdefault(_number(key), {})[key.rpartition(".")[2]] = targets[key]
    learner.load_optimizer({"state": by_parameter, "param_groups": groups})
    learner.model.update_shadow()


def _number(key: str) -> int:
    return int(key.removeprefix(OPTIMIZER).partition(".")[0])


def _like(parameter: Tensor, stored: Any) -> Tensor:
    """Room for a stored tensor: sharded like its parameter if it has the same shape. Others are in main memory, as in a file."""
    if isinstance(parameter, DTensor) and stored.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn the errors of storage and ranks into one `RunError`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
        raise RunError(f"{what} ({'; '.join(sorted(causes))}). Correct the cause and start the run again") from error
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        raise RunError(
            f"{what} ({type(error).__name__}: {error}). Correct the cause and start the run again: it resumes"
        ) from error
