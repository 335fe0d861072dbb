"""Causal language models of transformers: whole, or without memory for their weights, which are then tensors of another owner."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

GENERATION = "generation_config.json"
META = "meta"
TEXT_PARTS: tuple[dict[str, str] | None, ...] = (
    None,
    {r"^language_model\.": ""},
    {r"^model\.language_model\.": "model."},
)
"""How the names of a multimodal checkpoint become those of its text model, where transformers does not know it."""


def load_text_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """A causal language model in main memory, or the text part of a multimodal checkpoint. Raises `ValueError` if weights are
    missing: transformers would initialise them at random."""
    text, is_part = _text_config(directory)
    missing: list[str] = []
    for mapping in TEXT_PARTS if is_part else TEXT_PARTS[:1]:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            config=text,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=mapping,
        )
        module, found = loaded
        if not found["missing_keys"]:
            return module
        missing = missing or sorted(found["missing_keys"])
    raise ValueError(f"its files lack {len(missing)} weights of a {text.model_type} model, such as {missing[0]}")


class EmptyTensorsHaveNoMemory(TorchFunctionMode):
    """Modules create their weights with `torch.empty`, and their buffers with other functions, which keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = META
        return func(*args, **kwargs)


def empty_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """The causal language model of a Hugging Face directory, or the text part of a multimodal one, without memory for its weights.

    Buffers that are not in the files have their values.
    """
    text, _ = _text_config(directory)
    with EmptyTensorsHaveNoMemory():
        module: Any = AutoModelForCausalLM.from_config(text, dtype=dtype)
    if (directory / GENERATION).is_file():
        module.generation_config = GenerationConfig.from_pretrained(str(directory))
    return module


def _text_config(directory: Path) -> tuple[Any, bool]:
    """The configuration of the language model, and whether it is a part of another one."""
    config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    text = config.get_text_config()
    return (config, False) if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING else (text, text is not config)


def named_weights(module: nn.Module, replaced: Mapping[nn.Parameter, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of `state_dict`, each once: tied weights appear under their first name, and receivers tie them again.

    `replaced`: tensors that take the place of parameters.
    """
    first_names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    held = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name in first_names}
    return {name: (replaced or {}).get(tensor, tensor).detach() for name, tensor in held.items()}


def assign(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Use these tensors as the parameters, frozen and without a copy, and copies of them as buffers. By the names of `state_dict`,
    tied ones under their first name; tied parameters stay tied."""
    replace_parameters(module, lambda name, _: nn.Parameter(weights[name], requires_grad=False))
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, _ in list(part.named_buffers(recurse=False)):
            if prefix + name in weights:
                setattr(part, name, weights[prefix + name].clone())


def replace_parameters(module: nn.Module, change: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter. Tied ones are replaced by the same new one, under the name of the first."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in replaced:
                replaced[parameter] = change(f"{path}.{name}" if path else name, parameter)
            setattr(part, name, replaced[parameter])


def without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape and dtype."""
    return nn.Parameter(
        torch.empty(parameter.shape, dtype=parameter.dtype, device=META), requires_grad=parameter.requires_grad
    )
