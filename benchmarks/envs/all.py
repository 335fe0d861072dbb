"""`make bench-envs`: both benchmarks of the environments. The last line has the figures with a floor.

parallel_over_serial   8 sessions × 6 turns with steps of 50 ms: concurrent against sequential
step_cpu               CPU of a step, client and server together, without the environment, against the allowed 1 ms
aws_step               a command in the AWS environment against a subprocess of the AWS CLI, medians
crowd_step             CPU of a step with 256 sessions on one server against 8
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.report import Figure, print_figures, print_status

MOST_CPU_MS = 1.0


def run(module: str) -> dict[str, Any]:
    """Run in a separate process, so that heap and children of one benchmark do not affect the other."""
    print_status(f"running {module}")
    done = subprocess.run([sys.executable, "-m", module], stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    light, aws = run("benchmarks.envs.sessions"), run("benchmarks.envs.aws")
    waiting, crowd, steps = light["eight_sessions_waiting_environment"], light["crowd"], aws["steps"]
    few, many = (crowd[size]["cpu_ms_per_step"]["median"] for size in ("few", "many"))
    figures = [
        Figure(
            name="parallel_over_serial",
            ours=waiting["parallel_s"]["median"],
            peer=waiting["serial_s"]["median"],
            unit="s",
            ratio=waiting["parallel_over_serial"],
            floor=7.5,
        ),
        Figure(name="step_cpu", ours=few, peer=MOST_CPU_MS, unit="ms", ratio=MOST_CPU_MS / few, floor=1.0),
        Figure(
            name="aws_step",
            ours=steps["ours_ms"]["median"],
            peer=steps["naive_ms"]["median"],
            unit="ms",
            ratio=steps["aws_step"],
            floor=20.0,
        ),
        Figure(name="crowd_step", ours=many, peer=few, unit="ms", ratio=few / many),
    ]
    return print_figures(
        figures, aws_environment=light["eight_sessions_aws_environment"], pools=aws["pools"], crowd=crowd
    )


if __name__ == "__main__":
    sys.exit(main())
