"""Checkpoints of the complete training state, written atomically.

A checkpoint is a directory `step-000012` that gets its name only after all its files are on disk:

    model/            Hugging Face directory: config, weights, tokenizer (with LoRA: a PEFT directory)
    trainer.pt        optimizer and random states
    checkpoint.json   step, digest of the weights, digest of every file, settings; written last

With several ranks, or with `trainer.shards_path`, weights and optimizer state are also written as shards, by all ranks concurrently
and before the manifest, which names their folder. `trainer.pt` then holds no tensors of the optimizer.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.settings_history import LATER_SETTINGS
from rollbook.trainer.checkpoints.shards import ShardStorage, load_shards, open_shards, save_shards
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.files.atomic_files import file_digest, sync_directory, sync_tree, writing
from rollbook.trainer.files.random_states import seed_everything, set_random_states
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import to_ordinary_memory
from rollbook.trainer.step import LearnerSnapshot, TrainStep

MANIFEST = "checkpoint.json"
MODEL = "model"
STATE = "trainer.pt"
SHARDS = "shards"
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
    """A complete checkpoint, as described by its manifest."""

    path: Path
    step: int
    weights_digest: str
    shards: str | None = None
    """The folder of its shards; None: `trainer.pt` holds everything."""
    shards_at: str | None = None
    """The directory or bucket of that folder."""

    @property
    def model_dir(self) -> Path:
        return self.path / MODEL


class Checkpoints:
    """The checkpoints of one run, in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        model_dir: Path,
        config: TrainerConfig,
        token: str | None = None,
        shared_base: Path | None = None,
    ) -> None:
        """`shared_base`: the file with which the base of adapters is mapped, see `shared_weights`."""
        self.directory = directory
        self._model_dir = model_dir
        self._shared_base = shared_base
        self._config = config
        self._token = token or uuid.uuid4().hex[:12]
        """Part of the names of shards, so that two trainers never write to the same folder."""
        self._group: Any = None

    def use_group(self, group: Any) -> None:
        """The process group in which the ranks write their shards, next to the collectives of a step."""
        self._group = group

    def to_wire(self) -> dict[str, Any]:
        """Plain values from which another rank makes the same checkpoints."""
        return {
            "directory": str(self.directory),
            "model_dir": str(self._model_dir),
            "config": self._config.model_dump(mode="json"),
            "token": self._token,
        }

    @classmethod
    def from_wire(cls, found: Mapping[str, Any]) -> "Checkpoints":
        return cls(
            Path(found["directory"]),
            model_dir=Path(found["model_dir"]),
            config=TrainerConfig.model_validate(found["config"]),
            token=found["token"],
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Incomplete ones have no manifest and are left out."""
        if not self.directory.is_dir():
            return []
        named = [(NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return sorted(int(match[1]) for match, path in named if match and (path / MANIFEST).is_file())

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, verified against the digests of its files."""
        steps = self.steps()
        return self._verified(self._path(steps[-1])) if steps else None

    def save(self, learner: TrainStep, *, weights_digest: str) -> Checkpoint:
        """Write the checkpoint of the learner's current step."""
        return self.write(learner.state_snapshot(learner.model.snapshot()), weights_digest=weights_digest)

    def write(self, snapshot: LearnerSnapshot, *, weights_digest: str) -> Checkpoint:
        """Write the checkpoint of a snapshot, then remove the oldest ones beyond the number to keep.

        A step that already has a checkpoint is not written again.
        """
        path = self._path(snapshot.step)
        if not (path / MANIFEST).is_file():
            if snapshot.shards is not None:
                save_shards(self._storage(), self._shard_folder(snapshot), snapshot.shards, self._group)
            with writing(path):
                self._write_atomically(path, snapshot, weights_digest)
        for step in removable(self.steps(), keep=self._config.keep_checkpoints, keep_every=self._config.keep_every):
            self._remove(step)
        return Checkpoint(path=path, step=snapshot.step, weights_digest=weights_digest)

    def write_shard(self, snapshot: LearnerSnapshot) -> None:
        """At a rank other than 0: write its part of the checkpoint that rank 0 writes with `write`."""
        assert snapshot.shards is not None
        save_shards(self._storage(), self._shard_folder(snapshot), snapshot.shards, self._group)

    def clean(self) -> None:
        """Remove the shards of checkpoints that were interrupted. Call it before a trainer writes its first one."""
        if not self._config.is_sharded:
            return
        storage = self._storage()
        for folder in storage.folders() - {self._manifest(step).get(SHARDS, {}).get("folder") for step in self.steps()}:
            storage.remove(folder)

    def restore(self, checkpoint: Checkpoint | None) -> TrainStep:
        """The learner as it was at the checkpoint; from the initial weights without one. Random states are set too."""
        if checkpoint is None:
            return initial_learner(self._model_dir, self._config, shared_base=self._shared_base)
        self._require_same_state(checkpoint)
        learner = self._load_learner(checkpoint)
        model = learner.model
        if not model.has_digest(checkpoint.weights_digest):
            raise RunError(
                f"checkpoint {checkpoint.path}: its weights have digest {model.digest()}, but {checkpoint.weights_digest} was"
                " saved. Remove the directory to resume from an older checkpoint."
            )
        return learner

    def _require_same_state(self, checkpoint: Checkpoint) -> None:
        """Weights and state of a checkpoint fit only the adapters, and the form of the state, that it was trained with."""
        # Earlier versions did not record later settings.
        found = LATER_SETTINGS | self._manifest(checkpoint.step)["settings"]
        settings = self._config.numeric_settings()
        for name in ("lora", "optimizer_state"):
            if found[name] != settings[name]:
                raise RunError(
                    f"checkpoint {checkpoint.path} was trained with trainer.{name} = {found[name]}, but the setting is"
                    f" {settings[name]} now. Restore it, or start a new run."
                )

    def _load_learner(self, checkpoint: Checkpoint) -> TrainStep:
        if self._config.lora is None and checkpoint.shards is None:
            model = _load(checkpoint.model_dir, self._config)
        elif self._config.lora is None:
            model = _load(self._model_dir, self._config)  # the weights follow with the shards
        else:
            adapters, base = checkpoint.model_dir, self._shared_base
            model = _load(self._model_dir, self._config, adapters=adapters, shared_base=base)
        reference = reference_model(self._model_dir, self._config)
        learner = TrainStep(model, self._config, step=checkpoint.step, reference=reference)
        state = torch.load(checkpoint.path / STATE, map_location="cpu", weights_only=True)
        if checkpoint.shards is not None:
            assert checkpoint.shards_at is not None
            load_shards(
                open_shards(checkpoint.shards_at), checkpoint.shards, learner, state["optimizer"]["param_groups"]
            )
        else:
            learner.load_optimizer(state["optimizer"])
        learner.guard.skipped_in_a_row = int(state["skipped_in_a_row"])
        set_random_states(state["random"])
        return learner

    def _storage(self) -> ShardStorage:
        return open_shards(self._config.shards_path or str(self.directory / SHARDS))

    def _shard_folder(self, snapshot: LearnerSnapshot) -> str:
        return f"step-{snapshot.step:06d}-{self._token}"

    def _remove(self, step: int) -> None:
        """The manifest is removed first: a checkpoint without its files or shards must not look complete."""
        shards = self._manifest(step).get(SHARDS)
        (self._path(step) / MANIFEST).unlink()
        shutil.rmtree(self._path(step))
        if shards is not None:
            open_shards(shards["location"]).remove(shards["folder"])

    def _manifest(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._path(step) / MANIFEST).read_text(encoding="utf-8"))
        return found

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _write_atomically(self, path: Path, snapshot: LearnerSnapshot, weights_digest: str) -> None:
        self.directory.mkdir(exist_ok=True)  # the run directory exists; if it was moved away, a new one would hide that
        self._sweep()
        unfinished = self.directory / f".{path.name}.{os.getpid()}.tmp"
        try:
            snapshot.model.save(unfinished / MODEL, snapshot.weights)
            for name in TOKENIZER_FILES:
                if (self._model_dir / name).is_file():
                    shutil.copyfile(self._model_dir / name, unfinished / MODEL / name)
            torch.serialization.set_crc32_options(False)  # the manifest has a digest of the file
            torch.save(to_ordinary_memory(snapshot.state), unfinished / STATE)
            self._write_manifest(unfinished, snapshot, weights_digest)
            sync_tree(unfinished)
            unfinished.rename(path)
            sync_directory(self.directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _write_manifest(self, path: Path, snapshot: LearnerSnapshot, weights_digest: str) -> None:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        manifest: dict[str, Any] = {
            "step": snapshot.step,
            "weights_digest": weights_digest,
            "settings": self._config.numeric_settings(),
            "files": {file.relative_to(path).as_posix(): file_digest(file) for file in files},
        }
        if snapshot.shards is not None:
            storage, folder = self._storage(), self._shard_folder(snapshot)
            manifest[SHARDS] = {"location": storage.location, "folder": folder, "files": storage.files(folder)}
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
            raise RunError(f"checkpoint {path}: {MANIFEST} cannot be read ({error!r}). {advice}") from error
        damaged = [name for name, digest in files.items() if not _has_digest(path / name, str(digest))]
        if damaged:
            raise RunError(f"checkpoint {path} is corrupt: {', '.join(damaged)} changed after it was saved. {advice}")
        shards = manifest.get(SHARDS)
        if shards is None:
            return Checkpoint(path=path, step=step, weights_digest=weights_digest)
        found = open_shards(shards["location"]).files(shards["folder"])
        lost = [name for name, size in shards["files"].items() if found.get(name) != size]
        if lost:
            where = f"{shards['location']}/{shards['folder']}"
            raise RunError(
                f"checkpoint {path} is corrupt: {', '.join(lost)} in {where} is missing or incomplete. {advice}"
            )
        return Checkpoint(
            path=path,
            step=step,
            weights_digest=weights_digest,
            shards=shards["folder"],
            shards_at=shards["location"],
        )

    def _sweep(self) -> None:
        """Remove incomplete checkpoints of killed processes. A run has one trainer: the ledger fences any other."""
        for path in self.directory.iterdir():
            is_incomplete = NAME.fullmatch(path.name) is not None and not (path / MANIFEST).is_file()
            if path.is_dir() and (path.name.endswith(".tmp") or is_incomplete):
                shutil.rmtree(path)


def removable(steps: list[int], *, keep: int, keep_every: int | None) -> list[int]:
    """The checkpoints (oldest first) to remove: all but the newest `keep` and every `keep_every`-th step."""
    return [step for step in steps[:-keep] if keep_every is None or step % keep_every]


def initial_learner(model_dir: Path, config: TrainerConfig, *, shared_base: Path | None = None) -> TrainStep:
    """A learner at step 0. The loop and the replay both use it, so that they start from the same state."""
    model = _load(model_dir, config, shared_base=shared_base)
    reference = reference_model(model_dir, config)
    seed_everything(config.seed)
    return TrainStep(model, config, reference=reference)


def reference_model(model_dir: Path, config: TrainerConfig) -> PolicyModel | None:
    """The frozen initial policy for the KL term. Adapters need no copy: their base model does not change."""
    if config.kl_coef == 0 or config.lora is not None:
        return None
    torch.set_num_threads(config.threads)
    return PolicyModel.load(model_dir, config.model_copy(update={"gradient_checkpointing": False}), is_reference=True)


def _load(
    directory: Path, config: TrainerConfig, *, adapters: Path | None = None, shared_base: Path | None = None
) -> PolicyModel:
    torch.set_num_threads(config.threads)
    return PolicyModel.load(directory, config, adapters=adapters, shared_base=shared_base)


def _has_digest(path: Path, digest: str) -> bool:
    return path.is_file() and file_digest(path) == digest
