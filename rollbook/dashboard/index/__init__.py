"""The view index: one row per group, derived from the ledger, and deletable."""
