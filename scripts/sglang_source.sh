#!/bin/sh
# The source of SGLang without its dependencies (they need CUDA), for tests/conformance/test_inference_sglang.py.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m pip install --quiet --upgrade --no-deps --target .venvs/sglang sglang==0.5.23
