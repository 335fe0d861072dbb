"""Rollbook: asynchronous reinforcement learning for LLM agents. Version only, so that importing it is free."""

__version__ = "0.1.0"
