"""The state of one request in the orchestrator, from its prompt to its last response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.errors import EngineFault
from tandem.metrics import MetricsBuffer
from tandem.orchestrator.generate_request import GenerateRequest
from tandem.orchestrator.responder import Responder, Response, Usage
from tandem.orchestrator.text_assembler import TextAssembler
from tandem.types import FinishReason, SamplingParams
from tandem.wire import Admitted, Prefilled, PrefillReply, TokenEvent


@dataclass
class Timings:
    """Names and seconds of one request's way. Of several attempts: the names of the last one, the
    sums of queue, prefill and KV bytes.
    """

    path: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    kv_bytes: int = 0
    transport: str = ""
    retries: int = 0

    def as_json(self) -> dict[str, str | int | float]:
        """The ``timings`` output: durations in milliseconds."""
        return {
            name.removesuffix("_s") + "_ms" if name.endswith("_s") else name: (
                round(value * 1e3, 3) if name.endswith("_s") else value
            )
            for name, value in vars(self).items()
        }


@dataclass
class Generation:
    """Owned by the task that serves the request. ``output_ids`` is what the client was promised:
    a later attempt goes on after it.
    """

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    assembler: TextAssembler
    responder: Responder
    metrics: MetricsBuffer
    clock: Callable[[], float]
    arrived_s: float
    input_text: str = ""  # goes before the output where the client asked for it
    output_ids: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    finish_reason: FinishReason | None = None
    _text: list[str] = field(default_factory=list)  # not sent yet
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _last_token_s: float = 0.0

    def prefilled_remotely(self, reply: PrefillReply) -> None:
        self.timings.prefill_worker = reply.worker
        self._note_prefill("remote", reply.queue_s, reply.prefill_s, reply.num_cached_tokens)

    def prefilled_locally(self, event: Prefilled) -> None:
        self.timings.prefill_worker = self.timings.decode_worker
        self._note_prefill("local", event.queue_s, event.prefill_s, event.num_cached_tokens)

    def admitted(self, reply: Admitted) -> None:
        self.timings.decode_worker = reply.worker
        if self.timings.path == "remote":
            self.timings.transfer_s = reply.pull_s
            self.timings.kv_bytes += reply.pulled_bytes
            self.timings.transport = reply.transport
            self.metrics.observe("tandem_queue_seconds", reply.queue_s, "decode")
            self.metrics.observe("tandem_transfer_seconds", reply.pull_s, reply.transport)

    def take(self, event: TokenEvent) -> None:
        """The next token. A repeated one is dropped, a gap is a fault: never shown either way."""
        if event.position < len(self.output_ids) or self.finish_reason is not None:
            return
        if event.position > len(self.output_ids):
            raise EngineFault(f"token {event.position} came after {len(self.output_ids)} tokens")
        self._note_time()
        self.output_ids.append(event.token_id)
        self._ids.append(event.token_id)
        if event.logprob is not None:
            self._logprobs.append(event.logprob)
        self.finish_reason = event.finish_reason
        # The token that ended the output is not part of its text.
        if event.finish_reason is not FinishReason.STOP:
            self._text.append(self.assembler.push(event.token_id))
        if self.finish_reason is not None and not self.assembler.has_stopped:
            self._text.append(self.assembler.finish())
        if self.assembler.has_stopped:
            self.finish_reason = FinishReason.STOP
        if self.finish_reason is not None:
            self._finish()
        elif self.request.stream:
            self._send_piece()

    def expire(self) -> None:
        """The request's timeout has passed: it ends with what there is."""
        assert self.finish_reason is None and self.output_ids
        self.finish_reason = FinishReason.TIMEOUT
        self._text.append(self.assembler.finish())
        self._finish()

    def _send_piece(self) -> None:
        wants_each = self.request.return_output_ids or self.request.logprobs
        if wants_each or any(self._text):
            self.responder.send(self._response())

    def _finish(self) -> None:
        assert self.finish_reason is not None
        self.timings.decode_s = self._last_token_s - self.arrived_s - self.timings.ttft_s
        self.metrics.observe("tandem_decode_seconds", self.timings.decode_s)
        self.metrics.count("tandem_requests_total", label_value=self.finish_reason)
        wants = self.request
        usage = Usage(
            finish_reason=self.finish_reason if wants.return_finish_reason else None,
            num_input_tokens=len(self.prompt_ids) if wants.return_num_input_tokens else None,
            num_output_tokens=len(self.output_ids) if wants.return_num_output_tokens else None,
            timings=self.timings.as_json() if wants.return_timings else None,
        )
        self.responder.send_final(self._response(), usage)

    def _response(self) -> Response:
        response = Response(
            text=self.input_text + "".join(self._text),
            output_ids=self._ids if self.request.return_output_ids else None,
            logprobs=self._logprobs if self.request.logprobs else None,
        )
        self.input_text = ""
        self._text, self._ids, self._logprobs = [], [], []
        return response

    def _note_prefill(self, path: str, queue_s: float, prefill_s: float, cached: int) -> None:
        self.timings.queue_s += queue_s
        self.timings.prefill_s += prefill_s
        self.timings.cached_tokens = cached
        role = "prefill" if path == "remote" else "decode"
        self.metrics.observe("tandem_queue_seconds", queue_s, role)
        self.metrics.observe("tandem_prefill_seconds", prefill_s, path)
        self.metrics.count("tandem_cached_tokens_total", cached)

    def _note_time(self) -> None:
        now_s = self.clock()
        if not self.output_ids:
            self.timings.ttft_s = now_s - self.arrived_s
            self.metrics.observe("tandem_ttft_seconds", self.timings.ttft_s)
        else:
            self.metrics.observe("tandem_itl_seconds", now_s - self._last_token_s)
        self._last_token_s = now_s
        self.metrics.count("tandem_output_tokens_total")
