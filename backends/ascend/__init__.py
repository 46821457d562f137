"""Huawei Ascend A2/A3 backend: kernel text in the tilelang-ascend DSL, run on an NPU or in a CPU simulator."""

from .runtime import Device, Simulated

simulated = Simulated()
device = Device()

__all__ = ["device", "simulated"]
