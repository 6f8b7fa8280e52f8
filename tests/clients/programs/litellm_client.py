"""litellm against the server at TWINPOOL_URL. Prints what it found as one JSON object."""

import json
import os
from collections.abc import Callable
from typing import Any

import litellm

URL, MODEL = os.environ["TWINPOOL_URL"], os.environ["TWINPOOL_MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPENAI: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "num_retries": 0,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def text_of(chunks: Any) -> str:
    """What a stream says."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def error_of(ask: Callable[[], object]) -> str:
    """The class of the exception that `ask` raises."""
    try:
        ask()
    except Exception as exc:  # noqa: BLE001  # whatever it is, is the finding
        return type(exc).__name__
    return ""


def main() -> None:
    """Asks for one of each kind."""
    whole = litellm.completion(messages=QUESTION, **OPENAI, **GREEDY)
    stream = litellm.completion(
        messages=QUESTION, **OPENAI, **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    scored = litellm.completion(messages=QUESTION, **OPENAI, **GREEDY, logprobs=True, top_logprobs=2)
    called = litellm.completion(
        messages=QUESTION,
        **OPENAI,
        temperature=0,
        max_tokens=100,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    shaped = litellm.completion(
        messages=[{"role": "user", "content": "Give a number."}],
        **OPENAI,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": number}},
    )
    completed = litellm.text_completion(
        prompt="1, 2, 3, 4,",
        **(OPENAI | {"model": f"text-completion-openai/{MODEL}"}),
        temperature=0,
        max_tokens=6,
    )
    anthropic = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
    message = litellm.completion(messages=QUESTION, **anthropic, **GREEDY)
    message_stream = litellm.completion(messages=QUESTION, **anthropic, **GREEDY, stream=True)
    too_long = [{"role": "user", "content": "word " * 9000}]
    print(
        json.dumps(
            {
                "whole": whole.choices[0].message.content,
                "finish": whole.choices[0].finish_reason,
                "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
                "streamed": text_of(chunks),
                "scored": [item.logprob for item in scored.choices[0].logprobs.content],
                "tool": [
                    [call.function.name, json.loads(call.function.arguments)]
                    for call in called.choices[0].message.tool_calls
                ],
                "shaped": json.loads(shaped.choices[0].message.content),
                "completed": completed.choices[0].text,
                "message": message.choices[0].message.content,
                "message_streamed": text_of(message_stream),
                "too_long": error_of(lambda: litellm.completion(messages=too_long, **OPENAI, **GREEDY)),
                "no_model": error_of(
                    lambda: litellm.completion(messages=QUESTION, **(OPENAI | {"model": "openai/none"}))
                ),
                "embedding": error_of(lambda: litellm.embedding(input=["text"], **OPENAI)),
            }
        )
    )


main()
