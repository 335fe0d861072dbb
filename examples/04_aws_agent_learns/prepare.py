"""Demonstrations, a tokenizer trained on them, and a small model with random weights: everything `sft.toml` needs.

    python examples/04_aws_agent_learns/prepare.py --to runs/aws-agent

The reference solutions are played in real clouds (simulators), so the demonstrations hold what the commands really print, and only
tasks that were really solved are shown.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import small_aws
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Pieces
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollbook.concurrency.deadline import Deadline
from rollbook.envs.awscli.environment import AwsCliWorld
from rollbook.envs.awscli.solution import ReferencePolicy
from rollbook.envs.awscli.verification import filled
from rollbook.telemetry.events import EventLog

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<agent>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<agent>{{ m.content }}<eos>{% else %}"
    "<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
)
POLITE = ("", "Please: ", "Your job: ", "Now: ")
"""Other ways to begin a goal: what is copied must not depend on where it stands."""


async def play(rows: Sequence[dict[str, Any]], clouds: int) -> list[list[dict[str, str]]]:
    """The chats of the solved ones."""
    chats: list[list[dict[str, str]]] = []
    waiting = list(reversed(rows))
    async with AwsCliWorld.open_pool(size=clouds, log=EventLog("prepare"), args={"base_port": 0}) as pool:

        async def work() -> None:
            while waiting:
                row = waiting.pop()
                world = await pool.acquire(Deadline(120, "a cloud"))
                try:
                    chat = await _one(world, row)
                finally:
                    await world.close()
                if chat is not None:
                    chats.append(chat)
                if len(chats) % 50 == 0:
                    print(f"{len(chats)} demonstrations, {len(waiting)} tasks to go", file=sys.stderr, flush=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(clouds):
                group.create_task(work())
    return chats


async def _one(world: Any, row: dict[str, Any]) -> list[dict[str, str]] | None:
    policy = ReferencePolicy(row)
    seen = await world.reset(row)
    chat = [{"role": "user", "content": small_aws.goal_of(seen.text)}]
    while not seen.done:
        line = policy.next_line(seen)
        if line is None:
            return None
        chat.append({"role": "assistant", "content": line})
        seen = await world.step(line)
        if not seen.done:
            chat.append({"role": "user", "content": small_aws.seen_by_agent(seen.text)})
    return chat if seen.solved else None


def written(count: int, *, seed: int) -> list[list[dict[str, str]]]:
    """Demonstrations of one command each, written down without playing them: their kinds were checked in a cloud."""
    chats = []
    for task, names, _ in small_aws.instances("train", count, seed=seed, kinds=small_aws.BEGINNER):
        goal, line = str(filled(task.goal, names)), str(filled(task.solution[0].run, names))
        assert len(task.solution) == 1, f"{task.id} takes more than one command"
        chats.append([{"role": "user", "content": goal}, {"role": "assistant", "content": line}])
    return chats


def train_tokenizer(chats: Sequence[Sequence[dict[str, str]]], *, vocab_size: int) -> Any:
    """Words of names become tokens of their own: copying a name is then copying a few tokens."""
    core = Tokenizer(BPE(unk_token="<unk>"))
    pieces = Regex(r" ?[A-Za-z]+|-+|[0-9]|[^A-Za-z0-9]")
    core.pre_tokenizer = Pieces([Split(pieces, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    texts = [message["content"] for chat in chats for message in chat]
    # Every word of a name in both forms, after a space and after a sign.
    texts += [f"{word} {word}" for word in small_aws.WORDS for _ in range(50)]
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<agent>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, *, hidden: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/aws-agent"))
    parser.add_argument("--each", type=int, default=40, help="warm-up: tasks of each kind, played in a cloud")
    parser.add_argument("--checked", type=int, default=2, help="beginner: tasks of each kind, played in a cloud")
    parser.add_argument("--written", type=int, default=110, help="beginner: more of each kind, written down only")
    parser.add_argument("--clouds", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=900)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    rows = list(small_aws.tasks("train", args.each, seed=args.seed, kinds=small_aws.WARM_UP))
    rows += small_aws.tasks("train", args.checked, seed=args.seed, kinds=small_aws.BEGINNER)
    random.Random(0).shuffle(rows)
    chats = asyncio.run(play(rows, args.clouds))
    chats += written(args.written, seed=args.seed + 1)
    rng = random.Random(1)
    with (args.to / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
        for chat in chats:
            first = {**chat[0], "content": rng.choice(POLITE) + chat[0]["content"]}
            file.write(json.dumps({"messages": [first, *chat[1:]]}) + "\n")
    tokenizer = train_tokenizer(chats, vocab_size=args.vocab)
    tokenizer.save_pretrained(str(args.to / "model"))
    model = make_model(tokenizer, hidden=args.hidden, layers=args.layers, seed=args.seed)
    model.save_pretrained(str(args.to / "model"))
    print(
        f"{len(chats)} demonstrations, {model.num_parameters():,} parameters",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
