"""docs/failures.md is generated from the failure table, docs/results/chaos.md from recorded runs; the settings exist."""

import re
from pathlib import Path

from pydantic import BaseModel

from rollbook.run.config.run import RunConfig
from scripts.docs.failures import DEADLINES
from scripts.docs.failures import page as failures_page
from tests.faults.chaos_report import page as chaos_page

ROOT = Path(__file__).parents[2]


def test_the_failures_page_matches_the_table() -> None:
    assert (ROOT / "docs" / "failures.md").read_text(encoding="utf-8") == failures_page(), "run `make docs`"


def test_the_page_of_chaos_runs_matches_their_records() -> None:
    assert (ROOT / "docs" / "results" / "chaos.md").read_text(encoding="utf-8") == chaos_page(), "run `make docs`"


def test_every_deadline_on_the_failures_page_is_a_setting() -> None:
    for _, setting, _ in DEADLINES:
        for path in re.findall(r"`([a-z_.]+)`", setting):
            model: type[BaseModel] = RunConfig
            for name in path.split("."):
                assert name in model.model_fields, path
                kind = model.model_fields[name].annotation
                model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else BaseModel
