#!/usr/bin/env bash
# Job `gpu`, on a self-hosted runner with an NVIDIA GPU: the matrix twice with equal bits, and a subset under
# compute-sanitizer. PYTHON names an interpreter that already has a CUDA build of torch and tilelang; without it the
# job makes its own environment.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  make env
  PYTHON=.venv/bin/python
fi
"$PYTHON" -m pytest -m gpu
compute-sanitizer --tool memcheck --error-exitcode 1 "$PYTHON" -m pytest -m gpu tests/test_matrix.py -k "r129_r127 or empty_rows or gqa_7 or d40 or odd_stride"
