"""Telemetry of another machine arrives complete, in order and once, or what is missing is counted."""

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.telemetry import shipping
from rollbook.telemetry.events import EventLog, read_json_lines
from rollbook.telemetry.shipping import ReceivedFiles, Shipper

FILE = "logs/policy-a.jsonl"


class LostError(Exception):
    """A request or its response is lost."""


class Pair:
    """A machine that sends, a run directory that receives, and a network between them."""

    def __init__(self, root: Path) -> None:
        self.there, self.here = root / "there", root / "here"
        for folder in (self.there, self.here):
            (folder / "logs").mkdir(parents=True)
        self.shed: list[tuple[str, int]] = []
        self.loses = ""
        self.largest = 0
        self.restart_receiver()
        self.restart_sender()

    def restart_sender(self) -> None:
        self.shipper = Shipper(self.there, self._send, on_shed=lambda file, size: self.shed.append((file, size)))

    def restart_receiver(self) -> None:
        self.received = ReceivedFiles(self.here)

    async def _send(self, file: str, data: bytes, *, stream: str, start: int) -> None:
        loses, self.loses = self.loses, ""
        self.largest = max(self.largest, len(data))
        if loses == "request":
            raise LostError
        self.received.append(file, data, stream=stream, start=start)
        if loses == "response":
            raise LostError

    def write(self, text: str) -> None:
        with (self.there / FILE).open("a") as file:
            file.write(text)

    @property
    def arrived(self) -> str:
        return (self.here / FILE).read_text()


@given(
    st.lists(
        st.sampled_from(
            ["write", "write", "ship", "lose request", "lose response", "restart sender", "restart receiver"]
        ),
        max_size=30,
    )
)
async def test_every_byte_arrives_once_and_in_order(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        pair = Pair(Path(name))
        written = ""
        for number, step in enumerate([*steps, "write"]):
            if step == "write":
                pair.write(line := f"line {number}\n" * 3)
                written += line
            elif step == "restart sender":
                pair.restart_sender()
            elif step == "restart receiver":
                pair.restart_receiver()
            else:
                pair.loses = step.removeprefix("lose ") if step.startswith("lose") else ""
                with suppress(LostError):
                    await pair.shipper.ship()
                pair.loses = ""
        await pair.shipper.ship()
        assert pair.arrived == written
        assert pair.shed == []


async def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "BATCH_BYTES", 64)
    pair = Pair(tmp_path)
    pair.write("0123456789\n" * 50)
    await pair.shipper.ship()
    assert (pair.largest, pair.arrived) == (64, "0123456789\n" * 50)


async def test_what_is_not_sent_in_time_is_shed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MAX_BACKLOG_BYTES", 200)
    monkeypatch.setattr(shipping, "KEPT_BYTES", 45)
    pair = Pair(tmp_path)
    pair.write("first\n")
    await pair.shipper.ship()
    pair.write("".join(f"line {number:04}\n" for number in range(100)))
    await pair.shipper.ship()
    assert pair.arrived == "first\nline 0096\nline 0097\nline 0098\nline 0099\n"
    assert pair.shed == [(FILE, 960)]


async def test_a_file_that_is_renamed_because_it_is_full_is_sent_completely(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    log = EventLog("policy-a", pair.there / FILE, max_bytes=2000)
    for number in range(60):
        log.info("test.event", number=number)
        if number % 7 == 0:
            await pair.shipper.ship()
    log.close()
    await pair.shipper.ship()
    assert [row["number"] for row in read_json_lines(pair.here / FILE)] == list(range(60))


def test_a_received_file_is_bounded_and_keeps_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    received = ReceivedFiles(tmp_path, max_bytes=100)
    for number in range(10):
        received.append(FILE, b"x" * 49 + b"\n", stream="s", start=50 * number)
    assert [(tmp_path / f"{FILE}{end}").stat().st_size for end in ("", ".1")] == [50, 150]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "token", "logs/../token.jsonl", "../logs/a.jsonl", "logs/.jsonl", "logs/a"]
)
def test_only_telemetry_files_of_other_processes_can_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a telemetry file"):
        ReceivedFiles(tmp_path).append(name, b"x", stream="s", start=0)
    assert list(tmp_path.rglob("*")) == []
