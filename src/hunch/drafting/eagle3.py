"""EAGLE-3: a head over fused states of several target layers, with a vocabulary of its own.

Paper: arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping

from hunch.config import read_options
from hunch.drafting.base import DrafterContext
from hunch.drafting.feature import FeatureDrafter
from hunch.drafting.options import GrowOptions, need_path
from hunch.models.heads.eagle3 import load_eagle3


class Eagle3Drafter(FeatureDrafter):
    """eagle3:PATH[:KEY=VALUE]..."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        net = load_eagle3(need_path("eagle3", path), context.target)
        super().__init__("eagle3", net, read_options(GrowOptions, options, "eagle3"), context)
