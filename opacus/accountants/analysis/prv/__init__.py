"""Privacy random variables: composing steps by convolving the distribution of the privacy loss.

After Gopi, Lee and Wutschitz 2021 ("Numerical Composition of Differential Privacy"). One thing differs: a step is
put on the mesh so that the result is an upper bound by construction (see `discretize`), where the paper
preserves the mean and adds an error bound; the mesh can then be chosen by accuracy alone, and stays small.
"""

from opacus.accountants.analysis.prv.compose import MeshTooLargeError, compose_heterogeneous
from opacus.accountants.analysis.prv.domain import Domain, compute_safe_domain_size
from opacus.accountants.analysis.prv.epsilon import CannotAnswerError, composed_epsilon
from opacus.accountants.analysis.prv.prvs import (
    DiscretePRV,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    discretize,
)

__all__ = [
    "CannotAnswerError",
    "DiscretePRV",
    "Domain",
    "MeshTooLargeError",
    "PoissonSubsampledGaussianPRV",
    "TruncatedPrivacyRandomVariable",
    "compose_heterogeneous",
    "composed_epsilon",
    "compute_safe_domain_size",
    "discretize",
]
