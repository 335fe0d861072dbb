"""Adapters to other trainers: TRL on Rollbook's rollouts, the published recipe, and weight updates."""
