"""Which prompts begin alike, without their tokens: names for the leading blocks of requests that exist only as lengths.

Prompts share a block if all their pieces up to its end are equal (`Shape.pieces`), and what they generate is each
request's own. So nothing is hashed, and a prompt that shares nothing is a `range` of names.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from twinpool.bench.serving.datasets.shapes import Key, Shape
from twinpool.engine.prefix_chain import Chains, PrefixChain
from twinpool.request import Job

_Node = tuple[int, int]
"""A number, and the name of the first block that ends in it: pieces that follow the same pieces are one node."""
_ROOT: _Node = (0, 0)


class Prefixes:
    """Names for the blocks of `block_size` tokens of all requests, by their index in `shapes`.

    Equal names mean equal tokens up to the block's end. Names are dense, so that they spread well in a dict.
    """

    def __init__(self, shapes: Sequence[Shape], block_size: int) -> None:
        self.block_size = block_size
        self._shapes = shapes
        self._longest = _shared_pieces(shapes)
        self._nodes: dict[tuple[int, int, Key], _Node] = {}
        self._own = array("q")
        self._num_blocks = array("q")
        """Full ones of each prompt."""
        self._next = 0
        for shape in shapes:
            num_tokens = shape.input_tokens
            self._own.append(self._next)
            self._num_blocks.append(num_tokens // block_size)
            self._next += (num_tokens + shape.output_tokens) // block_size + 1

    def own(self, index: int) -> int:
        """The name of a request's block i is this plus i, where nothing of it can be shared."""
        return self._own[index]

    def names(self, index: int) -> range | list[int]:
        """Those of all full blocks of a prompt; a `range` if it can share none."""
        shape, size, own = self._shapes[index], self.block_size, self._own[index]
        num_blocks = self._num_blocks[index]
        names: list[int] = []
        node, position = _ROOT, 0
        for piece in shape.pieces:
            if piece.key not in self._longest:
                break
            node = self._node_after(node, position, piece.key)
            first = position // size
            position += piece.num_tokens
            names += range(node[1], node[1] + position // size - first)
        if not names:
            return range(own, own + num_blocks)
        return [*names, *range(own + len(names), own + num_blocks)]

    def chains(self) -> Chains:
        """What cores name the prefixes of jobs with. The ids of their requests are indices."""
        return lambda job: NamedChain(self, job)

    def _node_after(self, node: _Node, position: int, key: Key) -> _Node:
        place = (node[0], position, key)
        found = self._nodes.get(place)
        if found is None:
            found = self._nodes[place] = (len(self._nodes) + 1, self._next)
            self._next += self._longest[key] // self.block_size + 2
        return found


class NamedChain(PrefixChain):
    """The chain of a job's blocks by their names."""

    __slots__ = ("_own_start",)

    grows_alone = True

    def __init__(self, prefixes: Prefixes, job: Job) -> None:
        index = int(job.request_id)
        self._block_size = prefixes.block_size
        self._own_start = prefixes.own(index)
        self._set(prefixes.names(index))
        self.extend(job.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Names the full blocks that the sequence has grown by: its own."""
        num_blocks, own = len(token_ids) // self._block_size, self._own_start
        names = cast("range | list[int]", self.digests)
        if isinstance(names, range):
            self._set(range(names.start, names.start + num_blocks))
        else:
            names += range(own + len(names), own + num_blocks)

    def num_shared(self, other: PrefixChain) -> int:
        """How many full blocks both begin with."""
        ours, theirs = self.digests, other.digests
        if not ours or not theirs or ours[0] != theirs[0]:
            return 0
        return super().num_shared(other)

    def _set(self, names: range | list[int]) -> None:
        # Pools and schedulers compare digests, slice them and look them up: any hashable will do.
        self.digests = cast("list[bytes]", names)


def _shared_pieces(shapes: Sequence[Shape]) -> dict[Key, int]:
    """The most tokens of each piece that several requests have."""
    seen: set[Key] = set()
    shared: set[Key] = set()
    for shape in shapes:
        for piece in shape.pieces:
            if piece.is_shared:
                (shared if piece.key in seen else seen).add(piece.key)
    del seen
    longest: dict[Key, int] = {}
    for shape in shapes:
        for piece in shape.pieces:
            if piece.key in shared and longest.get(piece.key, 0) < piece.num_tokens:
                longest[piece.key] = piece.num_tokens
    return longest
