"""Adapters to other projects: TRL's trainer on Rollbook's rollouts, and a weight transfer plug-in for vLLM."""
