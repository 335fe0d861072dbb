"""Where the initial model of a run lies, for processes that must not import torch to find out."""

import json
from pathlib import Path

from rollbook.run.directory import RunDirectory, RunDirectoryError, write_json

FILE = "model.json"


def record_model_location(directory: RunDirectory, location: Path) -> None:
    """A model inside the run directory is named relative to it, so that a copied run finds its own."""
    inside = location.is_relative_to(directory.path)
    write_json(directory.path / FILE, {"path": str(location.relative_to(directory.path) if inside else location)})


def model_location(directory: RunDirectory) -> Path:
    try:
        return directory.path / str(json.loads((directory.path / FILE).read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(f"{directory.path / FILE} does not say where the model lies: {error}") from error
