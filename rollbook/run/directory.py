"""The files of a run directory. docs/operations.md describes them all: content, size, and which may be deleted.

`RunDirectory` lists the files that several processes or commands use. Others belong to one room each: `rollouts.jsonl` (samples of
each step, with text), `tokens/` (records of single tokens, of some steps), `dashboard/` (the view index, which can be deleted).
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from rollbook import __version__
from rollbook.access.private_files import make_private_directory
from rollbook.access.tokens import read_or_create_token
from rollbook.contracts.errors import UsageError
from rollbook.trainer.model_config import ModelConfig

CHECKPOINT = re.compile(r"step-(\d+)")
MAX_LISTED = 5
"""Runs or run files that an error lists where none is given."""
MIN_FREE_BYTES = 64 * 2**20
"""Refuse to start a run that could not write a checkpoint."""


class RunDirectoryError(UsageError):
    """The run directory cannot be used."""


class Entry:
    """A file or folder of the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: "RunDirectory", owner: type) -> Path:
        return directory.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    local: Path | None = None
    """Where a process on another machine writes its events, spans, metrics and output. They are sent to the run directory."""

    config_file = Entry("config.toml")
    """The resolved configuration."""
    manifest_file = Entry("run.json")
    """Id, name, version, and the directory of the config file."""
    sft_manifest_file = Entry("sft.json")
    """The same of an output directory of `rollbook sft`, which is no run."""
    model_file = Entry("model.json")
    """Where the initial model is."""
    trainer_state_file = Entry("trainer_state.json")
    """The settings of the trainer over time."""
    resumes_file = Entry("resumes.jsonl")
    """When the run was resumed, with changed settings."""
    ledger = Entry("ledger")
    """The durable record."""
    model = Entry("model")
    """Initial weights and tokenizer, if the run made or downloaded them."""
    checkpoints = Entry("checkpoints")
    weights = Entry("weights")
    """The newest publications."""
    objects = Entry("objects")
    """Functions, classes and tasks that were passed to `rollbook.train` by value (`run.user_objects`)."""
    modules = Entry("modules")
    """Copies of the user's modules (`run.user_modules`)."""
    modules_file = Entry("modules.json")
    """Which copy is of which files."""
    vllm = Entry("vllm")
    """The guard that vLLM servers of the run import."""

    metrics_file = Entry("metrics.jsonl")
    """One row per step."""
    held_out_file = Entry("held_out.json")
    """Which tasks were held out, and which of them were also trained."""
    mastery_file = Entry("mastery.jsonl")
    """The state of a curriculum over time."""
    logs = Entry("logs")
    """Events and output of each process."""
    spans = Entry("spans")
    failures = Entry("failures")
    """The first failed episodes, for `rollbook debug`."""
    judgements_file = Entry("judgements.jsonl")
    """Every answer of a judge, with its cost. A judge is not asked again for what is in it."""
    teacher_scores_file = Entry("teacher_scores.db")
    """The newest answers of teachers. A teacher is not asked again for what is in it."""
    plots = Entry("plots")
    audit_file = Entry("audit.json")
    """Where the next audit continues. It can be deleted: that audit then reads everything."""

    lock_file = Entry("lock")
    """Held by the running `rollbook train`."""
    addresses_file = Entry("addresses.json")
    """URLs of the run's servers, for programs outside of the run. Present while the run is running."""
    processes_file = Entry("processes.json")
    """Pids of the run's processes, for people and for tests that kill them."""
    scale_file = Entry("scale.json")
    """Number of additional processes that `rollbook scale` requested. Read while the run is running."""
    shared_base_file = Entry("shared_base.json")
    """How trainer and policy servers map the base of adapters in memory. Present while they do."""
    token_file = Entry("token")
    """The token that steers the run: the trainer's requests to the ledger, and weight updates."""
    client_token_file = Entry("client-token")
    """The token for playing: completions, groups and reading. Needed where servers of the run listen on other than loopback."""
    operator_token_file = Entry("operator_token")
    """The token of those who may act on the run from its dashboard. It exists while actions are allowed."""

    # Files of one process -----------------------------------------------------------------------------------------------------

    def metrics_of(self, process: str) -> Path:
        """The metrics of a dispatcher: those of one that joined the run are in a separate file."""
        return self.metrics_file if process == "rollout" else self._written / f"metrics-{process}.jsonl"

    def log_file(self, process: str) -> Path:
        return self._written / "logs" / f"{process}.jsonl"

    def stderr_file(self, process: str) -> Path:
        return self._written / "logs" / f"{process}.stderr"

    def span_file(self, process: str) -> Path:
        return self._written / "spans" / f"{process}.jsonl"

    @property
    def _written(self) -> Path:
        return self.local or self.path

    def on_this_machine(self, name: str) -> "RunDirectory":
        """The same run, for a process of this name that writes its telemetry to a directory of this machine."""
        local = machine_directory(self.id, name)
        make_private_directory(local / "logs")
        return replace(self, local=local)

    # What is recorded ---------------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        return self.manifest_file.exists()

    @property
    def id(self) -> str:
        """Identifies the run in a ledger that it shares with others. A copy of the directory has the same one."""
        return str(self.read_manifest()["id"])

    @property
    def source_dir(self) -> Path:
        """The directory of the config file: relative paths of the config are looked up here."""
        return Path(self.read_manifest()["source_dir"])

    @property
    def search_path(self) -> tuple[Path, ...]:
        """The directories of users' modules."""
        manifest = self.read_manifest()
        recorded = [manifest["source_dir"], *manifest.get("search_path", [])]
        return tuple(dict.fromkeys([*map(Path, recorded), self.objects]))

    def require_config(self) -> Path:
        """The file with the resolved config. Raises `RunDirectoryError` if there is none."""
        if not os.access(self.config_file, os.R_OK):
            raise self.no_run(f"it has no {self.config_file.name} that can be read")
        return self.config_file

    def no_run(self, problem: str) -> RunDirectoryError:
        """The error that this path is no run, with the runs and run files that may be meant."""
        if self.sft_manifest_file.is_file():
            return RunDirectoryError(f"{self.path} is not a run directory: it is an output directory of `rollbook sft`")
        if self.path.exists():
            text = f"{self.path} is not a run directory: {problem if self.path.is_dir() else 'it is a file'}"
            text += files_meant(self.path)
        else:
            text = f"{self.path} does not exist"
        folder = self.path if self.path.is_dir() else self.path.parent
        found = [file.parent for pattern in ("*/run.json", "runs/*/run.json") for file in folder.glob(pattern)]
        newest = sorted(found, key=lambda run: -run.stat().st_mtime)[:MAX_LISTED]
        if not newest:
            return RunDirectoryError(text)
        names = ", ".join(str(run.relative_to(folder)) for run in newest)
        return RunDirectoryError(f"{text}{'' if text.endswith('?') else '.'} The newest runs in {folder}: {names}")

    def record_settings(self, section: str, values: Mapping[str, Any]) -> None:
        """Change settings of the resolved configuration that were found out when the run began. Processes that start later, also in
        resumed runs, read them."""
        table = tomllib.loads(self.require_config().read_text(encoding="utf-8"))
        table[section] = {**table.get(section, {}), **values}
        write_atomically(self.config_file, tomli_w.dumps(table))

    def record_model(self, location: Path) -> None:
        """Record where the initial model is. A model inside the run directory is recorded as a relative path, so that a copied run
        finds its own."""
        is_inside = location.is_relative_to(self.path)
        write_json(self.model_file, {"path": str(location.relative_to(self.path) if is_inside else location)})

    @property
    def initial_model(self) -> Path:
        """The directory of the initial model, as recorded. Needs no torch."""
        try:
            return self.path / str(json.loads(self.model_file.read_text(encoding="utf-8"))["path"])
        except (OSError, ValueError, KeyError) as error:
            raise RunDirectoryError(f"{self.model_file} does not name the model directory: {error}") from error

    def checkpoint_models(self) -> dict[int, Path]:
        """The model directory of each complete checkpoint by step; step 0 is the initial model."""
        found = {
            int(match[1]): path / "model"
            for path in self.checkpoints.glob("step-*")
            if (match := CHECKPOINT.fullmatch(path.name)) and (path / "checkpoint.json").is_file()
        }
        return {0: self.initial_model, **found}

    def checkpoint_bytes(self, newest: int) -> int:
        """Disk space of the newest checkpoints, which the next ones replace."""
        steps = sorted(
            int(match[1]) for path in self.checkpoints.glob("step-*") if (match := CHECKPOINT.fullmatch(path.name))
        )
        names = tuple(f"step-{step:06d}" for step in steps[-newest:])
        found = (*self.checkpoints.glob("step-*"), *self.checkpoints.glob("shards/step-*"))
        files = (file for path in found if path.name.startswith(names) for file in path.rglob("*"))
        return sum(file.stat().st_size for file in files if file.is_file())

    def first_failure(self) -> str | None:
        """The cause of the first recorded failed episode."""
        for file in sorted(self.failures.glob("*.json")):
            with suppress(OSError, ValueError, KeyError):  # a file may be cut off by a kill
                return str(json.loads(file.read_text(encoding="utf-8"))["cause"])
        return None

    def write_manifest(self, *, name: str, source_dir: Path, search_path: Sequence[Path] = ()) -> None:
        """Write the manifest of a new run, or update that of a resumed one: its processes use the files that were checked.

        Directories of users' modules that were recorded earlier stay, after the given ones.
        """
        manifest: dict[str, Any] = {
            "name": name,
            "id": uuid.uuid4().hex,
            "rollbook": __version__,
            "created": time.time(),
            "source_dir": str(source_dir),
        }
        if self.exists:
            manifest = {"id": manifest["id"], **self.read_manifest(), "source_dir": str(source_dir)}
        known = [*(str(path) for path in search_path if path != self.objects), *manifest.get("search_path", [])]
        write_json(self.manifest_file, {**manifest, "search_path": list(dict.fromkeys(known))})

    def record_resume(self, changed: Mapping[str, tuple[Any, Any]]) -> None:
        """Record when the run was resumed, and which settings changed: their paths with the old and the new value."""
        with self.resumes_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "changed": changed}) + "\n")

    def read_manifest(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self.manifest_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.no_run(f"{self.manifest_file.name} cannot be read ({error})") from error
        return manifest

    # Its use -------------------------------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        """Whether the process that holds the directory lives. The lock itself is not tried: that could refuse a real `train`."""
        if not self.addresses_file.exists():
            return False
        try:
            os.kill(int(self.lock_file.read_text(encoding="ascii").strip()), 0)
        except (OSError, ValueError):
            return False
        return True

    def file_id(self) -> tuple[int, int] | None:
        """Identifies the directory itself, not its name. None if it does not exist."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def fault(self, *, source_dir: Path | None = None) -> str | None:
        """Why the directory cannot be created or written, or None. Creates nothing. `source_dir`: where the user's files are."""
        if source_dir is not None and not self.exists and self.path.resolve() == source_dir.resolve():
            return f"{self.path} has your own files, which a run there would mix with its own; choose another, such as runs/first"
        place = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
            return None
        reason = "is not writable" if place.is_dir() else "is not a directory"
        what = "written" if place == self.path else "created"
        return f"the run directory {self.path} cannot be {what}: {place} {reason}; choose another with --run-dir"

    def prepare(self) -> None:
        """Create the directory and the run's token, and check that the directory is writable.

        Other users cannot read a new run: it holds the token, prompts and responses.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.exists:
                self.path.chmod(0o700)
            for folder in (self.logs, self.spans, self.ledger, self.checkpoints, self.weights):
                folder.mkdir(exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"rollbook")
            probe.unlink()
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be created or written ({error.strerror or error}): "
                "choose another with --run-dir, or make it writable"
            ) from error
        read_or_create_token(self.token_file)
        read_or_create_token(self.client_token_file)
        free = shutil.disk_usage(self.path).free
        if free < MIN_FREE_BYTES:
            raise RunDirectoryError(
                f"only {free / 2**20:.0f} MiB are free in {self.path}, but a run needs at least "
                f"{MIN_FREE_BYTES / 2**20:.0f} MiB: free disk space, or choose another --run-dir"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against a second `train`. The kernel releases the lock when this process ends."""
        with self.lock_file.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise RunDirectoryError(
                    f"{self.path} is in use by another `rollbook train` (pid {holder}): "
                    "wait for it, stop it, or choose another --run-dir"
                ) from error
            lock.seek(0)
            lock.truncate()
            # A killed supervisor leaves its addresses behind. This process writes its own when it has opened them.
            self.addresses_file.unlink(missing_ok=True)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def files_meant(folder: Path) -> str:
    """The end of an error about a directory in place of a file or a run: its run files."""
    files = sorted(file.name for file in folder.glob("*.toml"))[:MAX_LISTED]
    if len(files) == 1:
        return f". Is {folder / files[0]} meant?"
    return f". Its run files: {', '.join(files)}" if files else ""


def machine_directory(run_id: str, name: str) -> Path:
    """A private directory of this machine for one process of a run. `run_id`: that of the run directory."""
    parent = Path(tempfile.gettempdir()) / f"rollbook-{os.geteuid()}"
    local = parent / f"{run_id}-{name}"
    for folder in (parent, local):
        make_private_directory(folder)
    return local


def write_json(path: Path, value: object) -> None:
    """Write atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """A reader, and a process that is started after a crash, find the old text or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def model_directory(config: ModelConfig, source_dir: Path) -> Path | None:
    """The local directory that `model.path` names, relative to the config file or to the current directory."""
    if config.path is None:
        return None
    candidates = (source_dir / config.path, Path(config.path))
    found = [directory for directory in candidates if directory.is_dir()]
    return next((d.absolute() for d in found if (d / "config.json").is_file()), found[0].absolute() if found else None)


def existing_model(config: ModelConfig, directory: RunDirectory, source_dir: Path) -> Path | None:
    """The complete model directory of a run, if nothing must be built or downloaded for it."""
    # The model of a run never changes, and it is recorded when it is complete.
    with suppress(RunDirectoryError):
        recorded = directory.initial_model
        if (recorded / "config.json").is_file():
            return recorded
    found = model_directory(config, source_dir)
    return found if found is not None and (found / "config.json").is_file() else None
