"""The one interface a drafting method implements, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.acceptance import NETWORK_PRIORS
from hunch.drafting.common_words import NOTHING, common_successors
from hunch.drafting.costs import CostCurve
from hunch.drafting.step_shapes import (
    MAX_CHECKED,
    DraftSource,
    StepShape,
    levels_after,
    shapes_of,
    tree_levels,
)
from hunch.drafting.tree_shape import TreeShape
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.lookup import MAX_MATCH
from hunch.kernels.phrases import PhraseTable
from hunch.kernels.step import AS_OTHERS, RowState, StepRows
from hunch.kernels.successor_entries import Entries
from hunch.models.target import Hidden, Target
from hunch.sampling.state import SamplingState
from hunch.types import TextCodec

if TYPE_CHECKING:
    from hunch.kernels.gpu_grow import RowSampling  # these need Triton, which a CPU may not have
    from hunch.kernels.gpu_tiling import Tiling


Options = Mapping[str, str]  # of a method, as they were written
PREDICTION = "prediction"  # drafts from a request's prediction, beside every other method


def comes_with_hunch(path: str) -> bool:
    """Whether a drafter's files are part of the package; their card says what it gains."""
    return Path(path).is_relative_to(Path(__file__).parents[1])


class Drafter(Protocol):
    """Guesses ahead. It can only save time: the target decides every token."""

    needs: Needs

    def observe(self, step: TargetStep) -> None:
        """See what the target just processed and committed."""

    def propose(self, rows: Rows) -> Draft:
        """A tree per row of rows.ids_R, with 0 to rows.max_draft_X nodes each."""

    def forget(self, rows: list[int]) -> None:
        """Drop what is kept of these rows: their requests have left them, or go on without it.

        Other requests may get the rows. A request that goes on may be observed again later.
        """


@runtime_checkable
class Clears(Protocol):
    """A drafter that remembers something of requests that have ended."""

    def clear(self) -> None:
        """Forget all of it."""


@runtime_checkable
class TakesPhrases(Protocol):
    """A drafter that guesses from a phrase table, which may be replaced between two steps."""

    def take_phrases(self, table: PhraseTable) -> None: ...


@runtime_checkable
class GrowsLevels(Protocol):
    """A drafter whose network drafts level by level."""

    shape: TreeShape | None  # of its drafts; None: they are not grown
    is_adaptive: bool  # fewer levels, or none, if they do not pay


class Prepares(Protocol):
    """A drafter that guesses on while the target checks its last draft."""

    def prepare(self, rows: Rows, num_checked: list[int]) -> None:
        """The target now checks this many nodes of each row; rows do not change until `settle`."""

    def settle(self) -> None:
        """The rows are about to change."""


class DraftModel(Protocol):
    """A draft model on a device, and its KV."""

    @property
    def model(self) -> Target: ...

    @property
    def kv(self) -> KVCache: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMethod:
    """How a device drafts for a row whose request names one of the drafter's methods."""

    name: str
    sure_match: int = AS_OTHERS  # shortest match with which a lookup goes before the network
    min_match: int = 1
    max_match: int = MAX_MATCH
    has_table: bool = False  # its lookup uses the phrase table too
    is_alone: bool = False  # only the request's prediction drafts
    with_prediction: bool = True  # the request's prediction, if it has one, goes first
    by_network: bool | None = None  # the network drafts always, never, or (None) as for others


