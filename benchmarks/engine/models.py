"""Builds random-weight Llama models as Hugging Face directories, and opens engines with them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.inference.weights.safetensors import read_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_len: int
    tied: bool = True

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        head = self.hidden // self.heads
        return self.hidden * head * (2 * self.heads + 2 * self.kv_heads) + 3 * self.hidden * self.ffn


SMOLLM2_135M = Shape(layers=30, hidden=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, max_len=8192)
QWEN_1_5B = Shape(layers=28, hidden=1536, heads=12, kv_heads=2, ffn=8960, vocab=151_936, max_len=4096)
ONE_MILLION = Shape(layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=1024, max_len=1024)
SMALL = Shape(layers=2, hidden=96, heads=6, kv_heads=2, ffn=256, vocab=512, max_len=1024)
TINY = Shape(layers=1, hidden=16, heads=2, kv_heads=1, ffn=32, vocab=512, max_len=1024)


def llama_config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_len,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def build(shape: Shape, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(llama_config(shape))
    with torch.no_grad():
        # Larger than at the start of training, so that distributions are far from uniform.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.05)
    return model.to(dtype).eval().requires_grad_(False)


def make_model_dir(directory: Path, shape: Shape, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    model = build(shape, seed=seed, dtype=dtype)
    model.save_pretrained(directory)
    return model


def publish(path: Path, model: Any, number: int) -> Publication:
    """Write distinct tensors only, as a trainer does."""
    distinct: dict[int, tuple[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        distinct.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    save_file(dict(distinct.values()), path)
    digest = weights_digest(read_weights(path).values())
    return Publication(id=PublicationId(number), epoch=1, step=number, digest=digest)


@asynccontextmanager
async def opened(
    config: InferenceConfig, model_dir: Path, weights: tuple[Publication, Path], **options: Any
) -> AsyncIterator[TransformersEngine]:
    async with open_engine(config, model_dir, **options) as engine:
        await engine.load_weights(*weights)
        yield engine
