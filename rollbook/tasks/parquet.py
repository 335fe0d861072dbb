"""Rows of a Parquet file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow.parquet import ParquetFile


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()
