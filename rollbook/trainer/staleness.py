"""Asserts the staleness bound that the ledger enforces, and measures the lag of a batch.

The manifest carries each group's oldest effective version as of the decision of the batch, so a batch that is replayed after a
takeover gives the same result.
"""

from dataclasses import dataclass

from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import lag


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """Lag over the groups of one batch, in steps; None where no group has a known version."""

    mean: float | None
    maximum: int | None
    minimum: int | None
    num_unknown: int = 0

    def metrics(self) -> dict[str, float | None]:
        return {
            "async/version_offset_mean": self.mean,
            "async/version_offset_max": self.maximum,
            "async/version_offset_min": self.minimum,
            "async/unknown_version_groups": self.num_unknown,
        }


def check_lag(manifest: BatchManifest, *, max_head_offpolicy_versions: int) -> LagReport:
    """Lag of every group of the batch. Raises `RunError` when one is negative or above the staleness bound."""
    known: list[int] = []
    for entry in manifest.entries:
        if entry.oldest_version is None:
            continue
        group_lag = lag(step=manifest.step, oldest_version=entry.oldest_version)
        if not 0 <= group_lag <= max_head_offpolicy_versions:
            raise RunError(
                f"batch {manifest.step}: group {entry.group_id} was sampled by version {entry.oldest_version}, a lag of {group_lag}"
                f" with max_head_offpolicy_versions = {max_head_offpolicy_versions}. The ledger must never decide such a batch;"
                " the step is not trained."
            )
        known.append(group_lag)
    return LagReport(
        mean=sum(known) / len(known) if known else None,
        maximum=max(known, default=None),
        minimum=min(known, default=None),
        num_unknown=len(manifest.entries) - len(known),
    )
