"""Which cases of a test with several parameters run every day."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch


def every_pair(*values: Sequence[Any]) -> list[Any]:
    """All combinations of three or more parameters; on a CPU every other one is slow.

    Those that are left hold each value of a parameter beside each value of any other, which is what
    goes wrong. Kernels are interpreted on a CPU; a GPU takes no time for all of them.
    """
    assert len(values) > 2
    assert all(len(some) > 1 for some in values)
    is_fast, cases = torch.cuda.is_available(), []
    for places in product(*(range(len(some)) for some in values)):
        case = (some[place] for some, place in zip(values, places, strict=True))
        is_left = is_fast or sum(places) % 2 == 0
        cases.append(pytest.param(*case, marks=[] if is_left else [pytest.mark.slow]))
    return cases
