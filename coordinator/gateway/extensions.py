"""Fields beyond OpenAI's and Anthropic's own that the newer routes take as the chat route does.

A request of these routes is turned into one of the chat route and checked as such, so a field's range is said there.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ExtensionFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and scheduling fields that vLLM's users know, with the names that the chat route has for them."""

    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    twinpool: bool | None = None

    def extensions(self) -> dict[str, Any]:
        """Those that are set, as the chat route's fields."""
        values = {name: getattr(self, name) for name in ExtensionFields.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}
