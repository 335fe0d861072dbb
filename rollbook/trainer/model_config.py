"""Settings of the model that is trained."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3 of a built tokenizer, in this order."""


class ModelBuildConfig(BaseModel, frozen=True, extra="forbid"):
    """A small Llama built for the run: seeded random weights and a tokenizer of whole words or of bytes."""

    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""

    layers: int = Field(default=4, ge=1)
    """Number of transformer blocks."""

    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide `hidden_size` into an even head width."""

    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads; must divide `heads`."""

    intermediate_size: int = Field(default=352, ge=8)
    """Width of the feed-forward part."""

    max_position_embeddings: int = Field(default=256, ge=8)
    """Longest sequence, in tokens."""

    tie_embeddings: bool = True
    """Use one matrix for the input and the output embedding."""

    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights. Very small models start to learn sooner with a larger value."""

    tokenizer: Literal["words", "bytes"] = "words"
    """`words`: one token per word of the vocabulary. `bytes`: one token per byte, for any text."""

    vocabulary: tuple[str, ...] = ()
    """Words of the tokenizer, without spaces; the special tokens <pad> <bos> <eos> <unk> are added before them."""

    chat_template: str | None = None
    """Jinja template that renders messages; None for a tokenizer without one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.heads} heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.tokenizer == "words" and not self.vocabulary:
            raise ValueError("vocabulary is empty: list the words, or set tokenizer = 'bytes'")
        if self.tokenizer == "bytes" and self.vocabulary:
            raise ValueError("vocabulary is read by tokenizer = 'words' only: remove it")
        words = (*SPECIAL_TOKENS, *self.vocabulary)
        duplicates = sorted({word for word in words if words.count(word) > 1})
        if duplicates:
            raise ValueError(f"vocabulary lists {', '.join(duplicates)} more than once (special tokens included)")
        broken = [word for word in self.vocabulary if not word or word.split() != [word]]
        if broken:
            raise ValueError(f"vocabulary words must not be empty or contain spaces: {broken!r}")
        return self

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL_TOKENS) + (256 if self.tokenizer == "bytes" else len(self.vocabulary))


class ModelConfig(BaseModel, frozen=True, extra="forbid"):
    """The model to train: an existing one (`path`) or a small one built for the run (`build`)."""

    path: str | None = None
    """Hugging Face model: a directory, or a name on the hub."""

    build: ModelBuildConfig | None = None
    """Build a small model instead."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.build is None):
            raise ValueError(
                "set exactly one of `path` (an existing model) and `build` (a small model built for the run)"
            )
        return self


def missing_model(directory: Path) -> str | None:
    """What to say of an existing directory that is no model: in a run or a checkpoint, where its model is."""
    if (directory / "config.json").is_file():
        return None
    checkpoints = sorted(directory.glob("checkpoints/step-*/model/config.json"), reverse=True)
    for found in (directory / "final" / "config.json", *checkpoints, directory / "model" / "config.json"):
        if found.is_file():
            return f"{directory} is no model, but contains one: use {found.parent}"
    return f"{directory} has no config.json; a model directory has config.json, *.safetensors and tokenizer.json"
