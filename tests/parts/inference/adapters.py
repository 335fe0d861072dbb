"""PEFT adapters for the tiny models: as a directory, as a publication, and as a PEFT model for comparison."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import Adapter, adapter_name, weights_digest
from rollbook.inference.weights.lora import TENSOR_FILE, read_adapter
from tests.parts.inference.models import publication


def make_adapter(directory: Path, model_dir: Path, *, seed: int = 1, **settings: Any) -> Path:
    """An adapter with both factors far from zero, saved by PEFT."""
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    # GPT-2 stores its matrices transposed.
    defaults["fan_in_fan_out"] = base.config.model_type == "gpt2"
    config = LoraConfig(**{**defaults, **settings})
    torch.manual_seed(seed)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(str(directory), save_embedding_layers=False)
    return directory


def peft_model(model_dir: Path, adapter_dir: Path) -> Any:
    """Base and adapter in PEFT, not merged."""
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    return PeftModel.from_pretrained(base, str(adapter_dir)).eval()


def published_adapter(directory: Path, number: int, *, epoch: int = 1) -> tuple[Publication, Path, Adapter]:
    """The publication that a trainer would make of it."""
    settings, tensors = read_adapter(directory)
    offered = publication(number, weights_digest(tensors.values()), epoch=epoch)
    return offered, directory / TENSOR_FILE, Adapter(name=adapter_name(PublicationId(number)), settings=settings)
