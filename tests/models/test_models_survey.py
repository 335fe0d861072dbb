"""docs/models.md says what Rollbook does with each family; every line is measured again. `make test-models` runs all of them."""

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.families import FAMILIES, MULTIMODAL, NOT_MEASURED, OLDER, Family
from tests.models.survey import line, page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
QUICK = {"Qwen3-MoE", "Qwen3.5"}
"""The others are slow."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.slow) for f in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")
def test_the_line_of_a_family_is_what_is_measured(family: Family) -> None:
    written = next((text for text in LINES if text.startswith(f"| {family.name} |")), "no line")
    assert written == line(family), f"python -m tests.models.survey {family.model_type} shows the new line"


def test_the_page_has_a_line_for_each_family_and_no_failure() -> None:
    assert len(FAMILIES) >= 25
    assert PAGE.read_text(encoding="utf-8") == page(LINES)
    assert [text.split("|")[1].strip() for text in LINES] == [family.name for family in FAMILIES]
    for failure in ("DIFFER", "LEAKS", "does not load"):
        assert failure not in "\n".join(LINES)


def test_every_causal_language_model_of_transformers_is_in_the_table_or_left_out_for_a_reason() -> None:
    measured = {family.model_type for family in FAMILIES}
    left_out = OLDER | MULTIMODAL | NOT_MEASURED
    assert measured & left_out == set()
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == measured | left_out


LINES = PAGE.read_text(encoding="utf-8").split("|---|\n", 1)[-1].splitlines() if PAGE.is_file() else []
