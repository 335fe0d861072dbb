"""Writes the data of this example as JSONL.

python prepare_data.py                                                  the sums; GSM8K too, if its files or the hub can be read
python prepare_data.py sums --to data                                   demonstrations of one-digit sums, for sft.toml
python prepare_data.py gsm8k --from train.jsonl --to data               rows of GSM8K from a file: question, answer with #### 72
python prepare_data.py gsm8k --hub openai/gsm8k --split test --to data  from the hub or a dataset directory (needs `datasets`)
python prepare_data.py reasoning-gym --dataset chain_sum --count 500 --to data     generated (needs `reasoning-gym`)

Without a name, GSM8K is read from `gsm8k/train.jsonl` and `gsm8k/test.jsonl` in the output directory, or downloaded from the hub.
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

HUB = "openai/gsm8k"
SPLITS = ("train", "test")


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
    # Read all rows first: no file is left behind if the source cannot be read.
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)} rows", file=sys.stderr)


def write_sums(args: argparse.Namespace) -> None:
    args.to.mkdir(parents=True, exist_ok=True)
    path = args.to / "demonstrations.jsonl"
    count = args.count or 9_600
    sums.write_demonstrations(path, count=count, right=args.right, seed=args.seed)
    print(f"{path}: {count} rows", file=sys.stderr)


def write_gsm8k(args: argparse.Namespace, split: str, *, source: Path | None, hub: str | None) -> None:
    if source is not None:
        lines = file_rows(source)
    else:
        lines = hub_rows(str(hub), split, subset=args.subset or ("main" if hub == HUB else None))
    write(args.to / f"gsm8k-{split}.jsonl", itertools.islice(gsm8k_rows(lines, split=split), args.count))


def write_all(args: argparse.Namespace) -> None:
    """The sums, and both splits of GSM8K where they can be read. The example on the sums does not need GSM8K."""
    write_sums(args)
    for split in SPLITS:
        file = args.to / "gsm8k" / f"{split}.jsonl"
        if file.is_file():
            write_gsm8k(args, split, source=file, hub=None)
            continue
        try:
            write_gsm8k(args, split, source=None, hub=HUB)
        except SystemExit as error:
            reason = str(error).splitlines()[0]
            print(
                f"GSM8K ({split}) is left out: there is no {file}, and the hub cannot be read ({reason})",
                file=sys.stderr,
            )
            return


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("sums", "gsm8k", "reasoning-gym"), help="default: sums and gsm8k")
    parser.add_argument(
        "--to", "--output-dir", type=Path, default=Path(__file__).parent / "data", help="output directory"
    )
    parser.add_argument("--from", dest="source", type=Path, help="gsm8k: a JSONL file")
    parser.add_argument("--hub", help="gsm8k: a dataset on the hub, or a local dataset directory")
    parser.add_argument("--subset", help="gsm8k: subset of the dataset on the hub (openai/gsm8k: main)")
    parser.add_argument("--split", default="train")
    parser.add_argument("--dataset", default="chain_sum", help="reasoning-gym: name of the generator")
    parser.add_argument(
        "--count",
        "--max-rows",
        type=positive,
        help="number of rows to write. Default: sums 9,600, reasoning-gym 500, gsm8k all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--right", type=float, default=0.4, help="sums: fraction of correct answers in the demonstrations"
    )
    args = parser.parse_args(argv)
    if args.what is None:
        write_all(args)
    elif args.what == "sums":
        write_sums(args)
    elif args.what == "gsm8k":
        if (args.source is None) == (args.hub is None):
            parser.error("gsm8k: set exactly one of --from FILE and --hub NAME")
        write_gsm8k(args, args.split, source=args.source, hub=args.hub)
    else:
        rows = reasoning_gym_rows(args.dataset, args.count or 500, seed=args.seed, split=args.split)
        write(args.to / f"{args.dataset}-{args.split}.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
