#!/usr/bin/env python3
"""The privacy that a run of DP-SGD spends, or the noise multiplier that a privacy budget asks for.

Examples:
    opacus-privacy --sample-rate 0.01 --noise-multiplier 1.0 --epochs 10 --delta 1e-5
    opacus-privacy -r 0.01 --target-epsilon 8 --steps 1000 -d 1e-5 --accountant prv --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from opacus.accountants.rdp import RDPAccountant
from opacus.accountants.registry import _ACCOUNTANTS, create_accountant
from opacus.accountants.utils import get_noise_multiplier, steps_of

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    summary, _, examples = (__doc__ or "").partition("Examples:")
    parser = argparse.ArgumentParser(
        prog="opacus-privacy",
        description=summary.strip(),
        epilog="examples:" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-r",
        "--sample-rate",
        type=float,
        required=True,
        help="batch size over data set size, above 0, up to 1",
    )
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument(
        "-n", "--noise-multiplier", type=float, help="standard deviation of the noise over the clipping norm"
    )
    goal.add_argument(
        "--target-epsilon", type=float, help="print the noise multiplier that spends this epsilon instead"
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("-e", "--epochs", type=float, help="passes over the data")
    length.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("-d", "--delta", type=float, default=1e-5, help="target delta (default: %(default)s)")
    parser.add_argument(
        "-a", "--accountant", choices=list(_ACCOUNTANTS), default="rdp", help="default: %(default)s"
    )
    parser.add_argument(
        "--alphas", type=float, nargs="+", help="Renyi orders to try, each above 1 (accountant rdp only)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments; those of the process if None.

    Returns:
        Exit status: 0, or 2 after a message on standard error that names what was wrong with the arguments.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_:  # argparse has printed its usage or help
        return exit_.code if isinstance(exit_.code, int) else 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = _answer(arguments)
        except ValueError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
    result["notes"] = list(dict.fromkeys(str(warning.message) for warning in caught))
    if arguments.json:
        # JSON has no infinity; null says that epsilon is unbounded.
        bounded = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        print(json.dumps(bounded))
    else:
        print(_text(result))
    return 0


def _answer(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.alphas is not None and arguments.accountant != "rdp":
        raise ValueError(f"--alphas is for accountant rdp, not {arguments.accountant}; leave it out.")
    options = {} if arguments.alphas is None else {"alphas": arguments.alphas}
    steps = steps_of(sample_rate=arguments.sample_rate, epochs=arguments.epochs, steps=arguments.steps)
    sigma = arguments.noise_multiplier
    if arguments.target_epsilon is not None:
        sigma = get_noise_multiplier(
            target_epsilon=arguments.target_epsilon,
            target_delta=arguments.delta,
            sample_rate=arguments.sample_rate,
            steps=steps,
            accountant=arguments.accountant,
            **options,
        )
    accountant = create_accountant(arguments.accountant)
    accountant.step(noise_multiplier=sigma, sample_rate=arguments.sample_rate)
    accountant.history = [(sigma, arguments.sample_rate, steps)]
    result = {
        "accountant": arguments.accountant,
        "sample_rate": arguments.sample_rate,
        "noise_multiplier": sigma,
        "steps": steps,
        "delta": arguments.delta,
        "epsilon": accountant.get_epsilon(arguments.delta, **options),
    }
    if isinstance(accountant, RDPAccountant):
        _, result["alpha"] = accountant.get_privacy_spent(delta=arguments.delta, **options)
    return result


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"DP-SGD with sample rate {result['sample_rate']:g} and noise multiplier {result['noise_multiplier']:.6g}, "
        f"for {result['steps']} steps,",
        f"satisfies differential privacy with epsilon = {result['epsilon']:.4g} and delta = {result['delta']:g}",
        f"(accountant {result['accountant']}, "
        + (f"order {result['alpha']:g}, " if "alpha" in result else "")
        + "one sample added or removed).",
    ]
    if result["accountant"] == "gdp":
        lines.append("note: the gdp accountant approximates; use rdp or prv for a guarantee.")
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


if __name__ == "__main__":
    sys.exit(main())
