"""EAGLE-3: a head over fused states of several target layers, with a vocabulary of its own.

Paper: arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping

from hunch.config import read_options
from hunch.drafting.base import DrafterContext
from hunch.drafting.feature import FeatureDrafter
from hunch.drafting.options import GrowOptions
from hunch.errors import ConfigError
from hunch.models.heads.eagle3 import load_eagle3


class Eagle3Drafter(FeatureDrafter):
    """eagle3:PATH[:KEY=VALUE]..."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        if path is None:
            raise ConfigError("speculate='eagle3' needs a head: eagle3:PATH")
        net = load_eagle3(path, context.target)
        super().__init__("eagle3", net, read_options(GrowOptions, options, "eagle3"), context)
        self.watch.spare(path)
