"""The KV blocks: who holds which, and which hold a known prefix and can be used again.

A block is `block_size` slots under one id in every KV group. A full block is *published* under a
key made of its tokens and its parent's key, so equal keys mean equal text from the first token on.
It can be found after its last owner has freed it, until its slots are needed for something else.

If every layer has a window, a sequence frees the blocks before it while it runs. Its table still
names them, so that positions keep their places; what is read there is masked. Such a sequence takes
blocks as its prompt is computed, never all at once, and may be longer than all blocks together.

If rows have recurrent states, a prefix can be used again only up to a block at whose end a state
was kept (`snapshots`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from hunch.engine.kv_events import KVEventLog
from hunch.engine.snapshots import NO_SNAPSHOT, Snapshots
from hunch.types import GroupInfo

_NO_TOKEN = -1
_TARGET_BIT = 1
LEAST_SHARED = 64  # a recurrent state that saves fewer tokens is not kept: that costs a pass


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks, for all KV groups."""

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the leading full blocks of its tokens
    num_published: list[int] = field(default_factory=list)  # per group: leading blocks published
    salt: bytes = b""  # part of every key: requests with another salt do not find these blocks
    num_freed: int = 0  # leading blocks that were freed, as no window reaches them


@dataclass(frozen=True, slots=True)
class Hit:
    """Leading blocks of a sequence that are already written."""

    blocks: list[int]
    num_computed: tuple[int, ...]  # per KV group: leading tokens that may be taken from them
    num_idle: int  # how many of the blocks no sequence holds now
    num_alike: int = 0  # leading tokens whose blocks are known, with or without a state
    snapshot: int = NO_SNAPSHOT  # the recurrent state after the last of the blocks
    num_past: int = 0  # leading blocks that no window reaches; they may hold other text


