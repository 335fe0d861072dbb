"""The Atropos dialect: the HTTP+JSON that Atropos's environments and trainers speak, on the same durable ledger.

`models` are its messages, `scored_data` parses a posted group, `tables` are its rows, `batch_forming` chooses batches, `rules` and
`posts` are its transactions, `service` does the waiting and `routes` is HTTP. PROTOCOL rules 16 and 17.
"""
