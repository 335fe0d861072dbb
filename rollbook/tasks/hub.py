"""Rows of a dataset on the Hugging Face Hub, or of a local dataset directory, with the library `datasets`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from rollbook.tasks.config import HubConfig

DEFAULT_SPLIT = "train"


def rows(name: str, *, split: str | None, hub: HubConfig, base_dir: Path, setting: str) -> Iterator[dict[str, Any]]:
    """`name` is a dataset of the hub, or a directory (relative to `base_dir`). `split` None: `train`.

    `setting`: the name of the split's setting, for errors.
    """
    local = base_dir / name
    if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
        # Written by `save_to_disk`.
        saved = datasets.load_from_disk(str(local))
        if isinstance(saved, datasets.DatasetDict):
            saved = saved[split or DEFAULT_SPLIT]
        elif split is not None and saved.split != split:
            held = "one split without a name" if saved.split is None else f"the split '{saved.split}'"
            raise ValueError(f"it holds {held}; remove {setting}, or save a DatasetDict with all splits")
        yield from saved
        return
    datasets.disable_progress_bars()
    yield from datasets.load_dataset(
        str(local) if local.is_dir() else name,
        hub.subset,
        split=split or DEFAULT_SPLIT,
        revision=hub.revision,
        streaming=hub.streaming,
    )
