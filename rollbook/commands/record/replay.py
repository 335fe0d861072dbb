"""`rollbook.replay` and `rollbook replay`: run the replay in a subprocess, so that this process does not import torch."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, overload

from rich.table import Table

from rollbook.commands.arguments import Argument, AsJson, Option
from rollbook.commands.output import EXIT_FAILED, result_json, say, stderr_console
from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.contracts.decoding import convert
from rollbook.contracts.errors import RunError, UsageError
from rollbook.contracts.plugin import require_libraries
from rollbook.run.directory import RunDirectory
from rollbook.run.user_objects import reference_to


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChange:
    """Steps after `after_step` were trained with other settings."""

    after_step: int
    settings: Mapping[str, tuple[Any, Any]]
    """The settings that changed, with both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The recorded batches were trained again. On the same kind of machine every digest must be that of the run."""

    run_dir: Path
    steps: int
    digest: str
    """Digest of the weights after the last step."""
    recorded_digest: str | None
    diverged_at: int | None
    """The first step whose weights differ from the recorded ones."""
    note: str | None = None
    """What else a reader must know: modules of the user that changed since."""
    changes: tuple[SettingsChange, ...] = ()
    """Settings of the trainer that changed when the run was resumed."""
    machines: tuple[str, ...] = ()
    """How the machines that trained the run differ from this one, where that may change bits."""

    @property
    def is_exact(self) -> bool:
        return self.diverged_at is None

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "run_dir": str(self.run_dir)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """The recorded batches were trained with the recorded settings and with others."""

    run_dir: Path
    steps: int
    changed: Mapping[str, tuple[Any, Any]]
    """Settings that differ, with both values."""
    digests: Mapping[str, str]
    table: Sequence[Mapping[str, Any]]
    """One row per measure; for each training the mean over the first and over the last tenth of the steps."""
    picture: Path
    curves: Path
    note: str | None = None
    """What else a reader must know: modules of the user that changed since."""

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


@overload
def replay(
    run: str | Path, *, until: int | None = None, on_progress: Callable[[str], None] | None = None
) -> ReplayReport: ...


@overload
def replay(
    run: str | Path,
    *,
    until: int | None = None,
    loss: Callable[..., Any] | str,
    advantage: Callable[..., Any] | str | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> LossComparison: ...


@overload
def replay(
    run: str | Path,
    *,
    until: int | None = None,
    loss: Callable[..., Any] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ReplayReport | LossComparison: ...


def replay(
    run: str | Path,
    *,
    until: int | None = None,
    loss: Callable[..., Any] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ReplayReport | LossComparison:
    """Train the recorded batches of a run again from the initial weights, without generation.

    Without `loss`, `advantage` and `overrides` the digests of all steps are compared with the recorded ones. With another loss or
    advantage (a name or a function) or other settings (`"trainer.lr=1e-4"`), both trainings are compared, and their curves are
    drawn into `out`. `on_progress` gets lines about the replay while it runs.
    """
    path = Path(run)
    directory = RunDirectory(path.resolve())
    directory.read_manifest()
    arguments = [] if until is None else ["--until", str(until)]
    if loss is None and advantage is None and not overrides:
        return convert(_run_replay(path, arguments, on_progress), ReplayReport, dec_hook=_path)
    if callable(loss):
        loss = reference_to(loss, setting="loss", directory=directory.objects)
    if callable(advantage):
        advantage = reference_to(advantage, setting="advantage", directory=directory.objects)
    arguments += [] if loss is None else ["--loss", loss]
    arguments += [] if advantage is None else ["--advantage", advantage]
    arguments += [part for text in overrides for part in ("--set", text)]
    folder = out or path / "replays" / re.sub(
        r"[^A-Za-z0-9_.-]+", "-", "-".join(filter(None, (loss, advantage))) or "settings"
    )
    report = _run_replay(path, [*arguments, "--out", str(folder)], on_progress)
    return convert(report, LossComparison, dec_hook=_path)


def _run_replay(
    path: Path, arguments: Sequence[str], on_progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    require_libraries("torch", "transformers")
    command = python_command("rollbook.run.processes.replay", str(path), *arguments)
    last = ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=python_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for last in process.stdout:
            # Functions of the user may print, too.
            if last.startswith('{"said":') and on_progress is not None:
                on_progress(json.loads(last)["said"])
        if process.wait() != 0:
            errors.seek(0)
            cause = f"\n{errors.read().strip()[-2000:]}"
            if last.startswith('{"failed":'):
                cause = f" {json.loads(last)['failed']}"
            raise RunError(f"the replay of {path} failed:{cause}")
    report: dict[str, Any] = json.loads(last)
    return report


def _path(kind: type, value: Any) -> Any:
    """msgspec does not know paths."""
    return kind(value)


def replay_command(
    run: Annotated[Path, Argument(help="The run directory.")],
    *,
    verify: Annotated[
        bool, Option("--verify", help="Exit non-zero if a digest differs from the recorded one.")
    ] = False,
    until: Annotated[int | None, Option("--until", min=1, help="Stop after this step.")] = None,
    loss: Annotated[
        str | None,
        Option("--loss", help="Train with another loss on the same batches and compare it with the recorded one."),
    ] = None,
    advantage: Annotated[
        str | None,
        Option(
            "--advantage",
            help="Train with other advantages on the same batches and compare them with the recorded ones.",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="trainer.FIELD=VALUE",
            help="Override a trainer setting; may be repeated.",
            settings="rollbook.run.config.run:RunConfig",
        ),
    ] = None,
    out: Annotated[Path | None, Option("--out", help="Folder for the curves; default: in the run.")] = None,
    as_json: AsJson = False,
) -> int:
    """Train the recorded batches again from the initial weights, without generation. The record is only read."""
    if verify and (loss is not None or advantage is not None or override):
        raise UsageError("--verify cannot be combined with --loss, --advantage or --set")
    report = replay(
        run, until=until, loss=loss, advantage=advantage, overrides=override or (), out=out, on_progress=say
    )
    if as_json:
        result_json(report.row())
    if report.note is not None:
        say(report.note)
    if isinstance(report, LossComparison):
        _print_comparison(report.row())
        return 0
    for change in report.changes:
        settings = ", ".join(
            f"trainer.{name} {before!r} → {after!r}" for name, (before, after) in change.settings.items()
        )
        say(f"after step {change.after_step} the run continued with other settings: {settings}")
    if report.is_exact:
        stderr_console().print(f"{report.steps} steps reproduced bit for bit", style="green")
        return 0
    stderr_console().print(f"the weights differ from step {report.diverged_at} on", style="red")
    return EXIT_FAILED if verify else 0


def _print_comparison(report: dict[str, Any]) -> None:
    rows = report["table"]
    names = [name for name in rows[0] if name != "measure"]
    shown = Table(title=f"{report['steps']} recorded steps: first tenth → last tenth", title_justify="left")
    for heading in ("", *names):
        shown.add_column(heading, no_wrap=True)
    for row in rows:
        shown.add_row(row["measure"], *(_arrow(*row[name]) for name in names))
    stderr_console().print(shown)
    for name, (before, after) in report["changed"].items():
        say(f"  {name}: {before!r} → {after!r}")
    say(f"plot: {report['picture']}")


def _arrow(first: float | None, last: float | None) -> str:
    return "–" if first is None or last is None else f"{first:.4g} → {last:.4g}"
