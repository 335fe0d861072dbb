"""The Atropos API of the ledger: the HTTP and JSON of Atropos environments and trainers, on the same durable record.

`models` are its messages, `scored_data` parses a posted group, `batch_forming` chooses batches, `rules` are its transactions,
`service` waits and retries, `routes` is HTTP. docs/ledger-rules.md, rules 16 and 17.
"""
