"""All of a run's learning state, or none of it.

A checkpoint is a directory `step-000012` that appears under its name only when everything in it is on disk:

    model/            Hugging Face directory: config, weights, tokenizer; usable by anybody (with LoRA: a PEFT one)
    trainer.pt        optimizer and random states
    checkpoint.json   step, digest of the weights, digest of every file, settings; written last
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollbook.contracts.errors import RunError
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.files.atomic_files import file_digest, sync_directory, sync_tree, writing
from rollbook.trainer.files.random_states import seed_everything, set_random_states
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.step import LearnerCopy, TrainStep

MANIFEST = "checkpoint.json"
MODEL = "model"
STATE = "trainer.pt"
NAME = re.compile(r"step-(\d{6,})")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole one, as its manifest describes it."""

    path: Path
    step: int
    weights_digest: str

    @property
    def model_dir(self) -> Path:
        return self.path / MODEL


class Checkpoints:
    """The checkpoints of one run, in one directory."""

    def __init__(self, directory: Path, *, model_dir: Path, config: TrainerConfig) -> None:
        self._directory = directory
        self._model_dir = model_dir
        self._config = config

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first. Torn ones (no manifest) are not among them."""
        if not self._directory.is_dir():
            return []
        named = [(NAME.fullmatch(path.name), path) for path in self._directory.iterdir()]
        return sorted(int(match[1]) for match, path in named if match and (path / MANIFEST).is_file())

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, its files compared with their digests."""
        steps = self.steps()
        return self._verified(self._path(steps[-1])) if steps else None

    def save(self, learner: TrainStep, *, weights_digest: str) -> Checkpoint:
        """Write the checkpoint of the learner's step, here and now."""
        return self.write(learner.copied(learner.model.snapshot()), weights_digest=weights_digest)

    def write(self, copied: LearnerCopy, *, weights_digest: str) -> Checkpoint:
        """Write the checkpoint of a copied learner, then remove the oldest beyond the number to keep.

        A step that is there already is not written again.
        """
        path = self._path(copied.step)
        if not (path / MANIFEST).is_file():
            with writing(path):
                self._write_whole(path, copied, weights_digest)
        for step in removable(self.steps(), keep=self._config.keep_checkpoints, keep_every=self._config.keep_every):
            shutil.rmtree(self._path(step))
        return Checkpoint(path=path, step=copied.step, weights_digest=weights_digest)

    def restore(self, checkpoint: Checkpoint | None) -> TrainStep:
        """The learner as it was at the checkpoint; from the initial weights without one. Random states are set too."""
        if checkpoint is None:
            return initial_learner(self._model_dir, self._config)
        if self._config.lora is None:
            model = _load(checkpoint.model_dir, self._config)
        else:
            model = _load(self._model_dir, self._config, adapters=checkpoint.model_dir)
        if not model.has_digest(checkpoint.weights_digest):
            raise RunError(
                f"checkpoint {checkpoint.path}: its weights have digest {model.digest()}, but {checkpoint.weights_digest} was"
                " saved. Remove the directory to resume from an older checkpoint."
            )
        learner = TrainStep(
            model, self._config, step=checkpoint.step, reference=reference_model(self._model_dir, self._config)
        )
        state = torch.load(checkpoint.path / STATE, map_location="cpu", weights_only=True)
        learner.load_optimizer(state["optimizer"])
        learner.guard.skipped_in_a_row = int(state["skipped_in_a_row"])
        set_random_states(state["random"])
        return learner

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}"

    def _write_whole(self, path: Path, copied: LearnerCopy, weights_digest: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        unfinished = self._directory / f".{path.name}.{os.getpid()}.tmp"
        try:
            copied.model.save(unfinished / MODEL, copied.weights)
            for name in TOKENIZER_FILES:
                if (self._model_dir / name).is_file():
                    shutil.copyfile(self._model_dir / name, unfinished / MODEL / name)
            torch.save(copied.state, unfinished / STATE)
            self._write_manifest(unfinished, copied.step, weights_digest)
            sync_tree(unfinished)
            unfinished.rename(path)
            sync_directory(self._directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _write_manifest(self, path: Path, step: int, weights_digest: str) -> None:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        manifest = {
            "step": step,
            "weights_digest": weights_digest,
            "settings": self._config.numeric_settings(),
            "files": {file.relative_to(path).as_posix(): file_digest(file) for file in files},
        }
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    def _verified(self, path: Path) -> Checkpoint:
        advice = "Remove the directory to resume from an older checkpoint."
        try:
            manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            step, weights_digest, files = (
                int(manifest["step"]),
                str(manifest["weights_digest"]),
                dict(manifest["files"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"checkpoint {path}: its {MANIFEST} cannot be read ({error!r}). {advice}") from error
        damaged = [name for name, digest in files.items() if not _has_digest(path / name, str(digest))]
        if damaged:
            raise RunError(f"checkpoint {path} is corrupt: {', '.join(damaged)} differ from what was saved. {advice}")
        return Checkpoint(path=path, step=step, weights_digest=weights_digest)

    def _sweep(self) -> None:
        """Remove what a killed process left unfinished. There is one trainer a run: the ledger fences any other."""
        for path in self._directory.iterdir():
            is_torn = NAME.fullmatch(path.name) is not None and not (path / MANIFEST).is_file()
            if path.is_dir() and (path.name.endswith(".tmp") or is_torn):
                shutil.rmtree(path)


def removable(steps: list[int], *, keep: int, keep_every: int | None) -> list[int]:
    """Which of the checkpoints (oldest first) may go: all but the newest, and those kept for good."""
    return [step for step in steps[:-keep] if keep_every is None or step % keep_every]


def initial_learner(model_dir: Path, config: TrainerConfig) -> TrainStep:
    """A learner at step 0. The one way to begin, for the loop and for a replay: nothing about the start can differ."""
    model = _load(model_dir, config)
    reference = reference_model(model_dir, config)
    seed_everything(config.seed)
    return TrainStep(model, config, reference=reference)


def reference_model(model_dir: Path, config: TrainerConfig) -> PolicyModel | None:
    """The initial policy, frozen, where the loss asks how far it went from it. Adapters need no copy: their base stands still."""
    if config.kl_coef == 0 or config.lora is not None:
        return None
    return _load(model_dir, config.model_copy(update={"gradient_checkpointing": False})).frozen()


def _load(directory: Path, config: TrainerConfig, *, adapters: Path | None = None) -> PolicyModel:
    torch.set_num_threads(config.threads)
    return PolicyModel.load(directory, config, adapters=adapters)


def _has_digest(path: Path, digest: str) -> bool:
    return path.is_file() and file_digest(path) == digest
