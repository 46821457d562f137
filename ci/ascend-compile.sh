#!/usr/bin/env bash
# Job `ascend-compile`, made for a hosted arm64 runner, where the compiler's wheel installs directly; on x86-64 it runs
# under emulation. Every kernel of the matrix is lowered to both targets and simulated.
set -euo pipefail
cd "$(dirname "$0")/.."
make sim
.venv/bin/python -m pytest -m sim
