"""Adapters to other trainers: TRL on Rollbook's rollouts, the published recipe, and weight updates."""

from rollbook.contracts.plugin import hide_warnings_of_torchao

hide_warnings_of_torchao()
