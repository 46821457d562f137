#!/usr/bin/env bash
# Job `npu`, on a self-hosted runner with an Ascend A2 or A3 NPU, CANN, and an environment made with
# `pip install -e ".[npu,test]"`. Never run by us: we have no NPU.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" -m pytest -m npu
