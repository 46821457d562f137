"""Just enough of torch for tilelang-ascend to import and lower: the real one is never used by lowering.

Only on the path of the emulated arm64 interpreter.
"""

import sys
import types

_DTYPES = """float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 bool uint16 uint32 uint64
float8_e4m3fn float8_e5m2 half float double long int short complex64 complex128
float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"""

__version__ = "2.9.1"
__path__: list[str] = []


class dtype:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return "torch." + self.name


class Tensor:
    pass


class device:
    def __init__(self, *args):
        pass


class _Namespace(types.ModuleType):
    """A module whose every attribute is again such a module, and callable."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Namespace(self.__name__ + "." + name)

    def __call__(self, *args, **kwargs):
        return _Namespace("call")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return sys.modules.setdefault("torch." + name, _Namespace("torch." + name))


for _name in _DTYPES.split():
    globals()[_name] = dtype(_name)
for _name in (
    "utils",
    "utils.dlpack",
    "utils.cpp_extension",
    "nn",
    "nn.functional",
    "cuda",
    "distributed",
    "backends",
    "testing",
    "npu",
):
    sys.modules["torch." + _name] = _Namespace("torch." + _name)

npu = sys.modules["torch.npu"]  # tilelang-ascend asks for a device at import and wants a real bool and a real name
npu.is_available = lambda: True
npu.current_device = lambda: 0
npu.get_device_name = lambda *args: "Ascend910B3"
cuda = sys.modules["torch.cuda"]
cuda.is_available = lambda: False
