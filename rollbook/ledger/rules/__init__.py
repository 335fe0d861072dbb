"""The rules of the protocol, written against `store.Transaction`, without clock, network or SQL."""
