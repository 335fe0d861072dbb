"""Looks at the model of a run without loading it: its directory, its files and its tokenizer. Imports no torch."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from rollbook.contracts.plugin import MissingExtraError, load_on_demand
from rollbook.contracts.user_errors import did_you_mean
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.directory import model_directory
from rollbook.run.resources.model_facts import HUB_S, INDEX, MAX_HEADER_BYTES, text_config
from rollbook.trainer.model.built_tokenizer import fast_tokenizer
from rollbook.trainer.model_config import SPECIAL_TOKENS, ModelBuildConfig, ModelConfig, missing_model

PAD, BOS, EOS, UNK = SPECIAL_TOKENS


def tokenizer_of(config: ModelConfig, source_dir: Path) -> ModelTokenizer | None:
    """The tokenizer that the run will use. None: the model is on the hub. Raises `TokenizerError`."""
    if config.build is not None:
        return built_tokenizer(config.build)
    directory = model_directory(config, source_dir)
    return None if directory is None else ModelTokenizer.from_directory(directory)


def built_tokenizer(build: ModelBuildConfig) -> ModelTokenizer:
    """The tokenizer that the directory of a built model will contain."""
    fast = fast_tokenizer(build)
    return ModelTokenizer(
        fast,
        chat_template=build.chat_template,
        special_tokens={"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK},
        eos_token_ids=(SPECIAL_TOKENS.index(EOS),),
    )


def context_length(config: ModelConfig, source_dir: Path) -> int | None:
    """The longest sequence of the model, in tokens, if its config states it."""
    if config.build is not None:
        return config.build.max_position_embeddings
    directory = model_directory(config, source_dir)
    length = None if directory is None else text_config(directory).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def model_faults(config: ModelConfig, source_dir: Path) -> Iterator[str]:
    """What is missing or damaged in the files of an existing model."""
    if config.path is None:
        return
    directory = model_directory(config, source_dir)
    if directory is None:
        yield from _hub_faults(config.path, source_dir)
        return
    if (missing := missing_model(directory)) is not None:
        yield missing
        return
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"{directory / 'config.json'} is not JSON: {error}"
    if not (directory / "tokenizer.json").is_file():
        yield f"{directory} has no tokenizer.json; save the model's fast tokenizer there"
    yield from _weight_faults(directory)


def _weight_faults(directory: Path) -> Iterator[str]:
    files = sorted(directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        try:
            shards = set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            yield f"{directory / INDEX} cannot be read: {error}"
            return
        missing = sorted(shards - {file.name for file in files})
        if missing:
            yield f"{directory} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}"
    elif not files and not list(directory.glob("pytorch_model*.bin")):
        yield f"{directory} has no weights (*.safetensors)"
    for file in files:
        if not _is_complete(file):
            yield f"{file} is incomplete or not a safetensors file; copy or download it again"


def _is_complete(file: Path) -> bool:
    """Whether the file is as long as its header says."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                return False
            header = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return file.stat().st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _hub_faults(name: str, source_dir: Path) -> Iterator[str]:
    """Why a name that is no local directory cannot be downloaded either."""
    places = ((source_dir / name).resolve(), Path(name).resolve())
    siblings = [d.name for place in places if place.parent.is_dir() for d in place.parent.iterdir() if d.is_dir()]
    looked = f"there is no directory {places[0]}" + (f" or {places[1]}" if places[1] != places[0] else "")
    advice = did_you_mean(Path(name).name, siblings)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if is_path or (advice and "/" in name):
        yield f"{looked}{advice}"
        return
    try:
        load_on_demand("huggingface_hub:snapshot_download")(name, local_files_only=True)
    except MissingExtraError as error:
        yield f"{looked}{advice}, and it cannot be downloaded: {error}"
    except Exception:  # the hub client raises many unrelated types
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            yield f"{looked}{advice}; it is not in the hub's cache, and HF_HUB_OFFLINE is set"
            return
        try:
            load_on_demand("huggingface_hub:HfApi")().model_info(name, timeout=HUB_S)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            yield f"{looked}{advice}; it is not in the hub's cache, and the hub does not provide it ({reason})"
