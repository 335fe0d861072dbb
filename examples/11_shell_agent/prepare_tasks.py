"""Writes the tasks and the demonstrations: the reference solutions, in the prompts that the agent sends.

python examples/11_shell_agent/prepare_tasks.py
"""

import argparse
import json
import random
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import shell_tasks
from jinja2 import Template

HERE = Path(__file__).parent
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def agent_templates() -> dict[str, Template]:
    """The prompts of the agent, from the settings of the run."""
    settings = tomllib.loads((HERE / "run.toml").read_text(encoding="utf-8"))["rollout"]["settings"]
    pairs = (argument.removeprefix("--config=").partition("=") for argument in settings["arguments"])
    return {name: Template(text, keep_trailing_newline=True) for name, _, text in pairs if name.endswith("_template")}


def demonstration(row: dict[str, Any], templates: dict[str, Template]) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": templates["agent.system_template"].render()},
        {"role": "user", "content": templates["agent.instance_template"].render(task=row["instruction"])},
    ]
    # The solutions print nothing: they write files.
    silent = templates["model.observation_template"].render(output={"output": "", "returncode": 0})
    for command in (*row["solution"], SUBMIT):
        messages += [
            {"role": "assistant", "content": f"```bash\n{command}\n```"},
            {"role": "user", "content": silent},
        ]
    return {"messages": messages[:-1]}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    listed = list(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    print(f"{path}: {len(listed)} rows", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=HERE / "data")
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--shown", type=int, default=600, help="training tasks that are demonstrated")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    train = list(shell_tasks.rows("train", args.train, held_out=args.held_out, seed=args.seed))
    shown = random.Random(args.seed).sample(train, min(args.shown, len(train)))
    templates = agent_templates()
    write(args.to / "train.jsonl", train)
    write(args.to / "held_out.jsonl", shell_tasks.rows("test", 0, held_out=args.held_out))
    write(args.to / "demonstrations.jsonl", (demonstration(row, templates) for row in shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
