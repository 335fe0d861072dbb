"""The process of one run of a study. It trains, or resumes, and writes how the run ended. It stops when the study is killed.

Started as `python -m rollbook.commands.training.study_cell CHANNEL REQUEST_FILE`.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from rollbook.commands.training.train import RunFailedError, train
from rollbook.commands.training.train_summary import summary_row
from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.contracts.errors import RollbookError
from rollbook.run.directory import write_json

STOP_S = 30.0
"""After the study was killed: time to finish the step and to write a checkpoint."""


def main(channel_fd: int, request_file: Path) -> int:
    connection = connect_to_parent(channel_fd)
    die_with_parent(connection.fileno(), grace_s=STOP_S)
    request = json.loads(request_file.read_text(encoding="utf-8"))
    try:
        report = train(
            request["config"],
            run_dir=request["run_dir"],
            overrides=request["overrides"],
            console=Console(file=sys.stdout, width=160, color_system=None, highlight=False),
            preflight=False,
        )
    except RunFailedError as error:
        report = error.report
    except RollbookError as error:
        write_json(Path(request["result"]), {"end": "failed", "message": str(error), "overrides": request["settings"]})
        return 1
    row = {**summary_row(report), "message": report.outcome.message, "overrides": request["settings"]}
    write_json(Path(request["result"]), row)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
