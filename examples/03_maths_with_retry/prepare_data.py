"""Writes the data of this example as JSONL. Nothing is downloaded without --hub.

python prepare_data.py sums --to data                                   demonstrations of one-digit sums, for sft.toml
python prepare_data.py gsm8k --from train.jsonl --to data               rows of GSM8K from a file: question, answer with #### 72
python prepare_data.py gsm8k --hub openai/gsm8k --split test --to data  from the hub or a dataset directory (needs `datasets`)
python prepare_data.py reasoning-gym --dataset chain_sum --count 500 --to data     generated (needs `reasoning-gym`)
"""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sums

from rollbook.tasks.config import HubConfig, TasksConfig
from rollbook.tasks.dataset import DatasetError, load_tasks


def gsm8k_rows(lines: Iterable[Any], *, split: str) -> Iterator[dict[str, Any]]:
    """Rows with stable ids. Exits with the row number if a question or a final answer is missing."""
    for number, row in enumerate(lines, start=1):
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
            raise SystemExit(f"row {number} is not a GSM8K row: it needs a question and an answer with '#### number'")
        yield {"id": f"gsm8k-{split}-{number}", "split": split, "question": question, "answer": answer}


def reasoning_gym_rows(dataset: str, count: int, *, seed: int, split: str) -> Iterator[dict[str, Any]]:
    # Imported here because it needs the optional package `reasoning-gym`.
    generate = importlib.import_module("rollbook.envs.builtin.reasoning_gym_maths").reasoning_gym_tasks
    for row in generate(dataset, count, seed=seed):
        yield {"id": row["id"], "split": split, "question": row["question"], "answer": str(row["answer"])}


def file_rows(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path}, line {number}: not JSON ({error})") from None


def hub_rows(name: str, split: str, *, subset: str | None) -> Iterator[Any]:
    config = TasksConfig(source=f"hf:{name}", split=split, hub=HubConfig(subset=subset))
    try:
        yield from (task.row for task in load_tasks(config, base_dir=Path.cwd()))
    except DatasetError as error:
        raise SystemExit(f"{error}. Or use --from FILE") from None


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    print(f"{path}: {count} rows", file=sys.stderr)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sums", "gsm8k", "reasoning-gym"))
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "data", help="output directory")
    parser.add_argument("--from", dest="source", type=Path, help="gsm8k: a JSONL file")
    parser.add_argument("--hub", help="gsm8k: a dataset on the hub, or a local dataset directory")
    parser.add_argument("--subset", help="gsm8k: subset of the dataset on the hub (openai/gsm8k: main)")
    parser.add_argument("--split", default="train")
    parser.add_argument("--dataset", default="chain_sum", help="reasoning-gym: name of the generator")
    parser.add_argument(
        "--count",
        type=positive,
        help="number of rows to write. Default: sums 9,600, reasoning-gym 500, gsm8k all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--right", type=float, default=0.4, help="sums: fraction of correct answers in the demonstrations"
    )
    args = parser.parse_args(argv)
    if args.what == "sums":
        args.to.mkdir(parents=True, exist_ok=True)
        path = args.to / "demonstrations.jsonl"
        sums.write_demonstrations(path, count=args.count or 9_600, right=args.right, seed=args.seed)
    elif args.what == "gsm8k":
        if (args.source is None) == (args.hub is None):
            parser.error("gsm8k: set exactly one of --from FILE and --hub NAME")
        subset = args.subset or ("main" if args.hub == "openai/gsm8k" else None)
        lines = hub_rows(args.hub, args.split, subset=subset) if args.hub else file_rows(args.source)
        chosen = itertools.islice(gsm8k_rows(lines, split=args.split), args.count)
        write(args.to / f"gsm8k-{args.split}.jsonl", chosen)
    else:
        rows = reasoning_gym_rows(args.dataset, args.count or 500, seed=args.seed, split=args.split)
        write(args.to / f"{args.dataset}-{args.split}.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
