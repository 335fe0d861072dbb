"""Your own training loop with a policy server of ours: every step is published, and completions carry its version.

rollbook policy serve --model models/smollm2 --port 8000
python examples/06_trl/own_trainer.py --model models/smollm2 --url http://127.0.0.1:8000
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from rollbook import SyncWeightTransferClient
from rollbook.access.tokens import read_token, user_token_file

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="the directory that the server loaded")
parser.add_argument("--url", required=True)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
with SyncWeightTransferClient([args.url], token=read_token(user_token_file())) as weights:
    for _ in range(args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (1, 16))
        optimizer.zero_grad()
        torch.autograd.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        weights.pause()
        print("version", weights.update(model.named_parameters()))
        weights.resume()
