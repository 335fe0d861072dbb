"""Generates text: engines, policy server, clients, weight updates, and vLLM."""
