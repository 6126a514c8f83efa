"""The drafters that could be trained: methods, how they grow, and sizes to consider."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hunch.errors import ConfigError, UnsupportedModelError
from hunch.models.spec import ModelSpec
from hunch.registry import RECIPES, resolve
from hunch.train.costs import Costs

MAX_NODES = 8  # of the chains that are considered
MAX_SHARE = 0.5  # of a target's layers that a drafter may have
BLOCK = 7  # tokens that a block drafter guesses in one pass
COLUMNS = (2048, 4096, 8192, 16384, 32768, 65536)
LAYERS = (1, 2, 3, 4, 6, 8, 10, 12)
UNITS = (1.0, 0.5, 0.25, 0.125)  # shares of a layer's units that are considered
ABREAST = (1, 2, 3, 4)  # layers of the target side by side in each of a draft's


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a recipe's networks grow, and how good they get."""

    best: Callable[[float], float]  # chance of a guess by layers, trained to the end
    extra: float = 0.0  # layers that its other parts cost, per node
    is_sequential: bool = True  # a pass per node; else one for all
    depth: int = MAX_NODES  # of its drafts
    passes: int = 1  # of the network over a text in training
    features: int = 0  # states of the target that it reads
    has_trees: bool = False  # on a GPU, beside chains
    layers: tuple[int, ...] = LAYERS


METHODS = {
    "draft": Method(best=lambda layers: 0.75 * (1 - 0.41 / layers**1.31), has_trees=True),
    "block": Method(
        best=lambda layers: 0.62 * (1 - 0.25 / layers),
        extra=1.0,
        is_sequential=False,
        depth=BLOCK,
        passes=2,
        features=5,
        layers=(2, 3, 4),
    ),
    "eagle3": Method(
        best=lambda layers: 0.6 * (1 - 0.2 / layers),
        extra=0.5,
        depth=5,
        passes=5,
        features=3,
        layers=(1, 2, 3),
    ),
    "medusa": Method(
        best=lambda layers: 0.31, is_sequential=False, depth=4, passes=4, features=1, layers=(1,)
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A drafter that could be trained."""

    method: str
    layers: int
    columns: int
    units: float = 1.0  # share of the units that a layer keeps
    abreast: int = 1  # layers of the target that each holds side by side
    cut_from: str = ""  # another model than the target

    def text(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        if self.cut_from:
            layers += f" of {Path(self.cut_from).name}"
        if self.units < 1:
            layers += f" with {self.units:.1%} of the target's units"
        if self.abreast > 1:
            whose = "its" if self.cut_from else "the target's"
            layers += f", each with {self.abreast} of {whose} side by side"
        return f"{self.method} of {layers}, guessing among {self.columns:,} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Smaller:
    """A smaller model of the target's family that drafts can be cut from."""

    name: str
    spec: ModelSpec
    costs: Costs  # of its cuts, beside the target
    agrees: float  # share of the target's own tokens that it would choose too
    num_known: int  # of the target's tokens


@dataclass(frozen=True, slots=True)
class Ground:
    """A target on a device, and its costs there, by which drafters are compared."""

    costs: Costs
    spec: ModelSpec
    device: str  # "cuda" or "cpu"
    smaller: Smaller | None = None  # that drafts may be cut from too

    def parts(self, size: Size) -> tuple[Costs, ModelSpec]:
        """Costs and shape of the model that a drafter is cut from."""
        if not size.cut_from:
            return self.costs, self.spec
        assert self.smaller is not None
        return self.smaller.costs, self.smaller.spec


def sizes_for(
    spec: ModelSpec,
    methods: Iterable[str] = METHODS,
    *,
    can_lose_units: bool = False,
    can_stand_abreast: bool = False,
) -> list[Size]:
    """Every drafter that is considered for a target."""
    columns = [*(c for c in COLUMNS if c < spec.vocab_size), spec.vocab_size]
    most = max(int(spec.num_layers * MAX_SHARE), 1)
    found = []
    for method in methods:
        shares = UNITS if can_lose_units and method in ("draft", "block") else UNITS[:1]
        sides = ABREAST if can_stand_abreast and method == "draft" else ABREAST[:1]
        found += [
            Size(method=method, layers=layers, columns=count, units=units, abreast=abreast)
            for layers in METHODS[method].layers
            for count in columns
            for units in shares
            for abreast in sides
            if layers <= most and layers * abreast < max(spec.num_layers, 2)
        ]
    return found


def possible(spec: ModelSpec) -> list[str]:
    """Methods whose networks can be built beside the target."""
    found = []
    for name in METHODS:
        recipe = resolve(RECIPES, name)
        try:
            recipe.check(recipe.options(), spec)
        except (ConfigError, UnsupportedModelError):
            continue
        found.append(name)
    return found


def sizes_from(smaller: Smaller) -> list[Size]:
    """Every draft of a smaller model that is considered: up to all of its layers."""
    columns = [*(c for c in COLUMNS if c < smaller.num_known), smaller.num_known]
    most = smaller.spec.num_layers
    return [
        Size(method="draft", layers=n, columns=count, abreast=abreast, cut_from=smaller.name)
        for n in sorted({*METHODS["draft"].layers, most})
        for count in columns
        for abreast in (ABREAST if smaller.costs.per_abreast > 0 else (1,))
        if n * abreast <= most
    ]
