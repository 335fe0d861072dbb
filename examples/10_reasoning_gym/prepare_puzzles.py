"""Writes the tasks and the demonstrations. Needs reasoning-gym (`pip install '.[maths]'`); training does not.

python examples/10_reasoning_gym/prepare_puzzles.py --to examples/10_reasoning_gym/data
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import puzzles


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    listed = list(rows)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in listed), encoding="utf-8")
    print(f"{path}: {len(listed)} rows", file=sys.stderr)


def demonstration(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--each", type=int, default=200, help="training tasks of each generator and level")
    parser.add_argument("--held-out", type=int, default=16, help="held-out tasks of each generator and level")
    parser.add_argument("--shown", type=int, default=60, help="training tasks of each that are demonstrated")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    train = list(puzzles.rows("train", args.each, held_out=args.held_out, seed=args.seed))
    shown = [row for row in train if int(row["id"].rpartition("-")[2]) < args.shown]
    random.Random(args.seed).shuffle(shown)
    write(args.to / "train.jsonl", train)
    write(args.to / "held_out.jsonl", puzzles.rows("test", 0, held_out=args.held_out))
    write(args.to / "demonstrations.jsonl", map(demonstration, shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
