"""NVIDIA backend: kernel text in the TileLang DSL, for compute capability 8.0 and later."""

from .runtime import CudaBackend

backend = CudaBackend()

__all__ = ["backend"]
