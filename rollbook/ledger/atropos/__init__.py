"""The Atropos dialect: the HTTP+JSON that Atropos's environments and trainers speak, on the same durable ledger.

`models` are its messages, `scored_data` reads a posted group, `forming` chooses batches, `rules` are its transactions, `desk` does
the waiting and `routes` is HTTP. PROTOCOL rules 16 and 17.
"""
