"""Loads the frozen base of adapters into memory that trainer and policy servers share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.shared_weights.base import BaseOwner, NotSharedError, SharedBase
from rollbook.shared_weights.files import WeightFiles
from rollbook.shared_weights.modules import assign, empty_model, load_text_model, named_weights
from rollbook.shared_weights.packing import headers_of, tensors_digest
from rollbook.trainer.model.weights import as_in_files

ADAPTER_FILE = "adapter_config.json"
"""Its presence marks a PEFT directory."""


def own_base(directory: Path, *, dtype: str, device: str) -> tuple[BaseOwner, str]:
    """The base in new memory, with its digest. Raises `NotSharedError` if trainer and engine would not compute with these bytes."""
    if (directory / ADAPTER_FILE).is_file():
        raise NotSharedError("the model is a PEFT directory: the trainer merges its adapter, and the engine does not")
    try:
        module, read = _source(directory, getattr(torch, dtype))
        base = BaseOwner(headers_of(named_weights(module)), read, device=device)
        return base, tensors_digest(as_in_files(module, base.tensors))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, RunError) or is_out_of_memory(error):
            raise
        raise RunError(f"cannot load a model from {directory}: {type(error).__name__}: {error}") from error


def module_of(directory: Path, base: SharedBase) -> Any:
    """The model with the shared weights. Buffers are float32, as those of every model that is trained."""
    module = empty_model(directory, dtype=torch.float32)
    assign(module, base.tensors)
    return module


def _source(directory: Path, dtype: torch.dtype) -> tuple[Any, Callable[[str], Tensor]]:
    """The model, and what reads its weights: its files, if they have the names and shapes of the module."""
    empty = empty_model(directory, dtype=dtype)
    if getattr(empty.config, "quantization_config", None) is not None:
        raise NotSharedError("its files are quantised")
    if any(buffer.is_meta for buffer in empty.buffers()):
        raise NotSharedError(f"models of type {empty.config.model_type} compute their buffers from the weights")
    files, weights = WeightFiles.of(directory), named_weights(empty)
    has_one_dtype = all(p.dtype is dtype for p in empty.parameters()) and not empty._keep_in_fp32_modules_strict
    has_buffers = len(weights) > len(list(empty.parameters()))
    if files is not None and has_one_dtype and not has_buffers and files.holds(weights):
        return empty, files.stored
    module = load_text_model(directory, dtype=dtype)
    found = {parameter.dtype for parameter in module.parameters()}
    if found != {dtype}:
        raise NotSharedError(f"models of type {module.config.model_type} have weights in several precisions")
    weights = named_weights(module)
    rounded = [
        n for n, _ in module.named_buffers() if n in weights and weights[n].dtype in (torch.bfloat16, torch.float16)
    ]
    if rounded:
        raise NotSharedError(f"the engine rounds {rounded[0]}, and the trainer does not")
    return module, weights.__getitem__
