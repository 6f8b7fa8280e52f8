"""The way of a generation request through the gateway, whichever route it came by: read, check, tokenize, submit.

The life of a request here: a claim on its id (`request_ids`), its body (bounded, `request_body`), a checked request
(`requests`, or what another route makes of its own body), token ids (`prompts`), and a reply that submits one strand
per choice and carries their outputs to the client (`reply`, `strand`, `answer`, and the route's `Shape`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fastapi import Request

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer import Answer
from twinpool.coordinator.gateway.bad_words import token_sequences
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.cache_salts import CacheSalts
from twinpool.coordinator.gateway.connection import CONNECTION
from twinpool.coordinator.gateway.error_answers import REQUEST_ID
from twinpool.coordinator.gateway.front import TENANT
from twinpool.coordinator.gateway.grammar_checks import GrammarChecks
from twinpool.coordinator.gateway.ignored_fields import warning_headers
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.parsing import parse_timeout_header
from twinpool.coordinator.gateway.prompts import Prompt, PromptReader
from twinpool.coordinator.gateway.reply import Reply
from twinpool.coordinator.gateway.request_body import BodyReader
from twinpool.coordinator.gateway.request_ids import Claim, RequestIds
from twinpool.coordinator.gateway.requests import GenerationRequest, check_token_ids, kept_seed
from twinpool.coordinator.gateway.shapes import Heading, Shape
from twinpool.coordinator.gateway.strand import Strand
from twinpool.coordinator.gateway.streamed_reply import StreamedReply
from twinpool.coordinator.gateway.token_texts import TokenTexts
from twinpool.coordinator.gateway.tools import AnswerFormat
from twinpool.coordinator.gateway.whole_reply import WholeReply
from twinpool.coordinator.service import Service, Submission
from twinpool.coordinator.tenants import Tenant
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import DuplicateRequest, ModelNotFound
from twinpool.metrics import GatewayMetric
from twinpool.request import SamplingParams

USAGE_HEADER = "x-twinpool-usage"

Parse = Callable[[bytes], GenerationRequest]
"""Reads and checks a body; raises InvalidRequest. It may run in a thread."""
MakeShape = Callable[[Heading], Shape]
"""Makes the writer of one request's answer."""


