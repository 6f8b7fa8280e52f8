"""The anthropic package against the server at TWINPOOL_URL. Prints what it found as one JSON object."""

import json
import os

import anthropic

URL, MODEL = os.environ["TWINPOOL_URL"], os.environ["TWINPOOL_MODEL"]
GREEDY = {"temperature": 0}  # newer versions of the package have no argument for it
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def usage(message: anthropic.types.Message) -> list[int]:
    """Tokens of the prompt, those that a cache had too, and of the answer."""
    return [
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
        message.usage.output_tokens,
    ]


def main() -> None:
    """Asks for one of each kind."""
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    whole = client.messages.create(model=MODEL, messages=QUESTION, extra_body=GREEDY, max_tokens=30)
    with client.messages.stream(model=MODEL, messages=QUESTION, extra_body=GREEDY, max_tokens=30) as stream:
        types = [event.type for event in stream]
        streamed = stream.get_final_message()
    cut = client.messages.create(
        model=MODEL,
        system="You are brief.",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Tell a story."}]}],
        extra_body=GREEDY,
        max_tokens=5,
    )
    failures = {}
    for name, changes in (("no_model", {"model": "none"}), ("wrong", {"extra_body": {"temperature": -1}})):
        try:
            client.messages.create(**({"model": MODEL, "messages": QUESTION, "max_tokens": 5} | changes))
        except anthropic.APIStatusError as exc:
            failures[name] = [type(exc).__name__, exc.status_code]
    print(
        json.dumps(
            {
                "whole": [block.text for block in whole.content],
                "stop_reason": whole.stop_reason,
                "usage": usage(whole),
                "streamed": [block.text for block in streamed.content],
                "streamed_stop_reason": streamed.stop_reason,
                "streamed_usage": usage(streamed),
                "types": types,
                "cut": cut.stop_reason,
                "failures": failures,
            }
        )
    )


main()
