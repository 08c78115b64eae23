"""Privacy accountants: how much privacy a run of DP-SGD has spent.

Every accountant keeps the history of the run (noise multiplier, sample rate, steps) and turns it into an
(epsilon, delta) statement. What is stated is always about Poisson sampled batches and neighbouring data sets
that differ by one added or removed sample. Importing this package loads neither scipy nor torch.
"""

from opacus.accountants.accountant import IAccountant
from opacus.accountants.gdp import GaussianAccountant
from opacus.accountants.pld import PLDAccountant
from opacus.accountants.prv import PRVAccountant
from opacus.accountants.rdp import RDPAccountant
from opacus.accountants.registry import create_accountant, register_accountant
from opacus.accountants.utils import get_noise_multiplier

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PLDAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "get_noise_multiplier",
    "register_accountant",
]
