"""CPU simulation of emitted Ascend kernels: the vendor's instruction models, with real threads and real flags."""

from .build import SimKernel, load
from .run import SimReport, SimulationError

__all__ = ["SimKernel", "SimReport", "SimulationError", "load"]
