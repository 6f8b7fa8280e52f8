"""`twinpool kv-size`: how much memory a model's KV takes, and what fits."""

from __future__ import annotations

import argparse
import re

from twinpool.config import EngineConfig, require
from twinpool.errors import ConfigError
from twinpool.layout import COMPUTE_DTYPES, KV_CACHE_DTYPES, Dtype, KVLayout

_SHAPE_FLAGS = ("layers", "kv_heads", "head_dim")
_DEFAULT_CONTEXT = 4096
_FRACTION = EngineConfig(model_dir="").kv_memory_fraction
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "kv-size",
        help="bytes of KV per token, block and sequence, and how many sequences fit",
        description="Computes how much memory a model's KV takes and what fits into a given memory. "
        "KV bytes per token = 2 × layers × KV heads × head size × bytes per element; "
        "in int8 each of those vectors has 4 bytes of scale too.",
        epilog="example: twinpool kv-size --layers 32 --kv-heads 8 --head-dim 128 --memory 80GiB",
    )
    add = parser.add_argument
    default_memory = f"{_FRACTION:.0%}% of what is free here, as the workers of `serve` take together"
    add("model", nargs="?", metavar="MODEL", help="id, directory or .gguf file (default: the built-in model)")
    add("--layers", type=int, metavar="N", help="instead of a MODEL: its layers")
    add("--kv-heads", type=int, metavar="N", help="instead of a MODEL: its key/value heads")
    add(
        "--query-heads",
        type=int,
        metavar="N",
        help="its query heads, which KV does not depend on: to be checked",
    )
    add("--head-dim", type=int, metavar="N", help="instead of a MODEL: elements of one head")
    add("--dtype", default="auto", help="float32, bfloat16, float16 or auto (the MODEL's own, else bfloat16)")
    add("--kv-cache-dtype", default="auto", help="auto (as --dtype), fp8 or int8")
    add("--block-size", type=int, default=16, metavar="TOKENS", help="token slots per block (default 16)")
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="a sequence's length (default: the MODEL's longest, or 4096)",
    )
    add(
        "--expect",
        type=parse_bytes,
        metavar="SIZE",
        help="per token, like 320KiB or 327680: refused if it is another",
    )
    add("--memory", type=parse_bytes, metavar="SIZE", help=f"for KV, like 80GiB (default: {default_memory})")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the sizes.

    Raises:
        ConfigError: a number is missing or makes no sense, or KV takes other than `--expect` per token.
        ModelError: the model cannot be found.
    """
    _check(args)
    name, layout, query_heads, context = (
        _model_shape(args) if _shape_flags(args) is None else _given_shape(args)
    )
    if args.expect is not None:
        _hold(args.expect, layout, query_heads)
    if args.memory is None:
        from twinpool.engine.kv_memory import free_host_memory

        memory_bytes = int(free_host_memory() * _FRACTION)
        where = f"{_FRACTION:.0%} of the free memory here ({binary(memory_bytes)})"
    else:
        memory_bytes, where = args.memory, binary(args.memory)
    print("\n".join(describe(name, layout, context, memory_bytes, where)))
    return 0


def describe(name: str, layout: KVLayout, context: int, memory_bytes: int, where: str) -> list[str]:
    """The lines that `run` prints: per token, per block, per sequence of `context` tokens, and what fits."""
    blocks = layout.num_blocks(context)
    sequence_bytes = blocks * layout.block_bytes
    pool_blocks = memory_bytes // layout.block_bytes
    rows = [
        ("per token", binary(layout.token_bytes)),
        (f"per block of {layout.block_size} tokens", binary(layout.block_bytes)),
        (f"per sequence of {context:,} tokens", f"{binary(sequence_bytes)} ({blocks:,} blocks)"),
        (f"in {where}", f"{pool_blocks:,} blocks = {pool_blocks * layout.block_size:,} tokens "
                        f"= {pool_blocks // blocks:,} such sequences"),
    ]  # fmt: skip
    width = max(len(label) for label, _ in rows)
    shape = f"{layout.num_layers} layers × {layout.num_kv_heads} KV heads × {layout.head_dim}, {layout.dtype}"
    return [f"{name}: {shape}", *(f"  {label:<{width}}  {value}" for label, value in rows)]


def binary(num_bytes: int) -> str:
    """A size in binary units, like 288 MiB, exact if it is a whole number of them."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if size == int(size) else f"{size:,.1f} {unit}"


