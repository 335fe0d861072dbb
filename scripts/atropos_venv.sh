#!/bin/sh
# Creates a virtual environment with the original atroposlib, for the benchmark and the compatibility tests.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/atropos/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/atropos
.venvs/atropos/bin/python -m pip install --quiet atroposlib==0.4.0
