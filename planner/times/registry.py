"""Service times by name: what `--times` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.errors import ConfigError
from twinpool.planner.times import coefficients, operators, tables
from twinpool.planner.times.devices import DEVICES, Device, Precision, device_named
from twinpool.planner.times.model_shapes import ModelShape, known_shape
from twinpool.planner.times.phases import Link, OtherLink, PhasedTimes, Phases
from twinpool.planner.times.roofline import Roofline
from twinpool.planner.times.service_times import Overheads, ServiceTimes


@dataclass(frozen=True, slots=True)
class Conditions:
    """What service times are asked for.

    `precision` is that of the weights; None: bf16, or what was measured. `kv_element_bytes` None: two bytes, or four
    with weights in fp32. `link_bytes_per_s` is one device's link to other workers, one way; None: its share of the
    network by its data sheet, or what the profile says. `public_data` is the folder with others' measurements.
    """

    tp: int = 1
    precision: Precision | None = None
    kv_element_bytes: float | None = None
    link_bytes_per_s: float | None = None
    public_data: Path | None = None
    overheads: Overheads = field(default_factory=Overheads)

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
    kind, what = _parsed(spec)
    return _LOADERS[kind](what, model, conditions or Conditions())


def roofline(gpu: str, model: ModelShape, conditions: Conditions | None = None) -> Roofline:
    """The roofline of an accelerator, which is the floor under other times of it, too.

    Raises:
        ConfigError: there is no such accelerator, or it cannot be used like this.
    """
    wanted = conditions or Conditions()
    device = _device(gpu)
    return Roofline(
        device,
        model,
        tp=wanted.tp,
        precision=wanted.precision or Precision.BF16,
        kv_element_bytes=wanted.kv_bytes,
        link=_link(device, wanted),
        overheads=wanted.overheads,
    )


def device_of(spec: str) -> Device | None:
    """The accelerator that the times of `spec` are of; None of a profile. Raises ConfigError as `service_times`."""
    kind, what = _parsed(spec)
    match kind:
        case "profile":
            return None
        case "distserve":
            return DEVICES["a100"]
        case _:
            return _device(what)


def precision_of(spec: str, conditions: Conditions) -> Precision:
    """What weights are held as: as `conditions` say, else as the times of `spec` were measured, else bf16."""
    kind = spec.partition(":")[0]
    return conditions.precision or _MEASURED_IN.get(kind, Precision.BF16)


def _parsed(spec: str) -> tuple[str, str]:
    kind, _, what = spec.partition(":")
    if kind not in KINDS or not what:
        raise ConfigError(f"--times is {spec!r}; allowed: {', '.join(KINDS.values())}")
    return kind, what


def _device(what: str) -> Device:
    """An accelerator by name; cpu or cpu:THREADS is measured."""
    name, _, threads = what.partition(":")
    if name != "cpu":
        return device_named(what)
    from twinpool.planner.times.this_machine import this_cpu

    if threads and not threads.isdecimal():
        raise ConfigError(f"--times has 'cpu:{threads}'; allowed: cpu, or cpu:THREADS like cpu:2")
    return this_cpu(int(threads or 1))


def _link(device: Device, conditions: Conditions) -> Link:
    given = conditions.link_bytes_per_s
    return Link(device.scale_out_bytes_per_s if given is None else given)


def _splitwise(what: str, model: ModelShape, conditions: Conditions) -> ServiceTimes:
    phases = tables.splitwise(conditions.public_data, what, model, conditions.tp)
    return _phased("splitwise", phases, DEVICES[what], model, conditions)


def _distserve(what: str, model: ModelShape, conditions: Conditions) -> ServiceTimes:
    named = known_shape(what)
    if named != model:
        raise ConfigError(f"--times is 'distserve:{what}' and --model is {model.name!r}; wanted: one model")
    phases = coefficients.distserve(conditions.public_data, model, conditions.tp)
    return _phased("distserve", phases, DEVICES["a100"], model, conditions)


def _dynamo(what: str, model: ModelShape, conditions: Conditions) -> ServiceTimes:
    if what != "h200":
        raise ConfigError(f"--times is 'dynamo:{what}'; allowed: dynamo:h200")
    measured = (conditions.tp, model.name)
    if measured != (1, "llama-3.1-8b"):
        raise ConfigError(
            f"--model is {model.name!r} and TP {conditions.tp}; dynamo:h200 is llama-3.1-8b at TP 1"
        )
    return _phased("dynamo", coefficients.DYNAMO_H200, DEVICES["h200"], model, conditions)


def _operators(what: str, model: ModelShape, conditions: Conditions) -> ServiceTimes:
    if what != "h100":
        raise ConfigError(f"--times is 'operators:{what}'; allowed: operators:h100")
    precision = conditions.precision or Precision.BF16
    found = operators.read_tables(
        conditions.public_data, model, conditions.tp, precision, conditions.kv_bytes
    )
    link = _link(DEVICES["h100"], conditions)
    return operators.OperatorTimes(model, conditions.tp, precision, found, link, conditions.overheads)


def _profile(what: str, model: ModelShape, conditions: Conditions) -> ServiceTimes:
    from twinpool.planner.profile.fitted_times import load_times

    times = load_times(Path(what))
    profiled = times.profile.model
    if profiled != model.name and (known_shape(profiled) or profiled) != model:
        raise ConfigError(
            f"{what} is a profile of {profiled}, and --model is {model.name!r}; wanted: one model"
        )
    if conditions.tp != 1:
        raise ConfigError(f"TP is {conditions.tp}; {what} is a profile of a worker on 1 device")
    if conditions.link_bytes_per_s is None:
        return times
    return OtherLink(times, Link(conditions.link_bytes_per_s))


def _phased(
    by: str,
    phases: Phases,
    device: Device,
    model: ModelShape,
    conditions: Conditions,
) -> PhasedTimes:
    """Measured times of `conditions.tp` devices.

    Raises:
        ConfigError: another precision is asked for than was measured.
    """
    measured_in = _MEASURED_IN[by]
    wanted = conditions.precision or measured_in
    if wanted.weight_bytes != measured_in.weight_bytes:
        raise ConfigError(
            f"--precision is {wanted.value!r}; {by} measured {model.name} in {measured_in.value}"
        )
    name = f"{model.name} in {measured_in.value} on {conditions.tp} × {device.title}, {by}"
    return PhasedTimes(name, phases, _link(device, conditions), conditions.tp, conditions.overheads)


_MEASURED_IN = {"splitwise": Precision.BF16, "distserve": Precision.FP16, "dynamo": Precision.FP8}
_Loader = Callable[[str, ModelShape, Conditions], ServiceTimes]
_LOADERS: Mapping[str, _Loader] = {
    "roofline": roofline,
    "splitwise": _splitwise,
    "distserve": _distserve,
    "dynamo": _dynamo,
    "operators": _operators,
    "profile": _profile,
}
KINDS = {
    "roofline": f"roofline:GPU ({', '.join(DEVICES)}, or cpu[:THREADS], which is measured)",
    "splitwise": "splitwise:a100, splitwise:h100",
    "distserve": "distserve:MODEL (opt-13b, opt-66b)",
    "dynamo": "dynamo:h200",
    "operators": "operators:h100",
    "profile": "profile:FILE (of `twinpool profile`)",
}
"""How each kind is written, for messages and help."""
