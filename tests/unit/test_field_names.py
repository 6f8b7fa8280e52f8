"""Errors of a chat request in the words of the route that its client used."""

from __future__ import annotations

import pytest

from twinpool.coordinator.gateway.field_names import FieldNames
from twinpool.errors import ContextLengthExceeded, InvalidRequest

NAMES = FieldNames(fields={"messages": "input", "stop": "stops"}, parts={"max_tokens": "max_output_tokens"})


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages", "input"),
        ("messages[3].role", "input"),
        ("stop[0]", "stops"),
        ("stop_token_ids", "stop_token_ids"),
        ("max_tokens", "max_output_tokens"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_a_field_has_the_name_that_its_client_gave_it(param: str | None, expected: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused, NAMES.in_errors():
        raise InvalidRequest("no", param=param)
    assert refused.value.param == expected


def test_a_message_names_it_so_too_and_the_error_stays_what_it_is() -> None:
    failure = ContextLengthExceeded("the prompt has 5 tokens and max_tokens asks for 9", param="max_tokens")
    with pytest.raises(ContextLengthExceeded) as refused, NAMES.in_errors():
        raise failure
    assert refused.value.message == "the prompt has 5 tokens and max_output_tokens asks for 9"
    assert refused.value.message == str(refused.value)
