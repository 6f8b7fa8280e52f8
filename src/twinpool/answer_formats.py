"""The notations that a model's answers may have for calls of tools and for reasoning, as an operator names them."""

from __future__ import annotations

from enum import StrEnum


class ToolCallFormat(StrEnum):
    """How the model writes calls of tools (`coordinator/gateway/tools/`)."""

    AUTO = "auto"
    """As its chat template has it."""
    NONE = "none"
    """Not at all: requests with tools are refused."""
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


class ReasoningFormat(StrEnum):
    """How the model marks what it thinks before it answers."""

    AUTO = "auto"
    """As its chat template has it."""
    NONE = "none"
    """Not at all: it is part of the answer."""
    THINK = "think"
