"""The compiler worker: lowers tilelang-ascend kernel text to Ascend C++ text. No CANN, no NPU, no torch.

Started by `compiler.py`, in the emulated arm64 interpreter on x86-64 or in the running one on aarch64. Importing the
compiler takes seconds under emulation and one kernel about one second, so one process serves many kernels.

Protocol, one JSON object a line. First line out: {"ready": version}. Then, per request line in
  {"source": text, "builder": name, "target": "pto"|"ascendc", "platform": "A2", "pass_configs": {...}}
one line out: {"ok": C++ text} or {"error": one line, "trace": text}. `builder` names the module-level function, without
arguments, that returns a T.prim_func. A crash of the compiler ends this process; the parent reports it.
"""

import importlib.util
import json
import os
import sys
import tempfile
import traceback
import types


class _AnyMeta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **kwargs):
        return lambda f: f


class _Any(metaclass=_AnyMeta):
    """Stands for any class, function or decorator of a module that lowering never calls."""


class _Unused(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


def _skip_unused_modules():
    """Two thirds of the import time go into modules that lowering never calls; the text is identical without them."""
    for name in (
        "tvm.relay",
        "tvm.relay.backend",
        "tvm.relay.frontend",
        "tvm.relay.op",
        "tvm.topi",
        "tvm.topi.utils",
        "tvm.relax",
        "tvm.relax.dpl",
        "tvm.relax.expr",
        "tvm.relax.expr_functor",
    ):
        sys.modules[name] = _Unused(name)
    adapter = types.ModuleType("tilelang.jit.adapter.cython")  # would compile C at import
    adapter.CythonKernelAdapter = type("CythonKernelAdapter", (), {})
    sys.modules["tilelang.jit.adapter.cython"] = adapter


def _lower(tilelang, tvm, request, folder, number):
    path = os.path.join(folder, f"kernel_{number}.py")  # a real file: the parser reads the source back
    with open(path, "w", encoding="utf-8") as f:
        f.write(request["source"])
    spec = importlib.util.spec_from_file_location(f"kernel_{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    func = getattr(module, request["builder"])()
    with tvm.transform.PassContext(opt_level=3, config=request.get("pass_configs") or {}):
        artifact = tilelang.lower(func, target=request["target"], platform=request["platform"])
    return artifact.kernel_source


def main():
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the compiler prints goes to the log, never between the answers
    sys.stdout = sys.stderr
    os.environ.setdefault("TL_PLATFORM", "A2")
    _skip_unused_modules()
    import tilelang
    from tilelang import tvm

    def answer(message):
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"ready": tilelang.__version__})
    with tempfile.TemporaryDirectory(prefix="fa_multi_lower_") as folder:
        for number, line in enumerate(sys.stdin):
            try:
                answer({"ok": _lower(tilelang, tvm, json.loads(line), folder, number)})
            except Exception as e:  # a compiler error is an answer, not the end of the process
                answer({"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()[-6000:]})


if __name__ == "__main__":
    main()
