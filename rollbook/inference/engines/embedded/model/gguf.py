"""Converts a GGUF file to a Hugging Face directory: safetensors, tokenizer and chat template, ready to train and to serve.

The transformers library reads GGUF but cannot save such a model, because it is marked as quantised. So the dequantised weights are
copied into a new model of the same shape, which is saved. They are the values of the quantised file, in float32.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollbook.contracts.errors import RunError

Report = Callable[[str], None]


def convert_gguf(source: Path, target: Path, *, pad_token: str | None, report: Report) -> int:
    """Write `target` completely or not at all. Returns the number of parameters. `pad_token` must not end a turn."""
    transformers_logging.disable_progress_bar()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        report(f"reading the tokenizer of {source.name}")
        tokenizer = _tokenizer(source, pad_token)
        report("reading and dequantising its weights (this can take minutes)")
        model = _dequantised_model(source, tokenizer)
        report(f"writing {target}")
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
    with _errors_name(source):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        fields = GGUFReader(source)
    # Not every version of transformers reads them: 5.17 takes the first token of a ChatML vocabulary for its end token.
    for name in ("bos", "eos"):
        if (field := fields.get_field(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    return tokenizer


def _dequantised_model(source: Path, tokenizer: Any) -> Any:
    with _errors_name(source):
        read: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    if not 0 <= (tokenizer.pad_token_id or 0) < read.config.vocab_size:
        # The library gives an unknown token a new id beyond the vocabulary.
        raise RunError(f"{source} has no token {tokenizer.pad_token!r} for padding: it is not the expected model")
    config = read.config.__class__.from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    config._name_or_path = source.stem
    config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.to(torch.float32)


@contextmanager
def _errors_name(source: Path) -> Iterator[None]:
    """Turn any error of the library into one that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ImportError) or (isinstance(error, ValueError) and "pip install" in str(error)):
            raise RunError(f"converting GGUF needs the extra `models` (gguf and accelerate): {error}") from error
        raise RunError(
            f"{source} could not be read as a GGUF language model: {type(error).__name__}: {error}"
        ) from error


def _require_readable(directory: Path) -> None:
    """Check that the written files can be opened."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            if not list(opened.keys()):
                raise RunError(f"{file} was written without any tensor; this is a bug in rollbook, please report it")
    if not (directory / "tokenizer.json").exists():
        raise RunError(f"{directory} was written without tokenizer.json; this is a bug in rollbook, please report it")
