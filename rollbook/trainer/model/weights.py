"""A model's weights as named tensors: their names, their digest, and atomic weight files."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rollbook.contracts.errors import is_out_of_memory
from rollbook.contracts.weights import weights_digest
from rollbook.shared_weights.packing import NAMES, PackedWeights, tensors_digest
from rollbook.trainer.distributed.sharding import gathered
from rollbook.trainer.files.atomic_files import sync_directory, sync_file, writing

T = TypeVar("T")

log = logging.getLogger(__name__)

PEFT_PREFIX = "base_model.model."
PEFT_BASE = ".base_layer"

CHUNK_BYTES = 64 << 20
"""Pinned for the copy of a checkpoint."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def as_in_files(module: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights of a module under the names and in the shapes of its checkpoint's files: transformers keeps, for example, all experts
    of a layer in one tensor. Engines such as vLLM know the names of the files only."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    if not get_model_conversion_mapping(base) and getattr(base, "_weight_conversions", None) is None:
        return weights
    converted: dict[str, Tensor] = revert_weight_conversion(base, dict(weights))
    return converted


def base_name(name: str) -> str:
    """The name that a weight has in the base model. PEFT adds a prefix to all, and a suffix to the layers with adapters."""
    return name.removeprefix(PEFT_PREFIX).replace(PEFT_BASE, "")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def snapshot_of(tree: T, *, on_gpu: bool) -> T:
    """Nested containers with a copy of every tensor, which later steps do not change, for a checkpoint.

    `on_gpu`: copies of tensors of a GPU stay there, which takes milliseconds. Tensors that are sharded over ranks are gathered in
    main memory.
    """
    _wait_for_gpu()
    copies = _copied_on_gpu(lambda: _mapped(tree, _copy)) if on_gpu else None
    return _through_chunk(tree, _copy_unless_on_gpu) if copies is None else copies


def published_copy(weights: Mapping[str, Tensor], *, device: str) -> Mapping[str, Tensor]:
    """A copy of weights, which later steps do not change, for a publication.

    With `device = "cuda"` it is made there, which takes milliseconds, in one block that servers can map; otherwise in main memory,
    pinned if the weights are on a GPU. Weights that are sharded over ranks are gathered in main memory.
    """
    _wait_for_gpu()
    copies = _copied_on_gpu(lambda: PackedWeights(weights, device=device)) if device == "cuda" else None
    return _pinned(weights, _copy_unless_on_gpu) if copies is None else copies


def _copied_on_gpu(copy: Callable[[], T]) -> T | None:
    """None if the GPU has no memory left, against the memory plan."""
    try:
        copies = copy()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("the GPU has no memory for a copy that was planned there; it is made in main memory: %s", error)
        return None
    _wait_for_gpu()
    return copies


def _copy(tensor: Tensor) -> Tensor:
    full = gathered(tensor)
    return full.clone() if full is tensor else full.to("cpu", copy=True)


def _copy_unless_on_gpu(tensor: Tensor) -> Tensor:
    full = gathered(tensor)
    return full if full is tensor and full.is_cuda else full.to("cpu", copy=True)


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.current_stream().synchronize()


def to_host(snapshot: T) -> T:
    """A snapshot in pinned memory, which torch keeps for the next one. For copies of every step: pinning new memory is slow."""
    return _pinned(snapshot, lambda tensor: tensor)


def _pinned(tree: T, prepare: Callable[[Tensor], Tensor]) -> T:
    """Copies run on a separate stream, so that they do not delay the step that trains meanwhile."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _mapped(tree, prepare)

    def pinned(tensor: Tensor) -> Tensor:
        if not (found := prepare(tensor)).is_cuda:
            return found
        return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.stream(stream):
        copies = _mapped(tree, pinned)
    stream.synchronize()
    return copies


def to_ordinary_memory(snapshot: T) -> T:
    """A snapshot in main memory that is not pinned, for checkpoints.

    While the driver pins gigabytes, no thread can launch kernels: the step that trains meanwhile would take seconds longer. So only
    one chunk is pinned, through which everything is copied.
    """
    return _through_chunk(snapshot, lambda tensor: tensor)


def _through_chunk(tree: T, prepare: Callable[[Tensor], Tensor]) -> T:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _mapped(tree, prepare)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)

    def ordinary(tensor: Tensor) -> Tensor:
        found = prepare(tensor)
        return copied_through(chunk, found, stream.synchronize) if found.is_cuda else found

    with torch.cuda.stream(stream):
        return _mapped(tree, ordinary)


def copied_through(chunk: Tensor, tensor: Tensor, synchronize: Callable[[], None]) -> Tensor:
    """A copy in main memory, of which at most `chunk` is copied at a time."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    source, target = (data.reshape(-1).view(torch.uint8) for data in (tensor, copy))
    for start in range(0, len(source), len(chunk)):
        part = source[start : start + len(chunk)]
        staged = chunk[: len(part)].copy_(part, non_blocking=True)
        synchronize()
        target[start : start + len(part)] = staged
    return copy


def _mapped(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    changed: Any = tree
    if isinstance(tree, Tensor):
        changed = change(tree.detach())
    elif isinstance(tree, Mapping):
        changed = {key: _mapped(value, change) for key, value in tree.items()}
    elif isinstance(tree, (list, tuple)):
        changed = type(tree)(_mapped(value, change) for value in tree)
    return cast(T, changed)


def digest_of(weights: Mapping[str, Tensor]) -> str:
    return weights_digest(_raw(weights))


def device_digest(weights: Mapping[str, Tensor]) -> str:
    """Digest of complete copies on a GPU, which training does not change. Few of them are in main memory at a time."""
    with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_initialized() else nullcontext():  # type: ignore[no-untyped-call]
        return tensors_digest(weights)


def _raw(weights: Mapping[str, Tensor]) -> Iterator[_Bytes]:
    for name, tensor in weights.items():
        plain = gathered(tensor.detach()).cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data
        yield _Bytes(name, NAMES[tensor.dtype], tuple(tensor.shape), data)


def write_weights(weights: Mapping[str, Tensor], path: Path, *, digest: str, is_durable: bool = True) -> None:
    """Write a safetensors file atomically.

    `is_durable=False` does not wait for the disk: for weights that are published again after a crash.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(plain, str(unfinished), metadata={"format": "pt", "rollbook_digest": digest})
            if is_durable:
                sync_file(unfinished)
            unfinished.replace(path)
            if is_durable:
                sync_directory(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)
