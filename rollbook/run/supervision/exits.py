"""What the supervisor does after the exit of a process. Pure: no clock, no process."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollbook.concurrency.child_process.process import exit_reason

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_STOP_RUN = 2
EXIT_FENCED = 3
EXIT_NO_MEMORY = 4
"""The supervisor decides: a process that just trained or served may find more memory when it is started again."""
NEEDED = {"base": "the process that owns its base", "mps": "the MPS server of the run"}
"""Roles without which other processes cannot work."""


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """Restart with growing waits; give up on a process that repeatedly dies while it starts or soon after it is ready.

    An incarnation that is ready for `healthy_s` or longer and makes progress resets the count, so a process that dies every few
    minutes is always restarted, and one that cannot start stops the run with its cause. One that only waited is not healthy.
    """

    most_quick_deaths: int = 6
    most_failed_starts: int = 2
    """Deaths of a process of which no incarnation was ever ready: more restarts would not help."""
    most_idle_lives: int = 2
    """Incarnations in a row that were ready for `idle_s` or longer, made no progress and died: they waited for something."""
    idle_s: float = 60.0
    healthy_s: float = 15.0
    first_wait_s: float = 0.2
    most_wait_s: float = 5.0

    def decide(
        self, lifetimes_s: Sequence[float], *, was_ready: bool = True, has_progressed: Sequence[bool] | None = None
    ) -> Restart | GiveUp:
        """`lifetimes_s`: how long each incarnation was ready, oldest first; the last one has just died.

        `has_progressed`: whether each of them made progress (default: all).
        """
        if not was_ready and len(lifetimes_s) > self.most_failed_starts:
            return GiveUp(f"it died {len(lifetimes_s)} times before it was ready")
        quick, is_idle, waited_s = 0, False, list[float]()
        progressed = [True] * len(lifetimes_s) if has_progressed is None else has_progressed
        for lifetime, is_progress in zip(reversed(lifetimes_s), reversed(progressed), strict=True):
            if lifetime >= self.healthy_s and is_progress:
                break
            quick += 1
            is_idle = is_idle or lifetime >= self.healthy_s
            if lifetime >= self.idle_s:
                waited_s.append(lifetime)
        if len(waited_s) > self.most_idle_lives:
            return GiveUp(f"it died {len(waited_s)} times without progress, after {sum(waited_s):.0f} s in all")
        if quick > self.most_quick_deaths:
            progress = " or without progress" if is_idle else ""
            return GiveUp(f"it died {quick} times in a row within {self.healthy_s:g} s of being ready{progress}")
        return Restart(min(self.most_wait_s, self.first_wait_s * 2 ** max(0, quick - 1)))

    def may_find_memory(self, lifetimes_s: Sequence[float], *, has_progressed: Sequence[bool] | None = None) -> bool:
        """Whether to restart a process that ran out of memory: it was healthy, or the one before it was, whose memory may not have
        been free yet. One that never fitted does not fit the next time either."""
        progressed = [True] * len(lifetimes_s) if has_progressed is None else has_progressed
        last = [*zip(lifetimes_s, progressed, strict=True)][-2:]
        return any(lifetime >= self.healthy_s and is_progress for lifetime, is_progress in last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How an incarnation of a process ended, and what the supervisor knows about the process and the run."""

    code: int
    """Negative: the signal that ended it."""
    has_ended: bool = False
    """It reported that its work is done."""
    was_stopped: bool = False
    """It reported that it ended early because of SIGTERM, which another program may send."""
    fault: str | None = None
    """The reason that it reported for a person."""
    lifetimes_s: Sequence[float] = (0.0,)
    """How long each incarnation was ready, oldest first."""
    has_progressed: Sequence[bool] | None = None
    """Whether each incarnation made progress. None: all did."""
    was_ready: bool = True
    """At least one incarnation was ready."""
    is_last: bool = False
    """The run is over when this process ends."""
    is_optional: bool = False
    """The run continues without it."""
    is_draining: bool = False
    """A signal or an operator has stopped the run."""
    is_interrupted: bool = False
    """A signal has stopped the run: a person waits for its end."""
    lost: str | None = None
    """The role of a process that it needs and that has died."""


class ExitAction(StrEnum):
    END = "end"
    """The process has done its work."""
    ABORT_DRAIN = "abort_drain"
    """It died while the run stopped. The same command resumes from the last checkpoint."""
    DROP = "drop"
    """The run continues without it."""
    FAIL_RUN = "fail_run"
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitVerdict:
    action: ExitAction
    cause: str = ""
    sentence: str = ""
    """What happened, in words that follow the name of the process."""
    restart_after_s: float = 0.0
    shows_output: bool = False
    """The last output of the process explains it."""


def judge(ended: ProcessExit, rule: RestartRule) -> ExitVerdict:
    """A process that did its work ends; one that reported a fault stops the run; one that died is restarted by the rule.

    Another program may send SIGTERM to one process or to all of them at once (a batch system, systemd, a watcher of memory). A
    server that stops because of it is still needed, even while the trainer drains.
    """
    is_stop_expected = ended.is_last and ended.is_draining
    if is_stop_expected if ended.was_stopped else (ended.code == EXIT_DONE or ended.has_ended):
        return ExitVerdict(action=ExitAction.END)
    if ended.is_last and ended.is_interrupted:
        return ExitVerdict(action=ExitAction.ABORT_DRAIN)
    failure = ExitAction.DROP if ended.is_optional else ExitAction.FAIL_RUN
    if ended.code == EXIT_FENCED:
        cause = ended.fault or "another trainer took over this run"
        return ExitVerdict(action=ExitAction.FAIL_RUN, cause=cause, sentence=f"stopped the run: {cause}")
    if ended.lost is not None:
        cause = f"{NEEDED[ended.lost]} died"
        return ExitVerdict(action=ExitAction.RESTART, cause=cause, sentence=f"was ended, because {cause}")
    is_too_large = ended.code == EXIT_NO_MEMORY and not rule.may_find_memory(
        ended.lifetimes_s, has_progressed=ended.has_progressed
    )
    if ended.code == EXIT_STOP_RUN or is_too_large:
        cause = ended.fault or "it reported no reason"
        stopped = "stopped" if ended.is_optional else "stopped the run"
        return ExitVerdict(action=failure, cause=cause, sentence=f"{stopped}: {cause}")
    reason = "was stopped by another program (SIGTERM)" if ended.was_stopped else exit_reason(ended.code)
    fault = f": {ended.fault.splitlines()[0]}" if ended.fault else ""
    match rule.decide(ended.lifetimes_s, was_ready=ended.was_ready, has_progressed=ended.has_progressed):
        case GiveUp(cause):
            return ExitVerdict(action=failure, cause=cause, sentence=f"{reason}{fault}; {cause}", shows_output=True)
        case Restart(after_s):
            return ExitVerdict(
                action=ExitAction.RESTART,
                cause=reason,
                sentence=f"{reason}{fault}",
                restart_after_s=after_s,
                shows_output=ended.code > 0 and ended.code != EXIT_NO_MEMORY and not ended.was_stopped,
            )
