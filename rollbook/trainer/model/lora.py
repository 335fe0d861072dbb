"""Low-rank adapters with PEFT. Imported only where `trainer.lora` is set, because PEFT is an extra.

The base model stays unchanged in the run's model directory; a checkpoint holds the adapters only, in PEFT's format. The trainer
publishes the adapters where the engines support them, else the merged weights under the base model's names.
"""

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rollbook.contracts.errors import RunError
from rollbook.numerics.module_parts import DELTA_PARTS, GROUPED_DELTA_PARTS
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.distributed.sharding import gathered
from rollbook.trainer.model.weights import base_name, is_adapter

try:
    from peft.utils import transformers_weight_conversion as renamed_layers
except ImportError:  # before PEFT 0.19
    renamed_layers = None

NAME = "default"
CONFIG_FILE = "adapter_config.json"


def with_adapters(base: Any, settings: LoraSettings, *, base_dir: Path, seed: int, saved: Path | None) -> Any:
    """The base with new adapters, which start as the identity, or with those of a checkpoint. Adapters are float32."""
    with _without_weights(base):
        return _adapted(base, settings, base_dir=base_dir, seed=seed, saved=saved)


@contextmanager
def _without_weights(base: nn.Module) -> Iterator[None]:
    """Within the context, the weights are float32 of the same shapes that take no memory: PEFT rounds new adapters to the dtype of
    the base, which may be bfloat16."""
    held = [(parameter, parameter.data) for parameter in base.parameters()]
    for parameter, data in held:
        if not data.is_meta:
            parameter.data = torch.zeros(1).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


def _adapted(base: Any, settings: LoraSettings, *, base_dir: Path, seed: int, saved: Path | None) -> Any:
    if saved is not None:
        return PeftModel.from_pretrained(base, str(saved), adapter_name=NAME, is_trainable=True)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_linear_layers(base) if isinstance(settings.targets, str) else list(settings.targets),
        target_parameters=_expert_weights(base) if settings.experts else None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base_dir),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # Fused experts: PEFT makes patterns for parameters, and warns that they match no module.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        return get_peft_model(base, config, adapter_name=NAME)


def _linear_layers(base: Any) -> list[str]:
    """The names of all linear layers but the output embedding; also without layers that compute more than a product, to which PEFT
    would add one, and projections whose weights Mamba's kernels read directly, which PEFT refuses.

    Not PEFT's "all-linear": for some families it adds the experts and their routers, for others it does not. In those families it
    takes names such as `gate_proj` for weights of experts, so dense layers with these names are left out.
    """
    head = base.get_output_embeddings()
    names_of_experts = _names_of_experts(base.config.model_type)
    return [
        name
        for name, part in base.named_modules()
        if type(part) in (nn.Linear, Conv1D)
        and part is not head
        and name.rpartition(".")[2] not in names_of_experts
        and not (name.endswith(".out_proj") and _is_mamba(base.get_submodule(name.rpartition(".")[0])))
    ]


def _is_mamba(part: nn.Module) -> bool:
    return hasattr(part, "A_log") and not any(hasattr(part, name) for name in (DELTA_PARTS[0], GROUPED_DELTA_PARTS[0]))


def _names_of_experts(model_type: str) -> Collection[str]:
    """Names of layers that PEFT takes for weights of experts in models of this type."""
    kinds = getattr(renamed_layers, "_MODEL_TO_CONVERSION_PATTERN", {})
    names = getattr(renamed_layers, "_MOE_TARGET_MODULE_MAPPING", {})
    found: Collection[str] = names.get(kinds.get(model_type), ())
    return found


def _expert_weights(base: Any) -> list[str]:
    """The names of the weights that hold a matrix for each expert of a layer."""
    found = [name for name, weight in base.named_parameters() if ".experts." in name and weight.ndim == 3]
    if not found:
        raise RunError(
            "trainer.lora.experts = true, but the model has no experts whose weights PEFT can adapt; unset it"
        )
    return found


def merged_module(directory: Path) -> Any:
    """A plain model from a PEFT directory: the base with the adapter merged into it."""
    settings = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(base, str(directory)).merge_and_unload()
    return merged


class MergedWeights(Mapping[str, Tensor]):
    """The merged weights, under the names of the base model. Each is computed when it is read.

    With several ranks, reading is a collective: all ranks must read the same weights in the same order.
    """

    def __init__(self, model: Any) -> None:
        self._weights = base_weights(model)
        self._deltas = {
            # PEFT wraps a parameter, such as the weights of all experts, in a layer that knows its name.
            f"{base_name(name)}.{getattr(part, 'parameter_name', 'weight')}": _Delta(part)
            for name, part in model.named_modules()
            if hasattr(part, "get_delta_weight")
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        # The frozen base may be in bfloat16; the sum is published in float32.
        weight, delta = gathered(self._weights[name]).float(), self._deltas.get(name)
        if delta is None:
            return weight
        # Whole matrices are multiplied, so the bits do not depend on the number of ranks.
        whole = {key: gathered(held.detach()) for key, held in delta.named_parameters() if is_adapter(key)}
        added: Tensor = torch.func.functional_call(delta, whole, ())
        return weight + added

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Delta(nn.Module):
    """What the adapter of one layer adds to its weight."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        delta: Tensor = self.layer.get_delta_weight(NAME)
        return delta


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the adapters only, named as in PEFT's files."""
    found: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=NAME)
    return found


def base_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the base model, under its own names."""
    return {base_name(name): weight for name, weight in named_weights(model).items() if not is_adapter(name)}


def settings_of(model: Any) -> dict[str, Any]:
    """The contents of PEFT's adapter_config.json."""
    settings = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in model.peft_config[NAME].to_dict().items()
    }
    return {**settings, "inference_mode": True}


def save_adapters(model: Any, directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a PEFT directory from a snapshot of the adapters."""
    directory.mkdir(parents=True, exist_ok=True)
    full = {name.replace(".weight", f".{NAME}.weight"): tensor for name, tensor in weights.items()}
    model.save_pretrained(str(directory), state_dict=full, selected_adapters=[NAME])


def adapters_disabled(model: Any) -> AbstractContextManager[Any]:
    """Compute with the base model only, while the context lasts."""
    context: AbstractContextManager[Any] = model.disable_adapter()
    return context
