"""Asserts the lag bound that the ledger promised, and measures the lag. It never decides anything.

The manifest carries each group's oldest effective version as it was when the batch was decided, so a batch that is replayed after
a takeover is judged by what was known then.
"""

from dataclasses import dataclass

from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import lag


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """Lag over the groups of one batch, in steps; None where no group says which version sampled it."""

    mean: float | None
    most: int | None
    least: int | None
    num_unknown: int = 0

    def metrics(self) -> dict[str, float | None]:
        return {
            "async/version_offset_mean": self.mean,
            "async/version_offset_max": self.most,
            "async/version_offset_min": self.least,
            "async/unknown_version_groups": self.num_unknown,
        }


def check_lag(manifest: BatchManifest, *, budget: int) -> LagReport:
    """Lag of every group of the batch; raises `RunError` when one lies outside 0..budget."""
    known: list[int] = []
    for entry in manifest.entries:
        if entry.oldest_version is None:
            continue
        group_lag = lag(step=manifest.step, oldest_version=entry.oldest_version)
        if not 0 <= group_lag <= budget:
            raise RunError(
                f"batch {manifest.step}: group {entry.group_id} was sampled by version {entry.oldest_version}, a lag of {group_lag}"
                f" with a budget of {budget}. The ledger must never decide such a batch; the step is not trained."
            )
        known.append(group_lag)
    return LagReport(
        mean=sum(known) / len(known) if known else None,
        most=max(known, default=None),
        least=min(known, default=None),
        num_unknown=len(manifest.entries) - len(known),
    )
