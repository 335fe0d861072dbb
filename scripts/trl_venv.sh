#!/bin/sh
# A virtual environment with the real TRL beside this package, for the tests that run its AsyncGRPOTrainer on our parts.
# torch first and alone: any looser request would fetch gigabytes of GPU libraries onto a machine without a GPU.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/trl/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/trl
.venvs/trl/bin/python -m pip install --quiet torch==2.13.0
.venvs/trl/bin/python -m pip install --quiet --constraint constraints.txt 'trl==1.16.*' requests --editable '.[rollout,train]'
