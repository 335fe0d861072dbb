"""A GGUF file becomes a Hugging Face directory: safetensors, tokenizer and chat template, ready to train and to serve.

The library reads GGUF but cannot save what it read (the object remembers that it was quantised). So the dequantised state moves
into a fresh model of the same shape, and that is saved once. The weights are what the quantised file holds, in float32.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollbook.contracts.errors import RunError

Say = Callable[[str], None]


def convert_gguf(source: Path, target: Path, *, pad_token: str | None, say: Say) -> int:
    """Write `target` whole or not at all; gives the number of parameters. `pad_token`: a token that must never end a turn."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        say(f"reading the tokenizer of {source.name}")
        tokenizer = _tokenizer(source, pad_token)
        say("reading and dequantising its weights (minutes on a slow core)")
        model = _fresh_model(source, tokenizer)
        say(f"writing {target}")
        unfinished.mkdir(parents=True)
        tokenizer.save_pretrained(str(unfinished))
        model.save_pretrained(str(unfinished))
        _require_readable(unfinished)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error}; free some space or choose another --to") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer(source: Path, pad_token: str | None) -> Any:
    with _told_as(source):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    return tokenizer


def _fresh_model(source: Path, tokenizer: Any) -> Any:
    with _told_as(source):
        read: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    if not 0 <= (tokenizer.pad_token_id or 0) < read.config.vocab_size:
        # The library gives a token that it does not find a new number beyond the vocabulary.
        raise RunError(f"{source} has no token {tokenizer.pad_token!r} to pad with: it is another model than expected")
    config = read.config.__class__.from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    config._name_or_path = source.stem
    config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    fresh: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    fresh.load_state_dict(read.state_dict())
    fresh.generation_config.pad_token_id = tokenizer.pad_token_id
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    return fresh.to(torch.float32)


class _told_as:
    """What the library raises about a file becomes one error that names it."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ImportError) or (isinstance(error, ValueError) and "pip install" in str(error)):
            raise RunError(f"converting GGUF needs the extra `models` (gguf and accelerate): {error}") from error
        if isinstance(error, Exception) and not isinstance(error, RunError):
            raise RunError(
                f"{self._source} could not be read as a GGUF language model: {type(error).__name__}: {error}"
            ) from error


def _require_readable(directory: Path) -> None:
    """Nothing is given its name before it can be opened again."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            if not list(opened.keys()):
                raise RunError(f"{file} was written without any tensor; this is a fault of ours, please report it")
    if not (directory / "tokenizer.json").exists():
        raise RunError(f"{directory} was written without tokenizer.json; this is a fault of ours, please report it")
