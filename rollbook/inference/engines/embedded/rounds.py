"""One round of the engine, as it is noted: what was launched, what became known of it, and how much may be in it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.policy import FinishReason
from rollbook.inference.engines.embedded.runner import Flight
from rollbook.inference.request import Request


@dataclass(slots=True)
class Finished:
    """What became known."""

    done: list[tuple[Request, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    told: list[Request] = field(default_factory=list)
    """Who streams and has new tokens."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRound:
    """Launched, not yet heard of."""

    number: int
    flight: Flight
    publication: int
    rows: NDArray[np.int64]
    owners: NDArray[np.object_]
    stops: NDArray[np.int32] | None
    ending: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    round_tokens: int
    """Prompt tokens prefilled in a round at most."""
    forward_tokens: int
    """Of one forward, padding included."""
    ahead: int
    """Rounds launched before the host waits for the oldest."""
