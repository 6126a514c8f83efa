"""MTP: the layer that models with multi-token prediction bring along, used as their drafter.

Paper: arXiv 2412.19437 (DeepSeek-V3); MiMo and Qwen3-Next have their own forms of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hunch.config import read_options
from hunch.drafting.base import DrafterContext
from hunch.drafting.feature import FeatureDrafter
from hunch.drafting.options import GrowOptions, need_path
from hunch.models.heads.mtp import load_mtp


class MtpDrafter(FeatureDrafter):
    """mtp:PATH[:KEY=VALUE]...; the path may be the target's own directory."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        net = load_mtp(need_path("mtp", path), context.target)
        super().__init__("mtp", net, read_options(GrowOptions, options, "mtp"), context)
