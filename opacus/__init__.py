"""Train PyTorch models with differential privacy, on one device or spread over many."""

from opacus.version import __version__

__all__ = ["__version__"]