@dataclass(kw_only=True)
class DeviceDrafter:
    """Drafts by kernels alone, from rows on the device, so that a step can be captured.

    The defaults are those of a network that drafts chains and keeps no state between steps or, if
    it has no levels, of a lookup.
    """

    is_best_first: ClassVar[bool] = False  # its trees are, instead of growing level by level

    name: str
    num_levels: int = 0  # most levels of its network's drafts; 0: it has no network
    level_size: int = 1  # nodes of a level (in best-first trees on average); 1: drafts are chains
    tree_nodes: int = 0  # most nodes of its trees, the likeliest; 0: all that its levels have
    width: int = 1  # nodes of a level that get children (in best-first trees at most)
    branch: int = 1  # children considered per node
    least: float | None = None  # log of the least chance of a path that is drafted; None: any
    num_nodes: int = 0  # most nodes drafted; 0: num_levels times level_size, or tree_nodes
    longest_path: int = 0  # most tokens in a row that are drafted, by whatever; 0: all nodes
    is_adaptive: bool = True  # steps check fewer nodes, or none, if these do not pay
    margin: float = 0.0  # share by which checking nodes must beat plain decoding
    trained_len: int | None = None  # its network's context; None: no row gets longer
    max_len: int | None = None  # its network drafts for no row that may get longer; None: no limit
    methods: dict[str, RowMethod] = field(default_factory=dict)  # those that a request may name
    # How the tokens of its passes are divided, by rows and tokens of a row. Made before a capture,
    # as it is copied from the host.
    tilings: dict[tuple[int, int], Tiling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_levels = self.num_levels * self.level_size
        self.num_nodes = self.num_nodes or max(self.tree_nodes, of_levels)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The shapes its steps may have; if it is adaptive, one of them has no nodes."""
        if not self.num_levels:
            return shapes_of(DraftSource.LOOKUP, self.num_nodes, is_adaptive=self.is_adaptive)
        if self.tree_nodes:
            return shapes_of(DraftSource.TREE, self.tree_nodes, is_adaptive=self.is_adaptive)
        if self.level_size == 1:
            return shapes_of(DraftSource.CHAIN, self.num_levels, is_adaptive=self.is_adaptive)
        whole = StepShape(self.num_nodes, DraftSource.TREE)
        return (StepShape(0), whole) if self.is_adaptive else (whole,)

    @property
    def num_read(self) -> int:
        """Guesses of a step that the host reads, to learn from those of lookups."""
        return self.num_nodes

    @property
    def draft_model(self) -> DraftModel | None:
        """Its network, if that is a draft model: it reads tokens, so it can catch up on them.

        None: the network is a head, or there is none.
        """
        return None

    @property
    def priors(self) -> Mapping[DraftSource, tuple[float, float]]:
        """By source: how likely its network's first guess is right, and a further one after a
        right one, before anything was learned."""
        return NETWORK_PRIORS

    @property
    def max_network_rows(self) -> int:
        """The most rows of a step that its network drafts for."""
        return MAX_CHECKED

    @property
    def has_table(self) -> bool:
        """Whether its lookups use a table of the target's phrases too."""
        return False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states it drafts from."""
        return ()

    def see(self, ids_T: Tensor, slot_T: Tensor, logits_TV: Tensor) -> None:
        """Learn from the target's logits after every packed token of a step, before `draft`.

        slot_T: KV slots of the tokens; -1: padding.
        """

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        """Write a draft for each row of the step into its state, by kernels alone.

        hidden: the target's states of the step's packed tokens.
        source: one of those that its shapes name.
        """
        raise NotImplementedError

    def grow_levels(
        self,
        state: RowState,
        step: StepRows,
        sampling: RowSampling,
        logits_TC: Tensor,  # after each row's last token
        row_T: Tensor,  # the engine's row of each row of logits
        num_levels: int,
        *,
        ids_C: Tensor | None,  # the target's id of each column; None: the same
        inputs: Callable[[], tuple[Tensor, AttnInputs]],  # buffers of the pass after a level
        feed: Callable[[int, Tensor, AttnInputs], tuple[Tensor, Tensor]],  # that pass: logits, rows
        sees_next: bool = False,
    ) -> None:
        """Draft level by level; see `kernels.gpu_grow.grow_level`.

        Of a tree that may have more nodes than are checked, the likeliest are kept.
        """
        from hunch.kernels.gpu_graft import keep_likeliest
        from hunch.kernels.gpu_grow import grow_level

        num_grown = num_levels * self.level_size
        chances_RN = torch.empty(len(step.ids_R), num_grown, device=logits_TC.device)
        for level in range(num_levels):
            following = None if level + 1 == num_levels else inputs()
            grow_level(
                state, step, logits_TC, chances_RN, sampling, depth=level,
                level_size=self.level_size, row_T=row_T, ids_C=ids_C, following=following,
                sees_next=sees_next, branch=self.branch, least=self.least,
            )  # fmt: skip
            if following is not None:
                logits_TC, row_T = feed(level, *following)
        if self.tree_nodes and self.level_size > 1:
            keep_likeliest(
                state, step, chances_RN, level_size=self.level_size, most=self.tree_nodes,
                least=self.least,
            )  # fmt: skip

    def levels(self, source: int, num_nodes: int) -> int:
        """Levels that its network drafts in a step of this source that checks `num_nodes`."""
        if self.tree_nodes:
            return tree_levels(num_nodes or self.tree_nodes, self.num_levels)
        if self.level_size > 1:
            return self.num_levels
        return levels_after(num_nodes, self.num_levels)

    def num_beside(self, source: int, num_nodes: int) -> int:
        """How many of a step's `num_nodes` are a lookup's guesses beside its network's draft."""
        return 0

    def depth(self, source: int) -> int:
        """Depth of the trees that it drafts as this source; 0: chains."""
        has_trees = self.tree_nodes > 0 or self.level_size > 1
        return self.num_levels if has_trees and source == DraftSource.TREE else 0

    @property
    def past_end(self) -> int:
        """Slots past a row's end that its trees may take: they have more nodes than levels."""
        has_trees = any(self.depth(shape.source) for shape in self.shapes if shape.source > 0)
        return self.num_nodes if has_trees else 0

    def runs_in(self, source: int) -> bool:
        """Whether its `draft` or its `see` does anything in a step of this source."""
        return source > 0 if self.num_levels else source != DraftSource.NOBODY

    def sees_in(self, source: int) -> bool:
        """Whether its `see` does anything in a step of this source."""
        return self.runs_in(source)

    def drafts_in(self, source: int) -> bool:
        """Whether its `draft` does anything in a step of this source."""
        return self.runs_in(source)

    def writes_kv(self, source: int) -> bool:
        """Whether a step of this source also writes the drafter's KV of all known tokens."""
        return False

    @property
    def host_observes(self) -> bool:
        """Whether the host's drafter must observe prompts, and steps that the host runs."""
        return False

    @property
    def needed_group(self) -> int | None:
        """The KV group that must have all of a row but its last token; else it cannot draft.

        None: it needs none.
        """
        return None

    def drafted_by(self, source: int, matched: int) -> str:
        """The method that made a draft of this source, after a lookup's match of this length.

        A merged tree counts as a whole for one of its two methods.
        """
        return self.name


@runtime_checkable
class WorksOnDevice(Protocol):
    """A drafter that also has a device form."""

    def on_device(self) -> DeviceDrafter | None:
        """The device form; None: there is none with these options."""


def form_on_device(drafter: Drafter | None) -> DeviceDrafter | None:
    """The drafter's device form, if it has one."""
    return drafter.on_device() if isinstance(drafter, WorksOnDevice) else None


@dataclass(slots=True)
class DrafterContext:
    """What a drafter is built with: `Method(options: dict[str, str], path, context)`.

    `kv` is set after construction and before the first observe, for a drafter whose needs name one.
    """

    target: Target
    sampling: SamplingState  # parameters of every row, and the target's noise
    cost: CostCurve  # what a pass costs on this machine, by packed tokens
    device: torch.device
    max_rows: int
    max_len: int
    vocab_size: int
    block_size: int = 16  # of the KV cache
    # The verifier uses q: draw with noise of your own, and say what you drew from.
    wants_q: bool = False
    has_policy: bool = False  # a policy chooses how many levels it drafts in each step
    vocab: Callable[[], dict[str, int]] | None = None  # the target's tokens; it takes a moment
    codec: TextCodec | None = None  # the target's tokenizer
    load_codec: Callable[[str], TextCodec] | None = None  # the tokenizer beside a drafter's files
    common: Entries | None = None  # what follows common words, once a drafter asked for it
    kv: KVCache | None = None
    group: int = 0  # index of its KV group in computed_GX
    draft_device: torch.device | None = None  # of draft models, where it is not the target's
    beside: DrafterContext | None = None  # the context of a draft model on `draft_device`
    prepares: Prepares | None = None  # the drafter that guesses on while the target is busy

    @property
    def is_fused(self) -> bool:
        """Whether the target runs by a GPU's fused kernels, so that steps can be captured."""
        return self.target.backend.captures_steps

    def common_successors(self) -> Entries:
        """What follows the tokens of common words."""
        if self.common is None:
            codec, size = self.codec, self.vocab_size
            self.common = NOTHING if codec is None else common_successors(codec, size)
        return self.common

    @property
    def only_chains(self) -> bool:
        """Whether the target can check chains alone, as its rows have recurrent states."""
        return self.target.spec.recurrence is not None
