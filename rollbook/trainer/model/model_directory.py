"""The Hugging Face model directory of a run: an existing one, downloaded from the hub, or built from settings.

Trainer and policy server load the same directory, so that both start from the same weights (version 0).
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from rollbook.contracts.errors import RunError
from rollbook.trainer.files.atomic_files import sync_directory, sync_tree, writing
from rollbook.trainer.model.built_tokenizer import fast_tokenizer
from rollbook.trainer.model_config import SPECIAL_TOKENS, ModelBuildConfig, ModelConfig, missing_model

BUILD_FILE = "rollbook_build.json"
"""The settings a directory was built from. It is part of the atomic write, so its presence means the directory is complete."""


def prepare_model_directory(config: ModelConfig, directory: Path, *, seed: int) -> Path:
    """The model's directory: `directory` for a built model (built now if missing), else the configured path or the hub's snapshot.

    Idempotent. Raises `RunError` for a directory that was built with other settings.
    """
    if config.build is None:
        return _existing(str(config.path))
    made_from: dict[str, Any] = {"seed": seed, **config.build.model_dump(mode="json")}
    if directory.exists():
        _check_build(directory, made_from)
        return directory
    with writing(directory):
        _build(config.build, directory, made_from)
    return directory


def _build(build: ModelBuildConfig, directory: Path, made_from: dict[str, Any]) -> None:
    # The terminal belongs to the run's own view.
    transformers_logging.disable_progress_bar()
    unfinished = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        build_tokenizer(build).save_pretrained(str(unfinished))
        build_model(build, seed=made_from["seed"]).save_pretrained(str(unfinished))
        (unfinished / BUILD_FILE).write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")
        sync_tree(unfinished)
        try:
            unfinished.rename(directory)
        except OSError:
            # Another process built it first; its settings must be the same.
            _check_build(directory, made_from)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def build_tokenizer(build: ModelBuildConfig) -> Any:
    pad, bos, eos, unk = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast_tokenizer(build),
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        model_max_length=build.max_position_embeddings,
    )
    if build.chat_template is not None:
        tokenizer.chat_template = build.chat_template
    return tokenizer


def build_model(build: ModelBuildConfig, *, seed: int) -> Any:
    """Random weights that depend only on the settings and the seed. The caller's random state is not changed."""
    config = LlamaConfig(
        vocab_size=build.vocab_size,
        hidden_size=build.hidden_size,
        num_hidden_layers=build.layers,
        num_attention_heads=build.heads,
        num_key_value_heads=build.kv_heads,
        intermediate_size=build.intermediate_size,
        max_position_embeddings=build.max_position_embeddings,
        tie_word_embeddings=build.tie_embeddings,
        initializer_range=build.initializer_range,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _existing(path: str) -> Path:
    if Path(path).is_dir():
        if (missing := missing_model(Path(path))) is not None:
            raise RunError(f"model.path: {missing}")
        return Path(path)
    try:
        return Path(snapshot_download(path))
    except Exception as error:  # the hub client raises many unrelated types
        cause = next(iter(str(error).splitlines()), "")
        raise RunError(
            f"model {path!r} is not a directory and could not be downloaded from the hub ({type(error).__name__}: {cause})."
            " Name a directory with config.json, weights and tokenizer."
        ) from error


def _check_build(directory: Path, made_from: dict[str, Any]) -> None:
    try:
        found = json.loads((directory / BUILD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"model directory {directory} exists but has no readable {BUILD_FILE} ({error}). Remove it to build it again."
        ) from error
    differing = sorted(key for key in found.keys() | made_from.keys() if found.get(key) != made_from.get(key))
    if differing:
        raise RunError(
            f"model directory {directory} was built with other settings for: {', '.join(differing)}."
            " Restore them, or use a new run directory."
        )
