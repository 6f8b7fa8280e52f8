"""Service times by name: what `--times` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.errors import ConfigError
from twinpool.planner.times.devices import DEVICES, Precision, device_named
from twinpool.planner.times.model_shapes import ModelShape
from twinpool.planner.times.roofline import TYPICAL, Efficiency, Roofline
from twinpool.planner.times.service_times import Overheads, ServiceTimes


@dataclass(frozen=True, slots=True)
class Conditions:
    """What service times are asked for.

    `kv_element_bytes` None: two bytes, or four with weights in fp32. `link_bytes_per_s` is one device's link to other
    workers, one way; None: what the device's data sheet (or the profile) says. `public_data` is the folder with others'
    measurements. `efficiency` is the roofline's.
    """

    tp: int = 1
    precision: Precision = Precision.BF16
    kv_element_bytes: float | None = None
    link_bytes_per_s: float | None = None
    public_data: Path | None = None
    overheads: Overheads = field(default_factory=Overheads)
    efficiency: Efficiency = TYPICAL

    @property
    def kv_bytes(self) -> float:
        """Bytes of an element of KV."""
        if self.kv_element_bytes is not None:
            return self.kv_element_bytes
        return 4.0 if self.precision is Precision.FP32 else 2.0


def service_times(spec: str, model: ModelShape, conditions: Conditions | None = None) -> ServiceTimes:
    """The service times that `spec` (KIND:WHAT, see `KINDS`) names, for `model`.

    Raises:
        ConfigError: there are none of that name, they are not for this model or these conditions, or a file that
            they are read from is absent.
    """
    kind, _, what = spec.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"--times is {spec!r}; allowed: {', '.join(KINDS.values())}")
    return _LOADERS[kind](what, model, conditions or Conditions())


def _roofline(what: str, model: ModelShape, conditions: Conditions) -> ServiceTimes:
    return roofline(what, model, conditions)


def roofline(gpu: str, model: ModelShape, conditions: Conditions | None = None) -> Roofline:
    """The roofline of an accelerator, which is the floor under other times of it, too."""
    wanted = conditions or Conditions()
    return Roofline(
        device_named(gpu),
        model,
        tp=wanted.tp,
        precision=wanted.precision,
        kv_element_bytes=wanted.kv_bytes,
        efficiency=wanted.efficiency,
        link_bytes_per_s=wanted.link_bytes_per_s,
        overheads=wanted.overheads,
    )


_Loader = Callable[[str, ModelShape, Conditions], ServiceTimes]
_LOADERS: Mapping[str, _Loader] = {"roofline": _roofline}
KINDS = {
    "roofline": f"roofline:GPU ({', '.join(DEVICES)})",
}
"""How each kind is written, for messages and help."""
