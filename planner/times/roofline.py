"""Service times of hardware that is not here, from a data sheet and a model's shape; and the floor under all claims.

Roofline: a computation takes at least its bytes over the bandwidth and its FLOPs over the rate of products, whichever
is longer (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785). `Roofline.floor_s` is that bound over a
whole step at the data sheet's rates. `Roofline.step_s` is an estimate: matrix products, attention of single tokens and
attention of chunks one after the other, each at a stated share of those rates, then collectives and fixed costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config import require
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.devices import Device, Precision
from twinpool.planner.times.model_shapes import ModelShape
from twinpool.planner.times.phases import Link
from twinpool.planner.times.service_times import Overheads

COLLECTIVES_PER_LAYER = 2
"""All-reduces of tensor parallelism: after attention and after the feed-forward (Megatron-LM, arXiv 1909.08053)."""
_ACTIVATION_BYTES = 2
_EMPTY = StepShape()


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Which share of the data sheet's rates is reached, and what a step costs beside them.

    `products` and `attention` are shares of the FLOP rate, in matrix products and in chunks' attention, and
    `narrow_products` in products of 8 and fewer bits, whose rate kernels reach less of; `bandwidth` of the memory's,
    `link` of the links between the devices of a group. `step_s` is launching, sampling and scheduling,
    once per step; `layer_s` what a layer's kernels take however little they do, `expert_layer_s` those that choose,
    send to and join experts; `collective_s` an all-reduce of few bytes.
    """

    products: float = 0.75
    narrow_products: float = 0.45
    attention: float = 0.55
    bandwidth: float = 0.80
    link: float = 0.70
    step_s: float = 1e-3
    layer_s: float = 20e-6
    expert_layer_s: float = 30e-6
    collective_s: float = 15e-6

    def __post_init__(self) -> None:
        for name in ("products", "narrow_products", "attention", "bandwidth", "link"):
            share = getattr(self, name)
            require(f"efficiency {name}", share, 0 < share <= 1, "a share above 0, at most 1")
        for name in ("step_s", "layer_s", "expert_layer_s", "collective_s"):
            seconds = getattr(self, name)
            require(f"efficiency {name}", seconds, seconds >= 0, "0 or more seconds")


TYPICAL = Efficiency()


