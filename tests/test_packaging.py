"""The wheel holds everything: built, unpacked into a clean environment, imported, used."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

USE = """
import importlib, pathlib, sys, torch, fa_multi
home = pathlib.Path(sys.argv[1]).resolve()
names = ["", ".backends", ".backends.cpu", ".backends.cuda", ".backends.ascend", ".backends.ascend.simulator", ".cli"]
for name in names:
    module = importlib.import_module("fa_multi" + name)
    assert home in pathlib.Path(module.__file__).resolve().parents, (name, module.__file__)
q = torch.ones(1, 3, 2, 64, dtype=torch.bfloat16)
assert torch.equal(fa_multi.attention(q, q, q), q)
for device in ("cuda", "npu"):
    assert fa_multi.lower(q, q, q, device=device).source
"""


def test_wheel_imports_from_a_clean_environment(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(purelib)
    # torch comes from here; an editable install is not seen this way, since .pth files on PYTHONPATH are not read
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    subprocess.run([python, "-c", USE, purelib], check=True, cwd=tmp_path, env=env)
