"""A model's weights as named tensors: their names, their digest, and atomic weight files."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rollbook.contracts.weights import DTYPE_NAMES, weights_digest
from rollbook.trainer.distributed.sharding import gathered
from rollbook.trainer.files.atomic_files import sync_directory, sync_file, writing

T = TypeVar("T")

NAMES: dict[torch.dtype, str] = {getattr(torch, name): spelled for name, spelled in DTYPE_NAMES.items()}

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


def named_weights(module: nn.Module, replaced: Mapping[nn.Parameter, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of `state_dict`, each once: tied weights appear under their first name, and receivers tie them again.

    `replaced`: tensors that take the place of parameters.
    """
    first_names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    held = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name in first_names}
    return {name: (replaced or {}).get(tensor, tensor).detach() for name, tensor in held.items()}


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


def snapshot_of(tree: T) -> T:
    """Nested containers with a copy of every tensor, which later steps do not change.

    The copies stay on their GPU if it has room for them: that takes milliseconds, and `to_host` can copy them to main memory while
    the next step trains. Tensors that are sharded over ranks are gathered in main memory.
    """
    try:
        copies = _mapped(tree, _copy)
    except torch.OutOfMemoryError:
        return _mapped(tree, lambda tensor: gathered(tensor).to("cpu", copy=True))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.current_stream().synchronize()
    return copies


def _copy(tensor: Tensor) -> Tensor:
    full = gathered(tensor)
    return full.clone() if full is tensor else full.to("cpu", copy=True)


def to_host(snapshot: T) -> T:
    """A snapshot in pinned memory, which torch keeps for the next one. For copies of every step: pinning new memory is slow.

    Copies run on a separate stream, so that they do not delay the step that trains meanwhile.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return snapshot
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.stream(stream):
        copies = _mapped(snapshot, _pinned)
    stream.synchronize()
    return copies


def _pinned(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_ordinary_memory(snapshot: T) -> T:
    """A snapshot in main memory that is not pinned, for checkpoints.

    While the driver pins gigabytes, no thread can launch kernels: the step that trains meanwhile would take seconds longer. So only
    one chunk is pinned, through which everything is copied.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return snapshot
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        return _mapped(
            snapshot, lambda tensor: copied_through(chunk, tensor, stream.synchronize) if tensor.is_cuda else tensor
        )


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
