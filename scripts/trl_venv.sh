#!/bin/sh
# Creates a virtual environment with TRL and this package, for the tests of AsyncGRPOTrainer with our parts.
# torch is installed first, with an exact version: any other request downloads gigabytes of GPU libraries.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/trl/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/trl
.venvs/trl/bin/python -m pip install --quiet torch==2.13.0
.venvs/trl/bin/python -m pip install --quiet --constraint constraints.txt 'trl==1.16.*' requests --editable '.[rollout,train]'
