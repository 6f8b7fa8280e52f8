"""Layers go out in groups as each sender likes, each layer once and in order; a lost link hurts only its own."""

from __future__ import annotations

import pytest

from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import BlockRange
from twinpool.worker.core import BlockPush
from twinpool.worker.step_thread import LayerPusher

NUM_LAYERS = 30


class RecordingSender:
    """A sender that notes what it is given, and is lost from its `lost_at`-th push on."""

    name = "recording"

    def __init__(self, layer_group: int, lost_at: int | None = None) -> None:
        self.layer_group = layer_group
        self.lost = False
        self._lost_at = lost_at
        self.pushed: list[tuple[int, int, int]] = []

    def push(self, fence: int, blocks: BlockRange) -> None:
        if len(self.pushed) == self._lost_at:
            raise PeerLost("the decode worker is gone")
        self.pushed.append((fence, blocks.first_layer, blocks.last_layer))


def run_layers(pusher: LayerPusher) -> None:
    for layer in range(NUM_LAYERS):
        pusher.layer_done(layer)


@pytest.mark.parametrize("group", [1, 6, 7, 11, 29, 30, 64])
def test_every_layer_is_pushed_once_in_order_whatever_the_group(group: int) -> None:
    sender = RecordingSender(group)
    pusher = LayerPusher([BlockPush(5, "decode-0", (1, 2), (8, 9))], [sender], NUM_LAYERS)  # type: ignore[list-item]
    run_layers(pusher)
    layers = [layer for _, first, last in sender.pushed for layer in range(first, last)]
    assert layers == list(range(NUM_LAYERS))
    assert all(last - first <= group for _, first, last in sender.pushed)
    assert len(sender.pushed) == -(-NUM_LAYERS // group)
    assert not pusher.failed


@pytest.mark.parametrize("groups", [(1,), (6,), (7, 11), (30,), (64,), (4, 6, 9)])
def test_calls_after_the_last_layers_of_groups_push_what_calls_after_each_layer_do(
    groups: tuple[int, ...],
) -> None:
    pushed = []
    for only_last in (False, True):
        senders = [RecordingSender(group) for group in groups]
        pushes = [BlockPush(fence, f"decode-{fence}", (1, 2), (8, 9)) for fence in range(len(groups))]
        pusher = LayerPusher(pushes, senders, NUM_LAYERS)  # type: ignore[arg-type]
        for layer in sorted(pusher.last_layers) if only_last else range(NUM_LAYERS):
            pusher.layer_done(layer)
        pushed.append([sender.pushed for sender in senders])
    assert pushed[0] == pushed[1]


def test_a_group_leaves_as_soon_as_its_last_layer_is_done() -> None:
    sender = RecordingSender(6)
    pusher = LayerPusher([BlockPush(5, "decode-0", (1,), (8,))], [sender], NUM_LAYERS)  # type: ignore[list-item]
    for layer in range(5):
        pusher.layer_done(layer)
    assert not sender.pushed
    pusher.layer_done(5)
    assert sender.pushed == [(5, 0, 6)]


def test_a_lost_link_ends_its_own_push_only() -> None:
    lost, well = RecordingSender(10, lost_at=1), RecordingSender(10)
    pushes = [BlockPush(fence, f"decode-{fence}", (1,), (8,)) for fence in (1, 2, 3)]
    pusher = LayerPusher(pushes, [lost, well, None], NUM_LAYERS)  # type: ignore[list-item]
    run_layers(pusher)
    assert pusher.failed == {1: "the decode worker is gone", 3: "no link to decode-3"}
    assert lost.pushed == [(1, 0, 10)]
    assert well.pushed == [(2, 0, 10), (2, 10, 20), (2, 20, 30)]
