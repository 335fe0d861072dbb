"""Loads a model straight to its device: each weight is read from its safetensors file, moved, and converted there.

Main memory then holds a few weights at a time. This needs files with the names and shapes of the model's weights; transformers
converts all others, in main memory.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from rollbook.shared_weights.modules import (
    empty_model,
    load_text_model,
    named_weights,
    replace_parameters,
    without_memory,
)

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
READERS = 4
"""Weights that are read at the same time: one thread does not read a file as fast as the disk."""


class WeightFiles:
    """The safetensors files of a Hugging Face directory."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises `ValueError` if one is damaged."""
        self._file_of: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(str(path), framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    @classmethod
    def of(cls, directory: Path) -> "WeightFiles | None":
        """None: the directory has no safetensors files."""
        if (directory / WEIGHTS).is_file():
            return cls([directory / WEIGHTS])
        if (directory / INDEX).is_file():
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
            return cls(directory / name for name in sorted(set(index["weight_map"].values())))
        return None

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        return all(
            name in self and tuple(self._file_of[name].get_slice(name).get_shape()) == tuple(weight.shape)
            for name, weight in weights.items()
        )

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a weight in float32, without reading the others. A copy: the library returns views into the mapped file."""
        read: Tensor = self._file_of[name].get_slice(name)[rows]
        return read.to(torch.float32, copy=True)

    def whole(self, name: str) -> Tensor:
        return self.stored(name).float()

    def stored(self, name: str) -> Tensor:
        """In the dtype of the file."""
        read: Tensor = self._file_of[name].get_tensor(name)
        return read

    def placed(self, name: str, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """In new memory of a device. Equal weights give equal bits: kernels choose their order of summation by the alignment of
        memory, which is that of new memory in every process, and not that of a file."""
        read = self.stored(name)
        moved = read.to(device)
        return moved.to(dtype, copy=moved is read, memory_format=torch.contiguous_format)


def unread_model(directory: Path, *, dtype: torch.dtype) -> tuple[Any, WeightFiles] | None:
    """The model of a directory without memory for its weights, and the files that hold them; buffers have their values. None: the
    files need a conversion."""
    files = WeightFiles.of(directory)
    if files is None or "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8")):
        return None
    module = empty_model(directory, dtype=dtype)
    weights = named_weights(module)
    # Where tied weights are stored twice, transformers ties them only if they are equal.
    tied = module.state_dict().keys() - weights.keys()
    if (
        any(buffer.is_meta for buffer in module.buffers())
        or not files.holds(weights)
        or any(name in files for name in tied)
        or _is_converted(module, weights)
    ):
        return None
    # As transformers notes it: weights are published under the names of the module.
    module._weight_conversions = []
    for name, buffer in module.named_buffers():
        if name in weights:
            buffer.copy_(files.stored(name))
    replace_parameters(module, lambda _, parameter: without_memory(parameter))
    return module, files


def read_parameters(
    module: nn.Module,
    files: WeightFiles,
    *,
    device: str,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    name_of: Callable[[str], str] = str,
) -> None:
    """Read all parameters that have no memory. `name_of`: the name in the files of a parameter of the module."""
    # Threads have a current device of their own.
    place = torch.empty(0, device=device).device

    def read(item: tuple[str, nn.Parameter]) -> Tensor:
        name, parameter = item
        return files.placed(name_of(name), device=place, dtype=dtype_of(parameter))

    missing = {name: parameter for name, parameter in module.named_parameters() if parameter.is_meta}
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        values = dict(zip(missing, pool.map(read, missing.items()), strict=True))
    replace_parameters(
        module,
        lambda name, held: nn.Parameter(values[name], requires_grad=held.requires_grad) if name in values else held,
    )


def load_model(directory: Path, *, device: str, dtype: torch.dtype) -> Any:
    """The language model of a Hugging Face directory on a device, with the dtypes that transformers would give its weights."""
    opened = unread_model(directory, dtype=dtype)
    if opened is None or _keeps_float32(opened[0], dtype):
        return load_text_model(directory, dtype=dtype).to(device)
    module, files = opened
    read_parameters(module, files, device=device, dtype_of=lambda parameter: parameter.dtype)
    return module.to(device)


def _keeps_float32(module: Any, dtype: torch.dtype) -> bool:
    """transformers loads some weights of the model in float32."""
    return bool(module._keep_in_fp32_modules_strict or (dtype is torch.float16 and module._keep_in_fp32_modules))


def _is_converted(module: Any, weights: Mapping[str, Tensor]) -> bool:
    """Whether transformers would rename or convert one of these weights when it reads files with their names."""
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = module.state_dict()
    return any(
        rename_source_key(name, renamings, converters, module.base_model_prefix, known) != (name, None)
        for name in weights
    )