class _Choice(NamedTuple):
    """What one choice is sampled after, and how."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class Generator:
    """Serves generation requests of one model. Any route may use it, with a `Parse` and a `MakeShape` of its own.

    `answers` is how the model's answers are to be read; the parsers of chat requests need it.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        model_name: str,
        limits: GatewayConfig,
        meter: GatewayMeter,
    ) -> None:
        self.model_name = model_name
        self.ids = RequestIds()
        self.bodies = BodyReader(limits)
        self.prompts = PromptReader(tokenizer)
        self.texts = TokenTexts(tokenizer)
        self.answers = AnswerFormat.of(tokenizer, limits)
        self._service = service
        self._tokenizer = tokenizer
        self._limits = limits
        self._meter = meter
        self._salts = CacheSalts()
        self._grammars = GrammarChecks(tokenizer)

    async def generate(self, request: Request, parse: Parse, make_shape: MakeShape) -> Reply:
        """The reply to a generation request. It submits the request when it runs.

        Raises:
            RequestError: the request is refused.
        """
        tenant: Tenant = request.scope[TENANT]
        with ExitStack() as held:
            claim = self._claim(request, tenant)
            held.callback(self.ids.release, claim)
            request.scope[REQUEST_ID] = claim.shown_id
            reply = await self._prepare(request, claim, parse, make_shape)
            reply.held = held.pop_all()
        return reply

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound if a request names a model that is not this one."""
        if name not in (None, self.model_name):
            raise ModelNotFound(
                f"the model {shown(name)} is not served here; use {self.model_name!r}", param="model"
            )

    def _claim(self, request: Request, tenant: Tenant) -> Claim:
        headers = request.headers
        is_duplicate_fine = headers.get("x-allow-duplicate", "").lower() == "true"
        try:
            return self.ids.claim(
                tenant,
                headers.get("x-request-id"),
                request.scope[CONNECTION],
                is_duplicate_fine=is_duplicate_fine,
            )
        except DuplicateRequest:
            request.scope[REQUEST_ID] = headers["x-request-id"]
            self._meter.count(GatewayMetric.DUPLICATES)
            raise

    async def _prepare(self, request: Request, claim: Claim, parse: Parse, make_shape: MakeShape) -> Reply:
        """Reads, checks and tokenizes the request; the reply submits it."""
        service = self._service
        received_at = service.now()
        header_timeout_s = parse_timeout_header(request.headers.get("x-request-timeout"))
        with self.bodies.reading() as body:
            wanted = await body.parse(request, parse)
            if request.headers.get(USAGE_HEADER, "").lower() in ("1", "true"):
                wanted = replace(wanted, wants_facts=True, include_usage=wanted.stream)
            self.check_model(wanted.model)
            self._check_ids(wanted)
            validated_at = service.now()
            if wanted.bad_words:
                words = await asyncio.to_thread(token_sequences, self._tokenizer, wanted.bad_words)
                wanted = replace(wanted, bad_word_token_ids=words)
            service.knock(claim.request_id, claim.tenant, wanted.priority)
            constraint = wanted.constraint
            grammar = None if constraint is None else await self._grammars.checked(constraint)
            prompts = await self.prompts.read(wanted, service.max_model_len)
            text = "" if wanted.tool_plan is None else self._text(prompts[0])
            wanted = wanted.with_prompt(text, grammar)
        timeout_s = min(header_timeout_s, wanted.timeout_s)
        claim.num_choices = wanted.n * len(prompts)
        submission = partial(
            Submission,
            received_at=received_at,
            validated_at=validated_at,
            tokenized_at=service.now(),
            cache_salt=self._salts.salt(claim.tenant, wanted.cache_salt),
            tenant=claim.tenant,
            priority=wanted.priority,
            deadline=None if timeout_s == math.inf else received_at + timeout_s,
            num_choices=claim.num_choices,
        )
        heading = Heading(claim.shown_id, self.model_name, int(time.time()), wanted, prompts, self.texts)
        return (StreamedReply if wanted.stream else WholeReply)(
            list(self._strands(claim, heading, submission)),
            make_shape(heading),
            heading,
            self._limits,
            claim,
            warning_headers(wanted.warnings),
        )

    def _strands(
        self, claim: Claim, heading: Heading, submission: Callable[..., Submission]
    ) -> Iterator[Strand]:
        """One for each choice."""
        wanted = heading.wanted
        choices = list(self._choices(wanted, heading.prompts))
        num_after, tokens_after = len(choices), sum(map(_most_tokens, choices))
        for request_id, choice in zip(claim.strand_ids, choices, strict=True):
            num_after, tokens_after = num_after - 1, tokens_after - _most_tokens(choice)
            own = submission(
                request_id=request_id,
                prompt_token_ids=choice.prompt_token_ids,
                sampling=choice.sampling,
                num_after=num_after,
                tokens_after=tokens_after,
            )
            yield Strand(self._service, own, self._answer(wanted))

    def _check_ids(self, wanted: GenerationRequest) -> None:
        vocab_size = self._tokenizer.vocab_size
        check_token_ids("stop_token_ids", wanted.stop_token_ids, vocab_size)
        check_token_ids("allowed_token_ids", wanted.allowed_token_ids, vocab_size)
        check_token_ids("logit_bias", (token_id for token_id, _ in wanted.logit_bias), vocab_size)

    def _choices(self, wanted: GenerationRequest, prompts: Sequence[Prompt]) -> Iterator[_Choice]:
        """The seeds of a prompt's choices follow each other."""
        for prompt in prompts:
            sampling = wanted.sampling(len(prompt.token_ids), self._service.max_model_len)
            for number in range(wanted.n):
                own = replace(sampling, seed=kept_seed(sampling.seed + number)) if number else sampling
                yield _Choice(prompt.token_ids, own)

    def _text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _answer(self, wanted: GenerationRequest) -> Answer:
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, wanted.skips_special_tokens, wanted.shown_token_ids
        )
        return Answer(detokenizer, wanted.rules)


def _most_tokens(choice: _Choice) -> int:
    return len(choice.prompt_token_ids) + choice.sampling.max_tokens
