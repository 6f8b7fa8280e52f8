"""Flags of `serve` for the HTTP side: who may send requests, and what its clients are granted."""

from __future__ import annotations

import argparse
import os

from twinpool.answer_formats import ReasoningFormat, ToolCallFormat
from twinpool.commands.admin_key import add_admin_key_flags, admin_key_to_serve_with
from twinpool.commands.flags import Flag, add_flags, config_from, one_of
from twinpool.config import GatewayConfig

API_KEYS_VARIABLE = "TWINPOOL_API_KEYS"

_FLAGS = (
    Flag("--api-keys", GatewayConfig, "api_keys_file", "FILE",
         "who may send requests: a file of `twinpool api-key new`, read again on SIGHUP; or keys in "
         f"{API_KEYS_VARIABLE}, as tenant:key,… (default: anyone may)"),
    Flag("--max-body-bytes", GatewayConfig, "max_body_bytes", "BYTES", "longest request body", int),
    Flag("--max-connections", GatewayConfig, "max_connections", "N",
         "open connections; more are refused with 503 (default: as many as may be open, at most 4096)", int),
    Flag("--max-buffered-bytes", GatewayConfig, "max_buffered_bytes", "BYTES",
         "what a stream may be ahead of its client; beyond it the client is cut", int),
    Flag("--client-stall", GatewayConfig, "client_stall_s", "SECONDS",
         "a client that takes nothing of what it is sent for so long is cut", float),
)  # fmt: skip
_ANSWERS = (
    Flag("--tool-call-parser", GatewayConfig, "tool_calls", "NAME",
         "how the model writes calls of tools: auto (as its chat template has it), none, hermes (Qwen too), "
         "llama3_json or mistral", one_of(*ToolCallFormat)),
    Flag("--reasoning-parser", GatewayConfig, "reasoning", "NAME",
         "how the model marks what it thinks before it answers: auto (as its chat template has it), none, or think "
         "(<think>…</think>)", one_of(*ReasoningFormat)),
)  # fmt: skip


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `gateway_config`."""
    group = parser.add_argument_group("clients")
    add_flags(group, _FLAGS)
    add_flags(parser.add_argument_group("answers"), _ANSWERS)
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="an origin whose web pages may use this server, like https://app.example.com; *: all. May be given "
        "several times (default: none)",
    )  # fmt: skip
    group.add_argument("--metrics-open", action="store_true", help="/metrics needs no API key")
    add_admin_key_flags(
        parser.add_argument_group("operators"),
        "who has this key may see and change the pools, by `twinpool pools` and below /admin (default: nobody may)",
    )


def gateway_config(args: argparse.Namespace) -> GatewayConfig:
    """The flags as a checked value, with the keys of the environment: child processes do not inherit those.

    Raises:
        ConfigError: a setting is wrong.
    """
    config: GatewayConfig = config_from(
        args,
        GatewayConfig,
        api_keys=os.environ.pop(API_KEYS_VARIABLE, ""),
        admin_key=admin_key_to_serve_with(args),
        metrics_open=args.metrics_open,
        cors_origins=tuple(args.cors_origin),
    )
    return config
