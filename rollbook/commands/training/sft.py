"""`rollbook sft`: supervised fine-tuning on demonstrations. The training runs in a subprocess."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import result_json
from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand, require_libraries
from rollbook.run.config.run import ConfigError, ConfigFault, located
from rollbook.run.config.sft import dump_sft_toml, load_sft_config
from rollbook.run.directory import RunDirectory, RunDirectoryError
from rollbook.run.resources.machine import this_machine
from rollbook.run.resources.sft_plan import SftResolution, missing_gpus, resolve_sft


@dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    row: dict[str, Any]
    exit_code: int


def run_sft(source: Path, *, out: Path | None, overrides: Sequence[str]) -> SftReport:
    """Train from a config file, or resume an output directory."""
    require_libraries("torch", "transformers")
    found, directory = _resolve(source, out, overrides)
    loaded, faults = found.loaded, found.faults()
    if not directory.sft_manifest_file.exists():
        model_faults = load_on_demand("rollbook.run.preflight.model_files:model_faults")
        faults += [ConfigFault("model.path", text) for text in model_faults(loaded.config.model, loaded.source_dir)]
    if faults:
        raise ConfigError(str(source), located(faults, None if source.is_dir() else source, overrides))
    for line in found.lines():
        sys.stderr.write(line + "\n")
    _prepare(directory.path)
    command = python_command("rollbook.run.processes.sft", str(directory.path), str(loaded.source_dir))
    return _run(command, directory.path, config=dump_sft_toml(loaded), threads=loaded.config.trainer.threads)


def _resolve(source: Path, out: Path | None, overrides: Sequence[str]) -> tuple[SftResolution, RunDirectory]:
    if source.is_dir():
        loaded = load_sft_config(source, overrides)
        missing = missing_gpus(loaded.config.trainer, this_machine(), is_resumed=True)
        return SftResolution(loaded=loaded, machine=this_machine(), missing=missing), RunDirectory(source.resolve())
    loaded = load_sft_config(source, overrides)
    chosen = out or Path("runs") / f"{loaded.config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory, recorded = RunDirectory(chosen.resolve()), None
    if directory.sft_manifest_file.exists():
        recorded = load_sft_config(directory.require_config(), source_dir=loaded.source_dir).config.trainer
    return resolve_sft(loaded, this_machine(), recorded=recorded), directory


def _prepare(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the directory {path} cannot be created ({error.strerror or error}): choose another --out"
        ) from error


def _run(command: list[str], path: Path, *, config: str, threads: int) -> SftReport:
    """Run the child. It gets the config on stdin and writes it once it holds the lock of the directory.

    Its stderr goes to the terminal; the result is the last line of its stdout.
    """
    watch_read, watch_write = os.pipe()
    before = signal.getsignal(signal.SIGINT)
    try:
        child = subprocess.Popen(
            [*command, str(watch_read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(watch_read,),
            env={**python_environment(), "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )
        # Ctrl-C reaches the child too: it finishes its step, writes a checkpoint and prints how to resume.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        printed, _ = child.communicate(config)
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(watch_read)
        os.close(watch_write)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if child.returncode not in (0, 130) or not lines:
        raise RunError(f"training in {path} failed with exit code {child.returncode}; see its output above")
    return SftReport(row=json.loads(lines[-1]), exit_code=child.returncode)


def sft_command(
    config: Annotated[Path, Argument(help="The TOML file, or an output directory to resume.")],
    out: Annotated[Path | None, Option("--out", help="The output directory; an existing one is resumed.")] = None,
    override: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="Override a field; may be repeated.",
            settings="rollbook.run.config.sft:SftRunConfig",
        ),
    ] = None,
) -> int:
    """Train a model on chats, the assistant's tokens only. The result is a model directory for `model.path` of a run."""
    report = run_sft(config, out=out, overrides=override or ())
    result_json(report.row)
    return report.exit_code
