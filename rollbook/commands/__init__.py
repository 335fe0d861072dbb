"""The commands: one module for each, with what it does and how it is called from the command line."""
