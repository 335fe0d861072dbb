"""Assembles the command line from `rollbook/commands`."""
