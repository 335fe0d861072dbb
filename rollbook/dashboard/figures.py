"""The numbers a person looks at, and the arithmetic behind them. No files and no drawing here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One trained step, as the trainer told it. None where it was not measured."""

    step: int
    time: float
    """Wall seconds since 1970 when the row was written."""
    reward: float | None = None
    solved: float | None = None
    lag_max: float | None = None
    lag_mean: float | None = None
    wait_s: float = 0.0
    """Seconds the trainer waited for this batch."""
    train_s: float = 0.0
    """Seconds it worked on it."""
    tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run as far as its files were read."""

    steps: tuple[StepFigures, ...] = ()
    """The most recent steps, oldest first; at most as many as the reader keeps."""
    last_step: int = 0
    max_lag: int = 0
    wait_s: float = 0.0
    train_s: float = 0.0
    tokens: float = 0.0
    gauges: Mapping[str, float] = field(default_factory=dict)
    """The last value of every metric, whichever process told it."""

    @property
    def latest(self) -> StepFigures:
        """The last step; before the first one, a step 0 of which nothing is known."""
        return self.steps[-1] if self.steps else StepFigures(step=0, time=0.0)

    @property
    def overlap_ratio(self) -> float | None:
        return overlap_ratio(self.wait_s, self.train_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Trained tokens a second over the steps that are kept."""
        seconds = self.seconds_per_step
        if seconds is None or seconds <= 0:
            return None
        return sum(step.tokens for step in self.steps) / len(self.steps) / seconds

    @property
    def seconds_per_step(self) -> float | None:
        """Wall seconds from one step to the next, over the last steps: a slow start does not spoil the estimate."""
        recent = self.steps[-20:]
        if len(recent) < 2 or recent[-1].step <= recent[0].step:
            return None
        return max(0.0, recent[-1].time - recent[0].time) / (recent[-1].step - recent[0].step)

    def eta_s(self, total_steps: int) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, total_steps - self.last_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLine:
    """What one process is doing, as the supervisor sees it."""

    name: str
    pid: int | None
    state: str
    """waiting, starting, running, restarting, ended, stopped, failed."""
    restarts: int = 0
    doing: str = ""
    since_s: float = 0.0
    """How long it has been in this state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A moment of a run: what its files say and what its processes do."""

    figures: RunFigures
    processes: tuple[ProcessLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A finished run in one line. First and last are means over the first and the last tenth of the steps."""

    steps: int
    seconds: float
    """From the first thing any process recorded to the last."""
    reward_first: float | None
    reward_last: float | None
    solved_first: float | None
    solved_last: float | None
    max_lag: int
    overlap_ratio: float | None
    tokens: int
    """Tokens in the trained batches."""


def overlap_ratio(wait_s: float, train_s: float) -> float | None:
    """The part of the trainer's time in which it did not wait: 1 - wait/(wait+train)."""
    whole = wait_s + train_s
    return 1.0 - wait_s / whole if whole > 0 else None


def tenth_means(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Means over the first and the last tenth, at least one step each; what was not measured is left out."""
    tenth = max(1, round(len(values) / 10))
    return _mean(values[:tenth]), _mean(values[-tenth:])


def smoothed(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of each value with those before it, up to `width` of them: a line that does not look into the future."""
    return [_mean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