def parse_bytes(text: str) -> int:
    """Bytes from a size like 80GiB, 512M or 1000000. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 80GiB, 512MiB or 16GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _shape_flags(args: argparse.Namespace) -> list[str] | None:
    """The shape flags that are missing, None if none is given."""
    missing = [flag for flag in _SHAPE_FLAGS if getattr(args, flag) is None]
    return None if len(missing) == len(_SHAPE_FLAGS) else missing


def _hold(expected: int, layout: KVLayout, query_heads: int | None) -> None:
    """Raises ConfigError unless KV takes so many bytes per token."""
    if layout.token_bytes == expected:
        return
    formula = f"2 × {layout.num_layers} layers × {layout.num_kv_heads} kv_heads × {layout.head_dim} × {layout.dtype}"
    sentence = f"--expect is {expected:,} bytes per token, but {formula} are {layout.token_bytes:,}"
    if query_heads is not None and layout.token_bytes * query_heads == expected * layout.num_kv_heads:
        sentence += f"; it has the {query_heads} query heads in place of the {layout.num_kv_heads} kv_heads"
    raise ConfigError(sentence)


def _given_shape(args: argparse.Namespace) -> tuple[str, KVLayout, int | None, int]:
    if missing := _shape_flags(args):
        flag, why = f"--{missing[0].replace('_', '-')}", ""
        if missing[0] == "kv_heads" and args.query_heads is not None:
            why = f" (kv_heads, not the {args.query_heads} query heads, is what KV is kept for)"
        raise ConfigError(f"{flag} is missing{why}; give all of --layers, --kv-heads and --head-dim")
    if args.model is not None:
        raise ConfigError(f"MODEL is {args.model!r} and --layers is {args.layers}; give one or the other")
    dtype = _kv_dtype(args, Dtype.BFLOAT16)
    shape = (args.layers, args.kv_heads, args.head_dim, args.block_size)
    context = _DEFAULT_CONTEXT if args.context is None else args.context
    is_even = args.query_heads is None or args.query_heads % args.kv_heads == 0
    require("--query-heads", args.query_heads, is_even, f"a multiple of the {args.kv_heads} --kv-heads")
    return "given shape", KVLayout(*shape, dtype), args.query_heads, context


def _model_shape(args: argparse.Namespace) -> tuple[str, KVLayout, int | None, int]:
    require(
        "--query-heads",
        args.query_heads,
        args.query_heads is None,
        "only with --layers, --kv-heads, --head-dim",
    )
    from twinpool.engine.model_config import ModelConfig
    from twinpool.engine.model_files import resolve

    model = resolve(args.model, needs_weights=False)
    config = ModelConfig.from_dir(model.path)
    dtype = _kv_dtype(args, config.dtype)
    context = config.max_positions if args.context is None else args.context
    return model.name, config.kv_layout(args.block_size, dtype), config.num_heads, context


def _kv_dtype(args: argparse.Namespace, own: Dtype) -> Dtype:
    if args.kv_cache_dtype != "auto":
        return KV_CACHE_DTYPES[args.kv_cache_dtype]
    return own if args.dtype == "auto" else Dtype(args.dtype)


def _check(args: argparse.Namespace) -> None:
    for flag, names in (("--dtype", COMPUTE_DTYPES), ("--kv-cache-dtype", KV_CACHE_DTYPES)):
        value, allowed = getattr(args, flag[2:].replace("-", "_")), ("auto", *names)
        require(flag, value, value in allowed, ", ".join(allowed))
    for name in ("block_size", "context", "query_heads", *_SHAPE_FLAGS):
        value = getattr(args, name)
        require(f"--{name.replace('_', '-')}", value, value is None or value >= 1, "1 or more")
