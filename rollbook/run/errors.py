"""The errors that a caller of `run` may meet, in one place for the command line."""

from rollbook.contracts.errors import RollbookError, RunError
from rollbook.run.config.run import ConfigError
from rollbook.run.directory import RunDirectoryError

__all__ = ["ConfigError", "RollbookError", "RunDirectoryError", "RunError"]
