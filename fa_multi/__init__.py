"""fa_multi: attention kernels for NVIDIA GPUs and Huawei Ascend NPUs from one tile program."""

from .api import attention, lower, supports, unavailable

__version__ = "0.1.0"
__all__ = ["attention", "lower", "supports", "unavailable"]
