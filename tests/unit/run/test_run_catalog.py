"""The runs that a dashboard finds below a folder."""

from pathlib import Path

from rollbook.run.catalog import open_catalog


def make_run(path: Path, created: float) -> None:
    path.mkdir(parents=True)
    (path / "run.json").write_text(f'{{"name": "demo", "created": {created}}}', encoding="utf-8")


async def test_the_runs_of_studies_are_found_from_the_folder_of_all_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "first", 1.0)
    make_run(tmp_path / "lr" / "cells" / "lr=0.001" / "seed-1", 3.0)
    make_run(tmp_path / "lr" / "cells" / "lr=0.001" / "seed-0", 2.0)
    make_run(tmp_path / ".venv" / "share" / "example", 4.0)
    found = [place.key for place in await open_catalog(str(tmp_path)).places()]
    assert found == ["lr/cells/lr=0.001/seed-1", "lr/cells/lr=0.001/seed-0", "first"]
