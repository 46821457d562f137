"""fa_multi: attention kernels for NVIDIA GPUs and Huawei Ascend NPUs from one tile program."""

from . import ops as ops  # importing it registers the torch operators
from .api import (
    attention,
    attention_paged,
    attention_varlen,
    lower,
    merge_state_list,
    merge_states,
    supports,
    unavailable,
)

__version__ = "0.1.0"
__all__ = [
    "attention",
    "attention_paged",
    "attention_varlen",
    "lower",
    "merge_state_list",
    "merge_states",
    "supports",
    "unavailable",
]
