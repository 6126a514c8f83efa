"""EAGLE-1 and EAGLE-2: a one-layer head that continues the target's last hidden state.

EAGLE-2 is the same head with a dynamic tree: eagle:PATH:tree=dynamic.
Papers: arXiv 2401.15077, 2406.16858.
"""

from __future__ import annotations

from collections.abc import Mapping

from hunch.config import read_options
from hunch.drafting.base import DrafterContext
from hunch.drafting.feature import FeatureDrafter
from hunch.drafting.options import GrowOptions, need_path
from hunch.models.heads.eagle import load_eagle


class EagleDrafter(FeatureDrafter):
    """eagle:PATH[:KEY=VALUE]..."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        net = load_eagle(need_path("eagle", path), context.target)
        super().__init__("eagle", net, read_options(GrowOptions, options, "eagle"), context)
