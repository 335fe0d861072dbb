"""The rules of the protocol, written once against `store.Transaction`. No clock, no socket, no SQL in here."""
