"""The process of a warm start: `python -m rollbook.run.processes.sft DIRECTORY SOURCE_DIR FD`, its config on stdin.

Demonstrations are tokenised here, because this process has both the rollout tokenizer and the trainer's step.
"""

import json
import os
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.child import die_with_parent
from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.trajectory import TokenRow
from rollbook.rollout.chat.demonstrations import Demonstrations, digest_of_rows, read_demonstrations
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.config.sft import FINAL, LoadedSftConfig, load_sft_config
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.resources.shortage import sft_shortage
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.trainer.checkpoints.settings_history import split_settings
from rollbook.trainer.config import SPLIT_SETTINGS
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.sft import SFT_METRICS, SftLoop, SftOutcome, steps_of
from rollbook.trainer.sft_config import sft_trainer

PROGRESS_INTERVAL_S = 2.0


def main(argv: list[str]) -> int:
    directory, source_dir, parent_fd = Path(argv[0]), Path(argv[1]), int(argv[2])
    die_with_parent(parent_fd)
    run, training = RunDirectory(directory), _Training()
    try:
        # The writing process holds the lock: it may still finish a step after its command was killed.
        with run.locked():
            run.config_file.write_text(sys.stdin.read(), encoding="utf-8")
            training.loaded = load_sft_config(run.config_file, source_dir=source_dir)
            return _train(run, training.loaded, training)
    except Exception as error:
        if not isinstance(error, RunError) and not is_out_of_memory(error):
            raise
        training.print_error(error)
        return 1


class _Training:
    """What is known about the training when an error ends it."""

    loaded: LoadedSftConfig | None = None
    loop: SftLoop | None = None

    def print_error(self, error: Exception) -> None:
        text = str(error)
        if self.loaded is not None and is_out_of_memory(error):
            config = self.loaded.config
            text = sft_shortage(
                config.model,
                config.trainer,
                self.loaded.source_dir,
                longest=config.sft.max_tokens,
                doing="" if self.loop is None else self.loop.doing,
                error=error,
            )
        _print(f"error: {text}")

    def end(self, error: RunError) -> None:
        """Of another rank: this one waits for it in a collective, which cannot be interrupted."""
        self.print_error(error)
        os._exit(1)


def _train(run: RunDirectory, loaded: LoadedSftConfig, training: _Training) -> int:
    config, directory = loaded.config, run.path
    model_dir = prepare_model_directory(loaded.model, directory / "model", seed=config.run.seed)
    train, validation = _rows(loaded, ModelTokenizer.from_directory(model_dir))
    log = EventLog("sft", directory / "logs" / "sft.jsonl")
    total_steps = steps_of(len(train), config.sft, max_steps=config.trainer.max_steps)
    run_id = write_or_check_manifest(directory, loaded, digest_of_rows(train), total_steps=total_steps)
    loop = SftLoop(
        config=config.sft,
        trainer=config.trainer.with_own_shards(run_id),
        model_dir=model_dir,
        directory=directory,
        demonstrations=train,
        validation=validation,
        metrics=MetricRecorder("sft", SFT_METRICS, directory / "metrics.jsonl"),
        log=log,
        on_metrics=_ProgressPrinter(),
        on_split=lambda split: run.record_settings("trainer", split_settings(split)),
        probes=config.trainer.device == "cuda",
        end=training.end,
    )
    training.loop = loop
    _print(f"{len(train)} demonstrations, {len(validation)} for validation, {total_steps} steps")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.stop_after_step())
    began = time.perf_counter()
    outcome = loop.run()
    seconds = time.perf_counter() - began
    log.close()
    row: dict[str, Any] = {
        "directory": str(directory),
        "model": None,
        "seconds": round(seconds, 2),
        **_figures(outcome),
    }
    if outcome.is_finished:
        row["model"] = str(_copy_model(outcome.checkpoint.model_dir, directory / FINAL))
        _print(f'done: {outcome.steps} steps in {seconds:.1f} s; use it with model.path = "{row["model"]}"')
    else:
        _print(f"stopped after step {outcome.steps}; resume with: rollbook sft {directory}")
    sys.stdout.write(json.dumps(row) + "\n")
    return 0 if outcome.is_finished else 130


def _rows(loaded: LoadedSftConfig, tokenizer: ModelTokenizer) -> tuple[tuple[TokenRow, ...], tuple[TokenRow, ...]]:
    """The rows to train and the rows for validation."""
    settings = loaded.config.sft

    def read(name: str) -> Demonstrations:
        found = read_demonstrations(
            loaded.source_dir / name,
            tokenizer,
            max_tokens=settings.max_tokens,
            is_strict=settings.bad_lines == "refuse",
        )
        for line in found.bad:
            _print(f"{found.path}: skipped {line}")
        return found

    train = read(settings.data)
    if settings.validation is not None:
        return train.rows, read(settings.validation).rows
    return train.split(settings.validation_share) if settings.validation_share else (train.rows, ())


def write_or_check_manifest(directory: Path, loaded: LoadedSftConfig, data_digest: str, *, total_steps: int) -> str:
    """Record the settings that decide the numbers, and return the id of the run. Raises `RunError` if a resumed run has other
    settings."""
    made_from = {
        "source_dir": str(loaded.source_dir),
        "data_digest": data_digest,
        "total_steps": total_steps,
        "examples_per_step": loaded.config.sft.examples_per_step,
        "trainer": {
            name: value
            for name, value in sft_trainer(loaded.config.trainer).numeric_settings().items()
            if name not in SPLIT_SETTINGS
        },
    }
    path, run_id = RunDirectory(directory).sft_manifest_file, uuid.uuid4().hex
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in made_from if name != "source_dir" and before.get(name) != made_from[name]]
        if changed:
            raise RunError(
                f"{directory} was started with other settings ({', '.join(changed)} differ); "
                "restore them, or choose another --out"
            )
        run_id = before.get("id", run_id)
    write_json(path, {"id": run_id, **made_from})
    return run_id


def _copy_model(model_dir: Path, final: Path) -> Path:
    """Copy the model of the last checkpoint, atomically."""
    draft = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(model_dir, draft)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    return final


def _figures(outcome: SftOutcome) -> dict[str, Any]:
    figures = {
        "loss_first": outcome.first_loss,
        "loss_last": outcome.last_loss,
        "eval_loss_before": outcome.eval_loss_before,
        "eval_loss": outcome.eval_loss,
    }
    rounded = {name: None if value is None else round(value, 5) for name, value in figures.items()}
    return {"steps": outcome.steps, "digest": outcome.checkpoint.weights_digest, **rounded}


class _ProgressPrinter:
    """Prints a progress line every `PROGRESS_INTERVAL_S`, and after each evaluation."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, row: dict[str, Any]) -> None:
        measured = row["eval/loss"]
        if time.monotonic() < self._next and measured is None:
            return
        self._next = time.monotonic() + PROGRESS_INTERVAL_S
        loss, rate = row["train/loss"], row["perf/tokens_per_s"]
        parts = [f"step {row['step']}"]
        parts += [] if loss is None else [f"loss {loss:.4f}", f"{rate:.0f} tokens/s"]
        parts += [] if measured is None else [f"validation loss {measured:.4f}"]
        _print("  ".join(parts))


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
