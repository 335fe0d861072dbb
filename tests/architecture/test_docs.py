"""Generated and linked documentation matches the code."""

import ast
import re
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import rollbook
from rollbook.ledger.config import GateConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.optimizer import peak_rate
from scripts.docs.configuration import reference
from scripts.docs.metrics import reference as metrics_reference
from scripts.docs.python_api import GROUPS
from scripts.docs.python_api import reference as api_reference
from tests.compatibility.report import page as compatibility_page

ROOT = Path(__file__).parents[2]


def test_every_test_listed_in_the_invariants_exists() -> None:
    listed = set(re.findall(r"`(test_[a-z0-9_]+)`", (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_[a-z0-9_]+)", path.read_text(encoding="utf-8"))
    }
    assert listed - defined == set()
    assert len(listed) > 15


def test_the_configuration_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_metrics_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_reference(), "run `make docs`"


def test_the_defaults_compared_with_those_of_other_systems_are_the_defaults_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)\.([\w.]+)` \| `([^`]+)` \|", (ROOT / "docs" / "learning.md").read_text(), re.M)
    assert len(rows) >= 15
    trainer = TrainerConfig()
    for section, field, shown in rows:
        name = f"{section}.{field}"
        if name == "trainer.lr":
            rates = re.findall(r"([\d.e-]+) at width (\d+)", shown)
            assert len(rates) >= 3
            for rate, width in rates:
                assert float(rate) == peak_rate(trainer, width=int(width)), f"{name} at width {width}"
            continue
        default: object = {"trainer": trainer, "gate": GateConfig(), "rollout": RolloutConfig()}[section]
        if section == "trainer" and getattr(trainer, field) is None:
            # The loss decides.
            default = trainer.recipe.as_settings()[field]
        else:
            default = attrgetter(field)(default)
        assert shown == ("off" if default is None else str(default)), f"docs/learning.md: {name} is {default}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r'= "([a-z/A-Z-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("*.md")}
    assert pages - listed == set()


def test_the_site_builds_without_broken_links_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8").replace("build/site", "site")
    (tmp_path / "zensical.toml").write_text(config, encoding="utf-8")
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    loaded = {
        f"{page.name}: {address}"
        for page in site.rglob("*.html")
        for address in re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
    }
    assert loaded == set()


def test_the_compatibility_page_matches_the_tests() -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == compatibility_page(), "run `make docs`"


def test_the_python_reference_is_up_to_date_and_lists_every_public_name_once() -> None:
    assert (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8") == api_reference(), "run `make docs`"
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted([*listed, "__version__"]) == sorted(rollbook.__all__)


def test_the_public_names_are_the_same_for_type_checkers_and_at_run_time() -> None:
    """`__init__` lists its imports twice: for type checkers, and for `__getattr__`."""
    imported = {
        alias.name: node.module
        for node in ast.walk(ast.parse((ROOT / "rollbook" / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert vars(rollbook)["_MODULES"] == imported
    assert sorted([*imported, "__version__"]) == sorted(rollbook.__all__)


def test_links_in_the_documentation_resolve() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert broken == []
