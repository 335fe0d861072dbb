"""A model that several ranks load by slices: each rank reads only its own rows of every weight from the files.

The model is built without memory for its weights, sharded, and then filled, so no rank ever holds all weights. This needs
safetensors files with the names and shapes of the model's weights. Other models are loaded whole at each rank, and then sharded.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from rollbook.trainer.distributed.sharding import from_own_rows, layers_of, own_rows
from rollbook.trainer.model.weights import base_name, is_adapter, named_weights

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
GENERATION = "generation_config.json"
META = "meta"
TEXT_PARTS: tuple[dict[str, str] | None, ...] = (
    None,
    {r"^language_model\.": ""},
    {r"^model\.language_model\.": "model."},
)
"""How the names of a multimodal checkpoint become those of its text model, where transformers does not know it."""
PROBED_LAYERS = 2
"""Probes of the architecture need real weights, but not all layers."""


class WeightFiles:
    """The safetensors files of a Hugging Face directory."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(str(path), framework="pt")
            self._file_of |= dict.fromkeys(file.keys(), file)

    @classmethod
    def of(cls, directory: Path) -> "WeightFiles | None":
        """None: the directory has no safetensors files."""
        if (directory / INDEX).is_file():
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
            return cls(directory / name for name in sorted(set(index["weight_map"].values())))
        return cls([directory / WEIGHTS]) if (directory / WEIGHTS).is_file() else None

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        return all(
            name in self._file_of and tuple(self._file_of[name].get_slice(name).get_shape()) == tuple(weight.shape)
            for name, weight in weights.items()
        )

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a weight in float32, without reading the others. A copy: the library returns views into the mapped file."""
        read: Tensor = self._file_of[name].get_slice(name)[rows]
        return read.to(torch.float32, copy=True)

    def whole(self, name: str) -> Tensor:
        read: Tensor = self._file_of[name].get_tensor(name)
        return read.float()


class _EmptyTensorsHaveNoMemory(TorchFunctionMode):
    """Modules create their weights with `torch.empty`, and their buffers with other functions, which keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = META
        return func(*args, **kwargs)


def load_text_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """A causal language model, or the text part of a multimodal checkpoint. Raises `ValueError` if weights are missing:
    transformers would initialise them at random."""
    config: Any = AutoConfig.from_pretrained(str(directory))
    text = config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        text = config
    missing: list[str] = []
    for mapping in TEXT_PARTS if text is not config else TEXT_PARTS[:1]:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory), config=text, dtype=dtype, output_loading_info=True, key_mapping=mapping
        )
        module, found = loaded
        if not found["missing_keys"]:
            return module
        missing = missing or sorted(found["missing_keys"])
    raise ValueError(f"its files lack {len(missing)} weights of a {text.model_type} model, such as {missing[0]}")


def skeleton(directory: Path, files: WeightFiles) -> Any | None:
    """The model of a Hugging Face directory without memory for its weights. None: the files need a conversion to its weights."""
    config: Any = AutoConfig.from_pretrained(str(directory))
    if getattr(config, "quantization_config", None) is not None:
        return None
    with _EmptyTensorsHaveNoMemory():
        module: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            config, dtype=torch.float32
        )
    if any(buffer.is_meta for buffer in module.buffers()) or not files.holds(named_weights(module)):
        return None
    if (directory / GENERATION).is_file():
        module.generation_config = GenerationConfig.from_pretrained(str(directory))
    stored = named_weights(module)
    for name, buffer in module.named_buffers():
        if name in stored:
            buffer.copy_(files.whole(name))
    _replace_parameters(module, lambda _, parameter: _without_memory(parameter))
    return module


def with_adapters(module: Any, add: Callable[[Any], Any]) -> Any:
    """The skeleton with real adapters. PEFT creates them on the device of the base weights, which must have a memory."""
    _replace_parameters(module, lambda _, parameter: _like(parameter, torch.zeros(()).expand(parameter.shape)))
    added = add(module)
    _replace_parameters(added, lambda name, held: held if is_adapter(name) else _without_memory(held))
    return added


def first_layers(module: Any, files: WeightFiles | None, *, device: str) -> Any:
    """A float32 copy of the first layers only. Those of a skeleton are filled with their weights."""

    def weight(name: str, held: nn.Parameter) -> nn.Parameter:
        is_missing = files is not None and held.device.type == META
        return _like(held, files.whole(base_name(name)) if files and is_missing else held.detach().float())

    # All weights are shared at first, so that the other layers are never copied.
    small = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    del layers_of(small)[PROBED_LAYERS:]
    _replace_parameters(small, weight)
    return small.to(device)


def fill(module: Any, files: WeightFiles, *, device: str) -> None:
    """Fill a skeleton that was sharded: read this rank's rows of each weight."""

    def filled(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor) or parameter.device.type != META:
            return parameter
        return _like(parameter, from_own_rows(files.rows(base_name(name), own_rows(parameter)).to(device), parameter))

    _replace_parameters(module, filled)


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return _like(parameter, torch.empty(parameter.shape, device=META))


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _replace_parameters(module: nn.Module, change: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter. Tied ones are replaced by the same new one, under the name of the first."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in replaced:
                replaced[parameter] = change(f"{path}.{name}" if path else name, parameter)
            setattr(part, name, replaced[parameter])