class Roofline:
    """A worker of `tp` devices that share each layer (tensor parallelism). Implements `ServiceTimes`.

    `precision` is that of the weights, `kv_element_bytes` the size of an element of KV. KV goes to other workers over
    `link`, None: the device's share of the network.
    """

    def __init__(
        self,
        device: Device,
        model: ModelShape,
        *,
        tp: int = 1,
        precision: Precision = Precision.BF16,
        kv_element_bytes: float = 2.0,
        efficiency: Efficiency = TYPICAL,
        link: Link | None = None,
        overheads: Overheads | None = None,
    ) -> None:
        """Raises ConfigError if the heads do not divide by `tp`, or the device has no rate for `precision`."""
        heads = model.num_heads
        require("TP", tp, tp >= 1 and heads % tp == 0, f"a divisor of {model.name}'s {heads} query heads")
        self.device = device
        self.model = model
        self.tp = tp
        self.precision = precision
        self.kv_element_bytes = kv_element_bytes
        self.efficiency = efficiency
        self.link = link or Link(device.scale_out_bytes_per_s)
        self._overheads = overheads or Overheads()
        self._flops_per_s = tp * device.flops_per_s(precision)
        wide = Precision.FP32 if precision is Precision.FP32 else Precision.BF16
        self._attention_flops_per_s = tp * device.flops_per_s(wide)
        self._most_flops_per_s = tp * device.most_flops_per_s(precision)
        is_narrow = self._flops_per_s > self._attention_flops_per_s
        self._products_share = efficiency.narrow_products if is_narrow else efficiency.products
        self._bytes_per_s = tp * device.bytes_per_s
        weight = precision.weight_bytes
        self._active_weights = model.active_weights
        self._head_weights = model.head_weights
        self._sequence_pair_flops = model.sequence_pair_flops()
        self._prompt_pair_flops = model.prompt_pair_flops()
        self._window = model.window or 0
        self._shared_bytes = model.shared_weights * weight
        self._head_bytes = model.head_weights * max(weight, 2.0)
        self._expert_bytes = model.num_expert_layers * model.expert_weights * weight
        self._kv_layer_bytes = model.kv_elements / model.num_layers * kv_element_bytes
        copies = (
            1 if model.latent is not None else model.num_kv_heads
        )  # heads that devices can have for themselves
        self._kv_bytes_per_s = min(tp, copies) * device.bytes_per_s
        self._used_kv_bytes_per_s = self._kv_bytes_per_s * efficiency.bandwidth
        self._used_attention_flops_per_s = self._attention_flops_per_s * efficiency.attention
        self._products_of: dict[tuple[int, int], float] = {}
        self._fixed_s = efficiency.step_s + model.num_layers * efficiency.layer_s
        self._fixed_s += model.num_expert_layers * efficiency.expert_layer_s
        num_collectives = 0 if tp == 1 else COLLECTIVES_PER_LAYER * model.num_layers
        self._fixed_s += num_collectives * efficiency.collective_s
        # A ring's, of one token.
        moved = num_collectives * 2 * (tp - 1) / tp * model.hidden * _ACTIVATION_BYTES
        self._collectives_token_s = moved / (device.scale_up_bytes_per_s * efficiency.link)

    @property
    def name(self) -> str:
        """Model, hardware, and that it is a roofline."""
        return f"{self.model.name} in {self.precision} on {self.tp} × {self.device.title}, roofline"

    @property
    def overheads(self) -> Overheads:
        """What the caller said; none by itself."""
        return self._overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:  # noqa: ARG002
        """An estimate; accelerators do not slow each other down."""
        if shape == _EMPTY:
            return 0.0
        num_sequences, context_tokens, num_chunks, prompt_tokens, *_ = shape
        tokens = num_sequences + prompt_tokens
        rows = num_sequences + num_chunks
        products_s = self._products_of.get((tokens, rows)) or self._products_s(tokens, rows)
        kv_bytes_per_s, attention_flops_per_s = self._used_kv_bytes_per_s, self._used_attention_flops_per_s
        sequences_s = chunks_s = 0.0
        if num_sequences:
            positions = self._layers(context_tokens, self._window * num_sequences)
            sequences_s = max(
                positions * self._kv_layer_bytes / kv_bytes_per_s,
                positions * self._sequence_pair_flops / attention_flops_per_s,
            )
        if num_chunks:
            chunks_s = max(
                self._chunk_kv_bytes(shape) / kv_bytes_per_s, self._chunk_flops(shape) / attention_flops_per_s
            )
        return self._fixed_s + products_s + sequences_s + chunks_s + tokens * self._collectives_token_s

    def steps_ahead_s(self, shape: StepShape, num_steps: int, num_busy: int) -> list[float]:
        """As `ForeseesSteps.steps_ahead_s`: what does not change from step to step is computed once."""
        num_sequences, context_tokens, num_chunks, *_ = shape
        if num_chunks or self.model.num_window_layers or not num_sequences:
            return [self.step_s(shape.after(number), num_busy) for number in range(num_steps)]
        products_s = self._products_of.get((num_sequences, num_sequences))
        every_s = self._fixed_s + (products_s or self._products_s(num_sequences, num_sequences))
        collectives_s = num_sequences * self._collectives_token_s
        num_layers, kv_layer_bytes, pair_flops = (
            self.model.num_layers, self._kv_layer_bytes, self._sequence_pair_flops
        )  # fmt: skip
        kv_bytes_per_s, flops_per_s = self._used_kv_bytes_per_s, self._used_attention_flops_per_s
        found = []
        for context in range(context_tokens, context_tokens + num_steps * num_sequences, num_sequences):
            positions = num_layers * context
            kv_s = positions * kv_layer_bytes / kv_bytes_per_s
            pairs_s = positions * pair_flops / flops_per_s
            found.append(every_s + (kv_s if kv_s > pairs_s else pairs_s) + collectives_s)
        return found

    def transfer_s(self, num_bytes: int) -> float:
        """All devices of the group send their heads at once."""
        return self.link.transfer_s(num_bytes, self.tp)

    def floor_s(self, shape: StepShape) -> float:
        """The least time that a step can take: everything at once at the data sheet's rates, without collectives.

        Of the last layer only what leads to sampled tokens counts, of experts only as many as one token takes.
        """
        if shape == _EMPTY:
            return 0.0
        model = self.model
        all_but_last = 1 - 1 / model.num_layers
        layers = 1.0 if shape.num_sequences else all_but_last
        experts = 0 if model.experts is None else model.experts.per_token
        num_bytes = layers * (self._shared_bytes + experts * self._expert_bytes)
        num_bytes += self._sequence_kv_bytes(shape) + all_but_last * self._chunk_kv_bytes(shape)
        if shape.num_sequences:
            num_bytes += self._head_bytes
        tokens = shape.num_sequences + all_but_last * shape.prompt_tokens
        flops = 2.0 * (model.active_weights * tokens + model.head_weights * shape.num_sequences)
        attention = self._sequence_flops(shape) + all_but_last * self._chunk_flops(shape)
        fastest = max(self._most_flops_per_s, self._attention_flops_per_s)
        return max(
            num_bytes / self._bytes_per_s, flops / self._most_flops_per_s, (flops + attention) / fastest
        )

    def least_accelerator_s(self, request: StepShape) -> float:
        """Accelerator-seconds that a request takes at least, however it is batched, split and scheduled.

        `request` are the sums over its steps (`of_request`), or their means over many requests. FLOPs of all its
        tokens, or bytes of KV that its output tokens read, whichever take longer; weights are read once for however
        many requests.
        """
        new, decoded = request.prompt_tokens, request.num_sequences
        all_but_last = 1 - 1 / self.model.num_layers
        flops = 2.0 * self.model.active_weights * (all_but_last * new + decoded)
        flops += 2.0 * self.model.head_weights * (decoded + 1) + all_but_last * self._chunk_flops(request)
        flops += self._sequence_flops(request)
        fastest = max(self._most_flops_per_s, self._attention_flops_per_s)
        return self.tp * max(flops / fastest, self._sequence_kv_bytes(request) / self._bytes_per_s)

    def _products_s(self, tokens: int, rows: int) -> float:
        """Matrix products of so many tokens, logits of so many `rows`. Of few tokens it is remembered: a simulation
        asks at each step."""
        used = self.efficiency
        num_bytes = self._shared_bytes + self._head_bytes + self._experts_read(tokens) * self._expert_bytes
        flops = 2.0 * (self._active_weights * tokens + self._head_weights * rows)
        seconds = max(
            num_bytes / (self._bytes_per_s * used.bandwidth),
            flops / (self._flops_per_s * self._products_share),
        )
        if tokens == rows:
            self._products_of[tokens, rows] = seconds
        return seconds

    def _experts_read(self, tokens: float) -> float:
        """Different experts of a layer that so many tokens take, if each is as likely as any other."""
        experts = self.model.experts
        if experts is None:
            return 0.0
        missed: float = (1 - experts.per_token / experts.count) ** tokens
        return experts.count * (1 - missed)

    def _layers(self, all_positions: float, in_window: float) -> float:
        """Sums over layers: those that see all, those with a window."""
        windowed = self.model.num_window_layers
        if not windowed:
            return self.model.num_layers * all_positions
        return (self.model.num_layers - windowed) * all_positions + windowed * min(all_positions, in_window)

    def _sequence_positions(self, shape: StepShape) -> float:
        return self._layers(shape.context_tokens, self._window * shape.num_sequences)

    def _sequence_kv_bytes(self, shape: StepShape) -> float:
        return self._sequence_positions(shape) * self._kv_layer_bytes

    def _sequence_flops(self, shape: StepShape) -> float:
        return self._sequence_positions(shape) * self._sequence_pair_flops

    def _chunk_kv_bytes(self, shape: StepShape) -> float:
        in_window = self._window * shape.num_chunks + shape.prompt_tokens
        return self._layers(shape.prompt_context, in_window) * self._kv_layer_bytes

    def _chunk_flops(self, shape: StepShape) -> float:
        return self._layers(shape.prompt_pairs, self._window * shape.prompt_tokens) * self._prompt_pair_flops
