"""The life of a request: validate, tokenize, route, prefill, hand over, stream, finish.

::

    serve ─ parse ─ tokenize ─┬─ attempt 1 ─ remote: link.prefill → first token → link.decode ─┐
                              │            └ local:  link.decode ──────────────────────────────┤
                              │                               tokens from the stream plane ◀───┘
                              └─ attempt 2 … after a failure, from prompt + tokens already sent
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from tandem.config import OrchestratorSettings
from tandem.errors import (
    EngineFault,
    PullFailed,
    RequestCancelled,
    ShuttingDown,
    TandemError,
    Unavailable,
)
from tandem.kv.block_hash import block_hashes, salted_root
from tandem.metrics import MetricsBuffer
from tandem.orchestrator.admission import Admission, Ticket
from tandem.orchestrator.attempts import Attempts
from tandem.orchestrator.contract import parse_request
from tandem.orchestrator.generate_request import GenerateRequest
from tandem.orchestrator.generation import Generation
from tandem.orchestrator.link import Link
from tandem.orchestrator.path_costs import Path
from tandem.orchestrator.responder import Responder
from tandem.orchestrator.router import Placement, Router
from tandem.orchestrator.sampling_defaults import SamplingDefaults
from tandem.orchestrator.stream_plane import StreamPlane, TokenStream
from tandem.orchestrator.text_assembler import TextAssembler
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.wire import Prefilled, SequenceSpec

_log = logging.getLogger(__name__)


class Orchestrator:
    """Owned by one event loop; ``serve`` runs as one task per request."""

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        vocab_size: int,
        tokenizer: Tokenizer,
        defaults: SamplingDefaults,
        link: Link,
        plane: StreamPlane,
        metrics: MetricsBuffer,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._link = link
        self._plane = plane
        self._metrics = metrics
        self._clock = clock
        self._draw_seed = draw_seed
        self._router = Router(settings, metrics)
        self._admission = Admission(settings, lambda: plane.loads, metrics, clock)
        self._tokenize_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._probation = asyncio.Lock()
        self._is_draining = False
        self._num_live = 0

    async def serve(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        parameters: Mapping[str, bool | int | float | str],
        responder: Responder,
    ) -> None:
        """Answers one request completely, whatever happens. Cancel the task to abort it."""
        arrived_s = self._clock()
        self._metrics.set("tandem_requests_live", self._count_live(+1))
        try:
            if self._is_draining:
                raise ShuttingDown("the server is draining and takes no more requests")
            request = parse_request(inputs, parameters, self._settings)
            await self._serve_in_time(request, responder, arrived_s)
        except asyncio.CancelledError:
            self._fail(responder, self.cancelled())
        except TandemError as error:
            self._fail(responder, error)
        except Exception as error:
            _log.exception("request failed")
            self._fail(responder, EngineFault(f"{type(error).__name__}: {error}"))
        finally:
            self._metrics.set("tandem_requests_live", self._count_live(-1))

    def drain(self) -> None:
        """Refuses all requests from now on; who is cancelled then hears of it."""
        self._is_draining = True

    def cancelled(self) -> TandemError:
        """Why the task of a request is cancelled."""
        if self._is_draining:
            return ShuttingDown("the server is stopping and cannot wait for this request")
        return RequestCancelled("the client went away")

    def close(self) -> None:
        self._tokenize_thread.shutdown(wait=False, cancel_futures=True)

    async def _serve_in_time(
        self, request: GenerateRequest, responder: Responder, arrived_s: float
    ) -> None:
        """Whatever it waits for or runs on when its timeout passes is cancelled then; output that
        there is by then becomes its whole output.
        """
        left_s = request.timeout / 1e6 - (self._clock() - arrived_s) if request.timeout else None
        generation: Generation | None = None
        ticket = self._admission.arrive(request.priority)
        try:
            async with asyncio.timeout(left_s) as limit:
                generation = await self._begin(request, responder, arrived_s)
                self._admission.accept(ticket, len(generation.prompt_ids), left_s)
                await self._generate(generation, ticket)
        except TimeoutError:
            if not limit.expired():
                raise
            if generation is None or not generation.output_ids:
                raise Unavailable(f"no token within its timeout of {request.timeout} µs") from None
            generation.expire()
        finally:
            self._admission.leave(ticket)

    async def _begin(
        self, request: GenerateRequest, responder: Responder, arrived_s: float
    ) -> Generation:
        request.check_vocabulary(self._vocab_size)
        loop = asyncio.get_running_loop()
        prompt_ids = await loop.run_in_executor(self._tokenize_thread, self._tokenize, request)
        sampling = request.sampling(
            self._defaults,
            len(prompt_ids),
            self._settings.max_model_len,
            self._settings.default_max_tokens,
            self._draw_seed,
        )
        self._metrics.count("tandem_prompt_tokens_total", len(prompt_ids))
        shows_input = not request.exclude_input_in_output
        return Generation(
            request=request,
            prompt_ids=prompt_ids,
            sampling=sampling,
            assembler=TextAssembler(self._tokenizer, request.stop),
            responder=responder,
            metrics=self._metrics,
            clock=self._clock,
            arrived_s=arrived_s,
            input_text=(request.text_input or "") if shows_input else "",
        )

    def _tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        if request.input_ids is not None:
            return request.input_ids
        if request.messages is not None:
            return tuple(self._tokenizer.encode_chat(request.messages))
        assert request.text_input is not None
        return tuple(self._tokenizer.encode(request.text_input))

    async def _generate(self, generation: Generation, ticket: Ticket) -> None:
        """Attempts until one reaches the last token; each goes on where the one before ended."""
        request_id = secrets.token_hex(8)
        attempts = Attempts(self._settings.max_attempts, self._probation)
        for attempt in itertools.count():
            await attempts.pause()
            await self._admission.enter(ticket)
            async with attempts.placing():
                stream = self._plane.open(f"{request_id}.{attempt}")
                placement = self._place(generation, stream)
                is_complete = False
                try:
                    is_complete = await self._attempt(
                        generation, stream, placement, ticket, attempts
                    )
                    return
                except (Unavailable, PullFailed, EngineFault) as error:
                    _log.warning("request %s: attempt %d failed: %s", request_id, attempt, error)
                    attempts.failed(error)
                    generation.timings.retries += 1
                    self._metrics.count("tandem_reprefills_total")
                finally:
                    self._plane.close(stream, cancel=not is_complete)
                    self._router.ended(placement)

    async def _attempt(
        self,
        generation: Generation,
        stream: TokenStream,
        placement: Placement,
        ticket: Ticket,
        attempts: Attempts,
    ) -> bool:
        """Runs a sequence to the end of the output. True if its engine ended it as well, False if
        the engine still has to be told.
        """
        handle = b""
        if placement.path is Path.REMOTE:
            reply, handle = await self._link.prefill(
                self._spec(generation, stream), placement.prefill
            )
            self._router.prefilled(placement, reply.worker, self._clock())
            self._plane.keep_lease(stream)
            generation.prefilled_remotely(reply)
            generation.take(reply.token)
            if generation.finish_reason is not None:
                return not handle
        admitted = await self._link.decode(
            self._spec(generation, stream), handle, placement.decode
        )
        self._plane.admitted(stream, admitted.worker, admitted.incarnation)
        generation.admitted(admitted)
        if placement.path is Path.REMOTE:
            self._router.pulled(placement, admitted.worker, self._clock())
        engine_ended = False
        while generation.finish_reason is None:
            event = await stream.get()
            self._admission.started(ticket)
            if isinstance(event, Prefilled):
                generation.prefilled_locally(event)
                self._router.prefilled(placement, admitted.worker, self._clock())
            else:
                generation.take(event)
                attempts.progressed()
                engine_ended = event.finish_reason is not None
        return engine_ended

    def _place(self, generation: Generation, stream: TokenStream) -> Placement:
        token_ids = (*generation.prompt_ids, *generation.output_ids)
        cache_salt = generation.request.cache_salt
        placement = self._router.place(
            stream.sequence_id,
            len(token_ids),
            block_hashes(token_ids, self._settings.block_size, salted_root(cache_salt)),
            self._plane.workers,
            self._clock(),
            generation.request.path,
        )
        generation.timings.path = placement.path
        self._metrics.count("tandem_path_total", label_value=placement.path)
        return placement

    def _spec(self, generation: Generation, stream: TokenStream) -> SequenceSpec:
        return SequenceSpec(
            sequence_id=stream.sequence_id,
            reply_to=self._plane.reply_to,
            prompt_ids=generation.prompt_ids,
            output_ids=tuple(generation.output_ids),
            sampling=generation.sampling,
            cache_salt=generation.request.cache_salt,
        )

    def _fail(self, responder: Responder, error: TandemError) -> None:
        outcome = "cancelled" if isinstance(error, RequestCancelled) else error.code.value
        self._metrics.count("tandem_requests_total", label_value=outcome)
        responder.fail(error)

    def _count_live(self, change: int) -> int:
        self._num_live += change
        return self._num_live
