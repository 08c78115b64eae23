"""Train PyTorch models with differential privacy, on one device or spread over many.

An independent implementation of the public interface of Opacus 1.6.0.
"""

from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.privacy_engine import PrivacyEngine
from opacus.version import __version__

__all__ = ["GradSampleModule", "GradSampleModuleFastGradientClipping", "PrivacyEngine", "__version__"]
