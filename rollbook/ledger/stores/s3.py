"""Payloads in a bucket. Imported only with `ledger.payloads = "s3://…"`, because boto3 is an extra."""

import time
from collections.abc import Iterator

from rollbook.access.object_store import ObjectStore
from rollbook.contracts.errors import TransientError
from rollbook.ledger.store import StoreFaultError

RETRY_AFTER_S = 1.0


class PayloadBucket(ObjectStore):
    """Satisfies `objects.Objects`."""

    def names(self, *, older_than_s: float) -> Iterator[str]:
        until = time.time() - older_than_s
        return (found.name for found in self.listed() if found.changed_at < until)

    def failure(self, cause: Exception, advice: str | None) -> Exception:
        if advice is None:
            return TransientError(
                f"payloads in {self.location} cannot be reached ({cause}); try again", retry_after_s=RETRY_AFTER_S
            )
        return StoreFaultError(f"payloads in {self.location}: {cause}; {advice}")
