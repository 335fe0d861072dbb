"""WHO ANSWERS: engines, policy server, client."""
