"""Tiny random causal language models as Hugging Face directories, and weight files as a trainer publishes them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import weights_digest
from rollbook.inference.weights.safetensors import read_weights
from rollbook.trainer.model.weights import as_in_files
from tests.models.families import family

VOCAB = 32
MAX_LEN = 256
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON, **SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**COMMON, **SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, **SHAPE, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LEN),
}


def build_model(kind: str = "llama", *, seed: int = 0) -> Any:
    """A model with weights large enough that its distributions are far from uniform. `kind`: one of `CONFIGS`, or a model type of
    `FAMILIES`."""
    if kind not in CONFIGS:
        return family(kind).model(seed)
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model.eval()


def save_model(directory: Path, kind: str = "llama", *, seed: int = 0) -> Any:
    model = build_model(kind, seed=seed)
    model.save_pretrained(directory)
    return model


def write_weights(path: Path, model: Any) -> str:
    """As a trainer does it: distinct tensors only, atomic rename. Gives the digest."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            distinct[name] = tensor.contiguous()
    distinct = {name: tensor.contiguous() for name, tensor in as_in_files(model, distinct).items()}
    partial = path.with_suffix(".partial")
    save_file(distinct, partial)
    partial.replace(path)
    return weights_digest(read_weights(path).values())


def publication(number: int, digest: str, *, step: int | None = None, epoch: int = 1) -> Publication:
    return Publication(id=PublicationId(number), epoch=epoch, step=number if step is None else step, digest=digest)


def publish(path: Path, model: Any, number: int, *, epoch: int = 1) -> Publication:
    """Write the model's weights to `path` as publication `number`."""
    return publication(number, write_weights(path, model), epoch=epoch)


def plain_logprobs(model: Any, tokens: list[int], start: int, *, temperature: float = 1.0) -> list[float]:
    """Logprobs of tokens[start:] from one plain forward over the whole sequence, no cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return [float(logprobs[at - 1, tokens[at]]) for at in range(start, len(tokens))]
