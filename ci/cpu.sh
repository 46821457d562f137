#!/usr/bin/env bash
# Job `cpu`: lint, types, and every test that runs without a device: the CPU lane, the CUDA kernels compiled (where nvcc
# is), the Ascend kernels compiled and simulated.
set -euo pipefail
cd "$(dirname "$0")/.."
make lint
make test
