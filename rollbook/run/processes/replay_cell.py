"""The process of one replay of a study. It trains the recorded batches of a run with other settings, and writes the curves.

Started as `python -m rollbook.run.processes.replay_cell CHANNEL REQUEST_FILE`. It has no checkpoints: what is stopped begins again.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.contracts.errors import RollbookError
from rollbook.run.directory import write_json
from rollbook.run.processes.replay import load_modules_of, retrain_recorded


def main(channel_fd: int, request_file: Path) -> int:
    connection = connect_to_parent(channel_fd)
    die_with_parent(connection.fileno())
    request = json.loads(request_file.read_text(encoding="utf-8"))
    row: dict[str, Any] = {"overrides": request["settings"]}
    try:
        note = load_modules_of(Path(request["run"]))
        lines = asyncio.run(retrain_recorded(Path(request["run"]), request["overrides"]))
        steps = max(map(len, lines.values()))
        row |= {"end": "finished", "message": note or f"{steps} recorded steps", "lines": lines}
    except RollbookError as error:
        row |= {"end": "failed", "message": str(error)}
    write_json(Path(request["result"]), row)
    return 0 if row["end"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
