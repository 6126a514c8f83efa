"""EAGLE and MTP: a small network that continues the target's own hidden states.

EAGLE-1 continues the last state with one decoder layer; EAGLE-2 is the same head with a dynamic
tree (eagle:PATH:tree=dynamic); EAGLE-3 fuses states of several target layers and has a vocabulary
of its own; MTP uses the layer that models with multi-token prediction bring along. They differ in
their networks alone (models/heads); feature.py drafts with them.
Papers: arXiv 2401.15077, 2406.16858, 2503.01840, 2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hunch.config import read_options
from hunch.drafting.base import DrafterContext, Options
from hunch.drafting.feature import FeatureDrafter
from hunch.drafting.options import GrowOptions, need_path
from hunch.models.heads.eagle import load_eagle, load_eagle3
from hunch.models.heads.mtp import load_mtp
from hunch.models.heads.step import StepNet


class _HeadDrafter(FeatureDrafter):
    """NAME:PATH[:KEY=VALUE]..."""

    method: str
    load: Callable[[str, Any], StepNet]

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        net = type(self).load(need_path(self.method, path), context.target)
        given = read_options(GrowOptions, options, self.method)
        super().__init__(self.method, net, given, context)


class EagleDrafter(_HeadDrafter):
    """EAGLE-1 and EAGLE-2."""

    method, load = "eagle", staticmethod(load_eagle)


class Eagle3Drafter(_HeadDrafter):
    """EAGLE-3 and EAGLE-3.1."""

    method, load = "eagle3", staticmethod(load_eagle3)


class MtpDrafter(_HeadDrafter):
    """MTP; the path is often the target's own directory."""

    method, load = "mtp", staticmethod(load_mtp)
