"""Tools and reasoning: what a request's tools mean for prompt and tokens, and how an answer's text is read. Pure.

`AnswerFormat.of` says once how the served model writes calls and reasoning. `plan` turns the tools of a request into a
`ToolPlan`: what the chat template is given, what the answer must match, what reads it. `tool_fields` and
`name_results` map earlier calls and their results.
"""

from twinpool.coordinator.gateway.tools.fields import ToolCalls, ToolChoice, Tools
from twinpool.coordinator.gateway.tools.formats import AnswerFormat
from twinpool.coordinator.gateway.tools.history import name_results, tool_fields
from twinpool.coordinator.gateway.tools.plan import ToolPlan, plan

__all__ = [
    "AnswerFormat",
    "ToolCalls",
    "ToolChoice",
    "ToolPlan",
    "Tools",
    "name_results",
    "plan",
    "tool_fields",
]
