"""A conversation, from the messages of a body to the text that a model's chat template makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twinpool.coordinator.gateway.bodies import ChatBody, ChatMessage
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.tools import AnswerFormat, ToolPlan, name_results, tool_fields
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_ARGUMENTS_OF_OURS = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template takes them, and its further arguments.

    With `continues_final` the answer goes on with the last message, which is not closed.
    """

    messages: tuple[dict[str, Any], ...]
    template_arguments: dict[str, Any]
    continues_final: bool = False

    @property
    def num_chars(self) -> int:
        """Characters of what the template is given, about."""
        given = (
            *self.template_arguments.values(),
            *(v for message in self.messages for v in message.values()),
        )
        return sum(map(_num_chars, given))

    def render(self, tokenizer: Tokenizer) -> str:
        """The whole conversation as one text, special tokens included.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses these messages.
        """
        text = tokenizer.apply_chat_template(self.messages, **self.template_arguments)
        return _up_to(text, self.messages[-1]["content"]) if self.continues_final else text


def conversation(body: ChatBody, plan: ToolPlan) -> Conversation:
    """The conversation in the body of a chat request, whose tools mean `plan`. Raises InvalidRequest."""
    arguments = dict(body.chat_template_kwargs or {})
    if reserved := TEMPLATE_ARGUMENTS_OF_OURS & arguments.keys():
        message = f"chat_template_kwargs has {min(reserved)}, which the server sets; leave it out"
        raise InvalidRequest(message, param="chat_template_kwargs")
    continues_final = bool(body.continue_final_message)
    if continues_final and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: the answer either goes on with the last "
            "message or begins one; set one of them to false",
            param="continue_final_message",
        )
    if continues_final or body.add_generation_prompt is False:
        arguments["add_generation_prompt"] = False
    if body.documents:
        arguments["documents"] = body.documents
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    if plan.template_tools is not None:
        arguments["tools"] = plan.template_tools
    messages = name_results(
        [template_message(f"messages[{i}]", message, plan.answers) for i, message in enumerate(body.messages)]
    )
    if continues_final and not str(messages[-1]["content"]).strip():
        raise InvalidRequest(
            "continue_final_message is true, but the last message has no text to go on with; give it some",
            param="continue_final_message",
        )
    return Conversation(messages, arguments, continues_final)


def template_message(where: str, message: ChatMessage, answers: AnswerFormat) -> dict[str, Any]:
    """A message as templates take it: text for its content, objects for arguments of calls. Raises InvalidRequest."""
    if message.role not in ROLES:
        problem = f"{where}.role is {shown(message.role)}; it must be one of {', '.join(ROLES)}"
        raise InvalidRequest(problem, param=f"{where}.role")
    plain: dict[str, Any] = {"role": message.role, "content": _text(where, message)}
    for field in ("name", "reasoning_content", "reasoning"):
        if (value := getattr(message, field)) is not None:
            plain[field] = value
    calls, call_id = message.tool_calls, message.tool_call_id
    return plain | tool_fields(where, message.role, answers, tool_calls=calls, tool_call_id=call_id)


def _text(where: str, message: ChatMessage) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for number, part in enumerate(message.content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            raise InvalidRequest(
                f"{where}.content[{number}] has the type {shown(part.type)}; only parts of the type "
                '"text", with their text, are supported',
                param=f"{where}.content[{number}]",
            )
        texts.append(text)
    return "\n".join(texts)


def _up_to(text: str, final: str) -> str:
    """The rendered conversation up to the end of its last message's words. Templates may strip these."""
    kept = final if final in text else final.strip()
    place = text.rfind(kept)
    if place < 0:
        raise InvalidRequest(
            "continue_final_message is true, but the model's chat template does not show the last message as it is; "
            "leave it out",
            param="continue_final_message",
        )
    return text[: place + len(kept)]


def _num_chars(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(str(value))
