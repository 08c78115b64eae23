"""Accountants by name."""

from __future__ import annotations

from opacus.accountants.accountant import IAccountant
from opacus.accountants.gdp import GaussianAccountant
from opacus.accountants.pld import PLDAccountant
from opacus.accountants.prv import PRVAccountant
from opacus.accountants.rdp import RDPAccountant
from opacus.errors import raise_if_any

__all__ = ["create_accountant", "register_accountant"]

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    "rdp": RDPAccountant,
    "gdp": GaussianAccountant,
    "prv": PRVAccountant,
    "pld": PLDAccountant,
}


def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Make an accountant available under a name.

    Args:
        mechanism: the name, as `create_accountant` and `PrivacyEngine(accountant=...)` take it.
        accountant: the class (or a function without arguments) that creates it.
        force: replace an accountant of that name.

    Raises:
        ConfigurationError: if the name is taken and `force` is False.
    """
    problems = []
    if mechanism in _ACCOUNTANTS and not force:
        problems.append(f"mechanism {mechanism!r} is registered already; pass force=True to replace it.")
    if not callable(accountant):
        problems.append(f"accountant is {accountant!r}; pass a class derived from IAccountant.")
    raise_if_any("the accountant cannot be registered", problems)
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> IAccountant:
    """A new accountant with an empty history.

    Args:
        mechanism: a registered name: ``"rdp"``, ``"gdp"``, ``"prv"``, ``"pld"`` or your own.

    Raises:
        ConfigurationError: if no accountant has that name, listing those that exist.

    Example:
        >>> create_accountant("rdp").mechanism()
        'rdp'
    """
    problems = []
    if mechanism not in _ACCOUNTANTS:
        known = ", ".join(repr(name) for name in _ACCOUNTANTS)
        problems.append(f"mechanism {mechanism!r} is not registered; choose one of {known}.")
    raise_if_any("no accountant can be created", problems)
    return _ACCOUNTANTS[mechanism]()
