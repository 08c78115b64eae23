"""Whether a checkpoint tells which records, as the model sees them, its next steps would have: where they are made with random numbers.

A resumed step draws the noise of the step that it repeats. That is one release where the sums are the same, and an open door where
they are not: the difference of the two has no noise. Checkpoints do not keep the states of a data set's or a collate function's own
generators, nor those of worker processes; those of the default generators the trainer puts back when the first batch was made already.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from typing import Any

from opacus.integrations.hf.collation import collated, equal_batches
from opacus.integrations.hf.looked_mode import drawn_states, same_states
from opacus.integrations.hf.own_generators import own_generators, seed_default_generators
from opacus.testing.undisturbed import same_randomness

__all__ = ["randomness_of_records"]

_DRAWN = 8  # records


def randomness_of_records(loader: Any, resumes: bool) -> str:
    """What the randomness in records follows from, besides what checkpoints keep: the same text only where it is the same.

    Args:
        loader: a private trainer's. A few records are read and collated twice; generators go on as if they had not been.
        resumes: whether a checkpoint's training goes on.

    Returns:
        Empty where records are not random, or drawn from the default generators from the start; a text of its own for every call
        where nothing tells what will be drawn.
    """
    data, collate = loader.dataset, loader.collate_fn.collate
    numbers = random.Random(0).sample(range(len(data)), min(_DRAWN, len(data)))

    def draw() -> tuple[dict[str, Any], bool, list[Any], list[Any]]:
        with same_randomness(set()), own_generators(data) as of_data, own_generators(collate) as of_collate:
            seed_default_generators(0)
            defaults, before = drawn_states(set()), [*of_data(), *of_collate()]
            batch = collated(collate, [data[i] for i in numbers])
            drawn = not same_states(defaults, drawn_states(set()))
            return batch, drawn, before, [*of_data(), *of_collate()]

    batch, drawn, before, after = draw()
    again = draw()[0]
    if not equal_batches(batch, again) or (resumes and (before != after or drawn)):
        return secrets.token_hex(16)
    return "" if before == after else hashlib.sha256(repr(after).encode()).hexdigest()
