"""Creates the table and the plot of the results from the evaluations and the run of `make aws-agent`.

    python examples/04_aws_agent_learns/results.py runs/aws-agent --to docs/results/aws-agent

The last column reports whether the intervals before and after overlap; then the difference is not significant.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MEASURED = ("before", "before-greedy", "after", "after-greedy")
MODES = (("sampled at temperature 1", "before", "after"), ("greedy", "before-greedy", "after-greedy"))
STEPS_A_POINT = 5
COLOURS = {"all": "#2b2b2b", "beginner": "#2f8f5b", "warm-up": "#d9a441"}


def percent(share: Mapping[str, float]) -> str:
    return f"{share['mean']:.1%} [{share['low']:.0%}–{share['high']:.0%}]"


def table(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "| | tasks | after the warm start | after reinforcement learning | difference | intervals |",
        "|---|---|---|---|---|---|",
    ]
    for mode, before, after in MODES:
        if before not in measured or after not in measured:
            continue
        later = {row["label"]: row for row in measured[after]["results"]}
        for row in measured[before]["results"]:
            first, second = row["solved"], later[row["label"]]["solved"]
            is_apart = second["low"] > first["high"] or first["low"] > second["high"]
            lines.append(
                f"| {row['label']}, {mode} | {row['tasks']} × {row['episodes'] // row['tasks']} | {percent(first)} | "
                f"{percent(second)} | {100 * (second['mean'] - first['mean']):+.1f} | {'apart' if is_apart else 'overlap'} |"
            )
    return lines


def headroom(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The solve rate of the best of several episodes after the warm start: an upper bound for training on rewards."""
    parts = [
        f"{row['label']} {row['solved']['mean']:.0%} → {row['solved_once']['mean']:.0%}"
        for row in measured["before"]["results"]
    ]
    each = measured["before"]["results"][0]
    episodes = each["episodes"] // each["tasks"]
    return f"Before, solved on average → solved by at least one of {episodes} episodes: {', '.join(parts)}."


def progress(run_dir: Path) -> list[tuple[float, float]]:
    """Step and solve rate of all groups, including filtered ones. The trained groups say less, because they exclude groups with
    only successes or only failures."""
    step, bins = 0, dict[int, list[tuple[float, float]]]()
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["process"] == "trainer" and row.get("step") is not None:
            step = int(row["step"])
        elif row["process"] == "rollout" and row.get("rollout/raw_accuracy") is not None:
            bins.setdefault(step // STEPS_A_POINT, []).append(
                (row["rollout/groups_finished"], row["rollout/raw_accuracy"])
            )
    return [
        ((number + 0.5) * STEPS_A_POINT, sum(n * solved for n, solved in rows) / sum(n for n, _ in rows))
        for number, rows in sorted(bins.items())
        if sum(n for n, _ in rows) > 0
    ]


def draw(path: Path, points: Sequence[tuple[float, float]], measured: Mapping[str, Mapping[str, Any]]) -> None:
    """The solve rate of the training tasks, and the held-out solve rate before and after with its interval."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(
        [at for at, _ in points],
        [solved for _, solved in points],
        color="#3b6ea8",
        label="training tasks, all groups played",
    )
    last = measured["after"]["step"]
    for label, colour in COLOURS.items():
        ends = [
            row["solved"] for name in ("before", "after") for row in measured[name]["results"] if row["label"] == label
        ]
        if len(ends) < 2:
            continue
        means = [end["mean"] for end in ends]
        errors = [[end["mean"] - end["low"] for end in ends], [end["high"] - end["mean"] for end in ends]]
        axes.errorbar(
            [0, last],
            means,
            yerr=errors,
            color=colour,
            marker="o",
            capsize=3,
            linestyle=":",
            label=f"held out, {label}",
        )
    axes.set_ylim(0, 1)
    axes.set_xlabel("step of reinforcement learning")
    axes.set_ylabel("solved")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="the directory of `make aws-agent`")
    parser.add_argument("--to", type=Path, default=Path("docs/results/aws-agent"))
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    measured = {}
    for name in MEASURED:
        source = args.home / f"{name}.json"
        if source.is_file():
            measured[name] = json.loads(source.read_text(encoding="utf-8"))
            # The path of the model is meaningless on other machines.
            kept = {key: value for key, value in measured[name].items() if key != "model"}
            (args.to / source.name).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    lines = [*table(measured), "", headroom(measured)]
    (args.to / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(args.to / "learning.png", progress(args.home / "rl"), measured)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