class BlockPool:
    """All blocks of the device. Free blocks that have a key are reused last, the oldest first."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[GroupInfo] = (GroupInfo(name="target"),),
        *,
        is_caching: bool = True,
        window: int | None = None,  # positions that a token sees, its own included; None: all
        snapshots: Snapshots | None = None,  # None: rows have no recurrent states
        events: KVEventLog | None = None,  # receives changes of what can be found
    ) -> None:
        self.num_blocks, self.block_size, self.is_caching = num_blocks, block_size, is_caching
        self.window, self.snapshots, self.events = window, snapshots, events
        self.num_queried = 0  # tokens looked up so far
        self.num_hit = 0  # of these, tokens found
        self._groups = tuple(groups)
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_key: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_blocks
        self._valid = [0] * num_blocks  # bit g: the block's KV of group g is written
        self._following = [[_NO_TOKEN] * num_blocks for _ in self._groups]  # of groups that see it

    @property
    def is_sliding(self) -> bool:
        """Whether sequences hold only the blocks of their windows."""
        return self.window is not None and len(self._groups) == 1 and self.snapshots is None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owned(self, table: BlockTable) -> int:
        """Blocks that become free when this table releases them."""
        return sum(self._num_refs[block] == 1 for block in table.blocks[table.num_freed :])

    def find(self, table: BlockTable, tokens: list[int], max_hit: int) -> Hit:
        """The longest written prefix of `tokens`, of at most max_hit tokens. Takes nothing yet."""
        if not self.is_caching:
            return Hit([], (0,) * len(self._groups), 0)
        size = self.block_size
        max_blocks = max_hit // size
        self._extend_keys(table, tokens, max_blocks)
        blocks = self._longest(table.keys[:max_blocks])
        num_alike = size * len(blocks)
        self._cut_to_state(table, blocks)
        num_past = self._num_past(len(blocks) * size) if self.is_sliding else 0
        groups = range(len(self._groups))
        valid = [self._num_valid(group, blocks, tokens, num_past) for group in groups]
        pairs = zip(self._groups, valid, strict=True)
        if any(group.has_no_holes and count == len(blocks) - 1 for group, count in pairs):
            blocks.pop()  # the block was followed by another token: the target computes it again
            self._cut_to_state(table, blocks)
            valid = [min(count, len(blocks)) for count in valid]
        num_computed = tuple(size * count for count in valid)
        num_idle = sum(self._num_refs[block] == 0 for block in blocks[num_past:])
        snapshot = NO_SNAPSHOT
        if self.snapshots is not None and blocks:
            snapshot = self.snapshots.use(table.keys[len(blocks) - 1])
        return Hit(blocks, num_computed, num_idle, num_alike, snapshot, num_past)

    def _longest(self, keys: list[bytes]) -> list[int]:
        """The blocks of the longest run of leading keys; those before a window may be missing."""
        blocks: list[int] = []
        num_found = first = 0  # first: where the last unbroken run of blocks began
        for place, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                if not self.is_sliding:
                    break
                first = place + 1
            elif not first or first <= self._num_past((place + 1) * self.block_size):
                num_found = place + 1
            blocks.append(block or 0)
        return blocks[:num_found]

    def _num_past(self, num_computed: int) -> int:
        """Leading blocks before every window, once this many tokens are computed."""
        assert self.window is not None
        return max(0, (num_computed - self.window + 1) // self.block_size)

    def _cut_to_state(self, table: BlockTable, blocks: list[int]) -> None:
        """Drop the blocks after the last kept recurrent state."""
        if self.snapshots is not None:
            while blocks and table.keys[len(blocks) - 1] not in self.snapshots:
                blocks.pop()

    def _num_valid(self, group: int, blocks: list[int], tokens: list[int], first: int) -> int:
        sees_next, following = self._groups[group].sees_next, self._following[group]
        for place, block in enumerate(blocks[first:], first):
            if not self._valid[block] >> group & 1:
                return place
            next_place = (place + 1) * self.block_size
            if sees_next and (next_place >= len(tokens) or following[block] != tokens[next_place]):
                return place
        return len(blocks)

    def open(self, table: BlockTable, hit: Hit, num_slots: int) -> None:
        """Fill an empty table: the blocks of the hit, then new ones up to num_slots."""
        assert not table.blocks
        for block in hit.blocks[hit.num_past :]:
            if self._num_refs[block] == 0:
                del self._free[block]
            self._num_refs[block] += 1
        table.blocks, table.num_freed = list(hit.blocks), hit.num_past
        table.num_published = [tokens // self.block_size for tokens in hit.num_computed]
        self.take(table, self.num_missing(table, num_slots))

    def num_held(self, num_slots: int, hit: Hit) -> int:
        """Blocks that must be free, besides the hit's, to start a sequence of this length."""
        num_missing = -(-num_slots // self.block_size) - len(hit.blocks)
        if not self.is_sliding:
            return num_missing
        assert self.window is not None
        num_seen = -(-self.window // self.block_size) + 2  # parts of blocks at both ends
        return min(num_missing, max(1, num_seen - len(hit.blocks) + hit.num_past))

    def num_missing(self, table: BlockTable, num_slots: int) -> int:
        return max(0, -(-num_slots // self.block_size) - len(table.blocks))

    def take(self, table: BlockTable, num_blocks: int) -> tuple[int, ...]:
        """Append free blocks to the table; the caller has checked that there are enough."""
        taken = tuple(self._free.popitem(last=False)[0] for _ in range(num_blocks))
        for block in taken:
            self._num_refs[block] = 1
            self._forget(block)
        table.blocks.extend(taken)
        return taken

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
            if self.events is not None:
                self.events.removed(key)
            if self.snapshots is not None:
                self.snapshots.drop(key)
        self._valid[block] = 0

    def reset(self, *, is_held_too: bool = False) -> bool:
        """Forget the keys of all blocks that no sequence holds, or of all; whether none is left."""
        for block in range(self.num_blocks) if is_held_too else self._free:
            self._forget(block)
        return not self._by_key

    @property
    def tracks_progress(self) -> bool:
        """Whether `advance` has anything to do."""
        return self.is_caching or self.window is not None

    def advance(self, table: BlockTable, tokens: list[int], num_computed: Sequence[int]) -> None:
        """More KV was written: publish full blocks, and free those before every window."""
        if self.is_caching:
            self.publish(table, tokens, num_computed)
        if self.window is None or len(num_computed) < len(self._groups):
            return  # the other groups' progress comes with later steps
        num_past = self._num_past(min(num_computed))
        if self.is_caching:
            num_past = min(num_past, *table.num_published)
        for place in range(table.num_freed, num_past):
            self._let_go(table.blocks[place])
            table.num_freed = place + 1

    def publish(self, table: BlockTable, tokens: list[int], num_computed: Sequence[int]) -> None:
        """Publish full blocks, each for the groups that have written all of it."""
        published = table.num_published
        for group, count in enumerate(num_computed):
            num_full = count // self.block_size
            if published[group] >= num_full:
                continue
            self._extend_keys(table, tokens, num_full)
            for place in range(published[group], num_full):
                if not self._publish_one(table, tokens, place, group):
                    break
                published[group] = place + 1

    def _publish_one(self, table: BlockTable, tokens: list[int], place: int, group: int) -> bool:
        block, key = table.blocks[place], table.keys[place]
        if group == 0:
            # If two sequences compute the same block at the same time, the first one is kept.
            if self._keys[block] is None and key not in self._by_key:
                self._by_key[key] = block
                self._keys[block] = key
                self._valid[block] = _TARGET_BIT
                if self.events is not None and not table.salt:
                    first = place * self.block_size
                    parent = table.keys[place - 1] if place else None
                    self.events.stored(key, parent, tokens[first : first + self.block_size])
            return True
        if self._groups[group].sees_next:
            next_place = (place + 1) * self.block_size
            if next_place >= len(tokens):
                return False
            self._following[group][block] = tokens[next_place]
        self._valid[block] |= 1 << group
        return True

    def snapshot_lengths(self, hit: Hit, num_known: int) -> list[int]:
        """After how many tokens to keep the recurrent state for later requests: at ends of blocks.

        One is the last end in the text. The other is where the text departs from an earlier one:
        later texts may depart there too.
        """
        lengths: list[int] = []
        if self.snapshots is None or not self.is_caching:
            return lengths
        last = hit.num_computed[0]
        for length in (hit.num_alike, (num_known - 1) // self.block_size * self.block_size):
            if self.is_worth_keeping(length - last):
                lengths.append(length)
                last = length
        return lengths

    def is_worth_keeping(self, num_tokens: int) -> bool:
        """Whether a state after this many tokens saves enough to be kept."""
        return self.snapshots is None or num_tokens >= LEAST_SHARED

    def keep_state(self, table: BlockTable, num_computed: int, snapshot: int) -> None:
        """A row's state after this many tokens was copied to a snapshot; after 0: none was."""
        if snapshot == NO_SNAPSHOT:
            return
        assert self.snapshots is not None
        place, rest = divmod(num_computed, self.block_size)
        if rest or not 0 < place <= len(table.keys) or table.keys[place - 1] not in self._by_key:
            self.snapshots.give_back(snapshot)
        else:
            self.snapshots.put(table.keys[place - 1], snapshot)

    def release(self, table: BlockTable) -> None:
        """Free every block; later ones are reused sooner, as prefixes are worth more."""
        for block in reversed(table.blocks[table.num_freed :]):
            self._let_go(block)
        table.blocks = []
        table.num_published = []
        table.num_freed = 0

    def _let_go(self, block: int) -> None:
        self._num_refs[block] -= 1
        if self._num_refs[block] == 0:
            self._free[block] = None
            if self._keys[block] is None:
                self._free.move_to_end(block, last=False)

    def _extend_keys(self, table: BlockTable, tokens: list[int], num_blocks: int) -> None:
        keys, size = table.keys, self.block_size
        for place in range(len(keys), min(num_blocks, len(tokens) // size)):
            # A salt has more bytes than a key: no text of one is taken for a key of other blocks.
            root = blake2b(table.salt).digest() if table.salt else b""
            parent = keys[-1] if keys else root
            ids = array("q", tokens[place * size : (place + 1) * size])
            keys.append(blake2b(parent + ids.tobytes(), digest_size=16).digest())
