"""Single wrong bits in the files of a ledger: the audit reports each one that changes a meaning, in words."""

import random
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from rollbook.contracts.errors import RollbookError
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.run_driver import write_a_run

FLIPS = 200
UNREADABLE = "unreadable"
NOT_JUDGED = {"sqlite_sequence", "segments"}
"""`segments` says which bytes were synced: it saves work at the next start and states nothing about the run."""


def meaning_of(directory: Path, tables: list[str]) -> object:
    """Everything that is stored: all rows, and the payloads that they refer to."""
    try:
        with closing(sqlite3.connect(f"file:{directory / FILE_NAME}?mode=ro&immutable=1", uri=True)) as db:
            rows = {table: sorted(map(repr, db.execute(f"SELECT * FROM {table}"))) for table in tables}
        with open_readonly(directory) as reader:
            ids = reader.read_now(lambda tx: [group.group_id for group in tx.groups.each(RUN)])
            return rows, reader.read_now(lambda tx: [tx.payloads.get(RUN, group_id) for group_id in ids])
    except (sqlite3.Error, RollbookError, UnicodeDecodeError):
        return UNREADABLE


def report_of(directory: Path) -> tuple[str, ...]:
    """What `rollbook audit` prints. An error of another class would be a traceback."""
    try:
        with open_readonly(directory) as reader:
            return audit(reader, RUN).violations
    except RollbookError as error:
        return (str(error),)


def test_every_wrong_bit_that_changes_a_meaning_is_reported_in_words(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    write_a_run(original)
    with closing(sqlite3.connect(original / FILE_NAME)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    tables = sorted(set(names) - NOT_JUDGED)
    assert report_of(original) == ()
    meaning = meaning_of(original, tables)
    assert meaning != UNREADABLE
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file() and path.stat().st_size)
    payloads = [file for file in files if file.name != FILE_NAME and "-" not in file.suffix]
    assert payloads, "the payloads must be in segment files"
    rng = random.Random(0)
    counts: Counter[str] = Counter()
    for number in range(FLIPS):
        damaged = tmp_path / "damaged"
        shutil.copytree(original, damaged)
        file = damaged / (rng.choice(payloads) if number % 4 == 0 else FILE_NAME)
        content = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        report = report_of(damaged)
        is_changed = meaning_of(damaged, tables) != meaning
        assert report or not is_changed, f"bit {bit} of {file.name} changes a meaning and is not reported"
        assert all(sentence.strip() for sentence in report)
        counts["changed" if is_changed else "reported" if report else "harmless"] += 1
        shutil.rmtree(damaged)
    assert counts["changed"] >= FLIPS // 10, counts
