"""Loads the module that is trained: a skeleton without memory for its weights, which are read from the files when it is where it
computes.

One rank reads them straight to its device. Several ranks shard the skeleton before, and each reads only its own rows of every
weight, so none of them ever holds all. A model whose files need a conversion is no skeleton: transformers loads it whole, in main
memory, at each rank.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.plugin import load_on_demand
from rollbook.shared_weights.base import SharedBase
from rollbook.shared_weights.files import WeightFiles, read_parameters, unread_model
from rollbook.shared_weights.modules import META, load_text_model, replace_parameters, without_memory
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.distributed.sharding import from_own_rows, layers_of, own_rows
from rollbook.trainer.model.frozen_base import ADAPTER_FILE
from rollbook.trainer.model.weights import base_name, is_adapter

PROBED_LAYERS = 2
"""Probes of the architecture need real weights, but not all layers."""


def read_module(directory: Path, config: TrainerConfig, *, is_reference: bool) -> tuple[Any, WeightFiles | None]:
    """A skeleton with the files that fill it, or the whole model."""
    try:
        if (directory / ADAPTER_FILE).is_file():
            return adapters_module().merged_module(directory), None
        opened = unread_model(directory, dtype=torch.float32)
        if opened is not None:
            return opened
        is_frozen = is_reference or config.lora is not None
        return _whole(directory, _frozen_dtype(config) if is_frozen else torch.float32), None
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise RunError(f"cannot load a model from {directory}: {type(error).__name__}: {error}") from error


def _whole(directory: Path, dtype: torch.dtype) -> Any:
    module = load_text_model(directory, dtype=dtype)
    if any(buffer.dtype is torch.bfloat16 for buffer in module.buffers()):
        # Such as rotary frequencies: they are computed in float32. The weights are rounded later.
        return load_text_model(directory, dtype=torch.float32)
    return module


def adapters_module() -> Any:
    """Imported by name: PEFT is an extra that only runs with LoRA need."""
    return load_on_demand("rollbook.trainer.model.lora")


def with_adapters(module: Any, add: Callable[[Any], Any]) -> Any:
    """The skeleton with real adapters. PEFT creates them on the device of the base weights, which must have a memory."""
    replace_parameters(module, lambda _, parameter: _like(parameter, torch.zeros(()).expand(parameter.shape)))
    added = add(module)
    replace_parameters(added, lambda name, held: held if is_adapter(name) else without_memory(held))
    return added


def placed(module: Any, config: TrainerConfig, *, files: WeightFiles | None, base: SharedBase | None) -> Any:
    """The module on its device, with its weights in their final dtypes. Skeletons of several ranks stay as they are.

    Weights of a shared base stay where they are, and those of files are read; only one of the others at a time is in memory twice.
    """
    if files is not None and config.ranks > 1:
        return module
    own = [p for p in module.parameters() if not p.is_meta and not (base is not None and base.holds(p))]

    def dtype_of(parameter: Tensor) -> torch.dtype:
        return torch.float32 if parameter.requires_grad else _frozen_dtype(config)

    if files is not None:
        read_parameters(module, files, device=config.device, dtype_of=dtype_of, name_of=base_name)
    moved = module.to(device=config.device)
    for parameter in own:
        # Equal weights give equal bits: kernels choose their order of summation by the alignment of memory, which tensors that were
        # read from a file may not have, and a copy has in every process.
        parameter.data = parameter.data.to(dtype_of(parameter), copy=True, memory_format=torch.contiguous_format)
    for buffer in moved.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return moved


def _frozen_dtype(config: TrainerConfig) -> torch.dtype:
    """Type of weights that are not trained. Sharding casts by itself."""
    return torch.bfloat16 if config.compute_dtype == "bfloat16" and config.ranks == 1 else torch.float32


def first_layers(module: Any, files: WeightFiles | None, *, device: str) -> Any:
    """A float32 copy of the first layers only. Those of a skeleton are filled with their weights."""

    def weight(name: str, held: nn.Parameter) -> nn.Parameter:
        is_missing = files is not None and held.device.type == META
        return _like(held, files.whole(base_name(name)) if files and is_missing else held.detach().float())

    # All weights are shared at first, so that the other layers are never copied.
    small = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    del layers_of(small)[PROBED_LAYERS:]
    replace_parameters(small, weight)
    return small.to(device)


def fill(module: Any, files: WeightFiles, *, device: str) -> None:
    """Fill a skeleton that was sharded: read this rank's rows of each weight."""

    def filled(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor) or parameter.device.type != META:
            return parameter
        return _like(parameter, from_own_rows(files.rows(base_name(name), own_rows(parameter)).to(device), parameter))

    replace_parameters(module, filled)


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
