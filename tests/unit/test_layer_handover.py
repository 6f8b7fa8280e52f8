"""Layers are handed over when the device has written them, whatever the host is at."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from twinpool.engine.gpu.layer_handover import LayerHandover

LIMIT_S = 10.0


class Mark:
    """An event that a test lets happen."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(LIMIT_S)


class Device:
    """Gives marks and keeps them."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def record(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


def test_a_layer_is_handed_over_after_its_own_mark_while_later_ones_are_still_launched() -> None:
    device, done, seen = Device(), [threading.Event() for _ in range(3)], []

    def on_layer_done(layer: int) -> None:
        seen.append((layer, [mark.happened.is_set() for mark in device.marks], threading.current_thread()))
        done[layer].set()

    with LayerHandover(on_layer_done, device.record) as handover:
        handover.layer_launched(0)
        handover.layer_launched(1)
        assert not seen
        device.marks[0].happened.set()
        assert done[0].wait(LIMIT_S)
        handover.layer_launched(2)
        assert len(seen) == 1
        device.marks[2].happened.set()
        assert not done[2].is_set()
        device.marks[1].happened.set()
    assert [layer for layer, _, _ in seen] == [0, 1, 2]
    assert seen[0][1] == [True, False]
    assert seen[1][1] == [True, True, True]
    assert len({thread for _, _, thread in seen} | {threading.current_thread()}) == 2
    assert not any(thread.is_alive() for _, _, thread in seen)


def launch(device: Device, on_layer_done: Callable[[int], None], num_layers: int, fault: str = "") -> None:
    """A step whose layers are written at once; with `fault` it fails then."""
    with LayerHandover(on_layer_done, device.record) as handover:
        for layer in range(num_layers):
            handover.layer_launched(layer)
            device.marks[layer].happened.set()
        if fault:
            raise ValueError(fault)


def test_what_a_hand_over_raises_ends_the_step_and_nothing_follows_it() -> None:
    seen = []

    def on_layer_done(layer: int) -> None:
        seen.append(layer)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        launch(Device(), on_layer_done, 3)
    assert seen == [0]
    with pytest.raises(ValueError, match="the kernel"):
        launch(Device(), on_layer_done, 1, fault="the kernel")
