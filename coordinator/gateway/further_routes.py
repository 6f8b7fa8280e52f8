"""Routes beside the two of OpenAI's that the gateway began with."""

from __future__ import annotations

from fastapi import FastAPI

from twinpool.coordinator.gateway.generation import Generator
from twinpool.coordinator.gateway.messages_api.route import Messages
from twinpool.coordinator.gateway.responses.route import Responses
from twinpool.coordinator.gateway.tokenizing import PromptCounter, Tokenizing
from twinpool.coordinator.gateway.unserved import mount_unserved
from twinpool.coordinator.service import Service
from twinpool.engine.tokenizer import Tokenizer


def mount_further_routes(app: FastAPI, service: Service, tokenizer: Tokenizer, generator: Generator) -> None:
    """Adds to `app` the routes of responses, messages and tokenizing, and those that say why they are not served."""
    counter = PromptCounter(service, generator)
    Responses(generator, counter).mount(app)
    Messages(generator, counter).mount(app)
    Tokenizing(service, generator, tokenizer).mount(app)
    mount_unserved(app)
