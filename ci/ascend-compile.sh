#!/usr/bin/env bash
# Job `ascend-compile`, made for a hosted arm64 runner, where the compiler's wheel installs directly; on x86-64 it runs
# under emulation. The kernels of the matrix are lowered and simulated, and some of each kind lowered to ascendc too.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -m)" = aarch64 ]; then
  make env
  # Without its declared requirements, which include torch_npu: lowering needs none of them but these.
  .venv/bin/python -m pip install -q --no-deps tilelang-ascend==0.1.4
  .venv/bin/python -m pip install -q attrs cloudpickle decorator ml_dtypes psutil scipy tornado tqdm typing_extensions
fi
make sim
.venv/bin/python -m pytest -m sim -n 2 --dist worksteal
