#!/bin/sh
# Triton in a folder of its own, for its interpreter (`make test-kernels`): no other test finds it.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m pip install --quiet --upgrade --no-deps --target .venvs/triton triton==3.9.0
