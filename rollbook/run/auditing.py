"""Open the ledger of a run directory for reading: audit, inspection, replay. Works beside a live run and on a dead one."""

