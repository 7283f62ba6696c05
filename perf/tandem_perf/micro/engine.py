"""Prefill tokens/s and decode ms/step of the real model runner, beside the roofline of the model.

Each measurement is what ``Engine.step`` does without its scheduler: build the batch, forward,
sample (which waits for the device). The blocks of every sequence lie scattered over the slab, as in
a server that has run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tandem.engine.batch_builder import build_batch
from tandem.engine.model import LoadedModel, load_model
from tandem.engine.model_runner import DecodeLimits, ModelRunner
from tandem.engine.sampler import SampleRequest, sample
from tandem.engine.sequence import Sequence
from tandem.engine.slab import TORCH_DTYPES, empty_slab
from tandem.types import SamplingParams
from tandem.wire import SequenceSpec
from tandem_perf.micro.figure import Bound, Figure, MicroOptions, rate_figure, time_figure
from tandem_perf.micro.floors import (
    Floor,
    ModelShape,
    Peaks,
    decode_step,
    floor_of,
    prefill_steps,
)
from tandem_perf.micro.peaks import GEMM_SIZE, READ_BYTES, measure_peaks
from tandem_perf.micro.timing import Timing, time_repeats

_GREEDY = SamplingParams(max_tokens=1 << 30)


@dataclass(frozen=True)
class EngineSizes:
    """``chunk`` is the default of ``max_num_batched_tokens``."""

    prompts: tuple[int, ...] = (128, 1024)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    chunk: int = 128
    block_size: int = 16
    read_bytes: int = READ_BYTES
    gemm_size: int = GEMM_SIZE

    @property
    def num_blocks(self) -> int:
        """One more than sequences need: decode graphs keep the last."""
        longest = max(*self.prompts, max(self.batches) * max(self.contexts))
        return -(-longest // self.block_size) + max(self.batches) + 1


_GPU_SIZES = EngineSizes(
    batches=(1, 8, 32, 128), chunk=1024, block_size=256, read_bytes=2 << 30, gemm_size=8192
)


def run(options: MicroOptions) -> Iterator[Figure]:
    return measure(options, EngineSizes() if options.device == "cpu" else _GPU_SIZES)


def measure(options: MicroOptions, sizes: EngineSizes) -> Iterator[Figure]:
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    model = load_model(options.model_dir, options.dtype, options.device)
    shape = model_shape(options.model_dir, model)
    dtype = TORCH_DTYPES[model.dtype_name]
    peaks = measure_peaks(dtype, options.repeats, sizes.read_bytes, sizes.gemm_size, options.device)
    few_rows = load_model(options.model_dir, options.dtype, options.device, max_rows=sizes.chunk)
    bench, decode_bench = _EngineBench(model, sizes), _EngineBench(few_rows, sizes)
    place = f"{options.threads} thread(s)" if options.device == "cpu" else options.device
    reason = _Reason(peaks, f"{model.dtype_name}, {place}")
    for prompt_len in sizes.prompts:
        for chunk in sorted({min(sizes.chunk, prompt_len), prompt_len}):
            floor = floor_of(prefill_steps(shape, prompt_len, chunk), peaks)
            timing = bench.prefill(prompt_len, chunk, options.repeats)
            what = f"prefill {prompt_len} tokens, chunks of {chunk}"
            bound = Bound(value=prompt_len / floor.seconds, reason=reason.of(floor))
            yield rate_figure("engine", what, "tokens/s", timing, prompt_len, bound)
    for batch in sizes.batches:
        for context_len in sizes.contexts:
            floor = floor_of([decode_step(shape, batch, context_len)], peaks)
            timing = decode_bench.decode(batch, context_len, options.repeats)
            what = f"decode batch {batch}, context {context_len}"
            bound = Bound(value=floor.seconds * 1e3, reason=reason.of(floor))
            yield time_figure("engine", what, "ms/step", timing, 1e3, bound)


def model_shape(model_dir: Path, model: LoadedModel) -> ModelShape:
    """Counted on the model without weights: a loaded one has packed layers."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config)
    head = bare.get_output_embeddings().weight
    outside = {id(head), id(bare.get_input_embeddings().weight)}
    return ModelShape(
        body_params=sum(p.numel() for p in bare.parameters() if id(p) not in outside),
        head_params=head.numel(),
        num_layers=model.num_layers,
        num_heads=config.get_text_config().num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        item_bytes=TORCH_DTYPES[model.dtype_name].itemsize,
    )


class _EngineBench:
    """One model on one slab of arbitrary but finite content."""

    def __init__(self, model: LoadedModel, sizes: EngineSizes) -> None:
        self._block_size = sizes.block_size
        self._vocab_size = model.limits.vocab_size
        slab = empty_slab(model.layout(sizes.block_size), sizes.num_blocks, model.device)
        graph_limits = None
        self._cpu_clock = time.thread_time
        if model.device.type == "cuda":
            graph_limits = DecodeLimits(max(sizes.batches), max(sizes.contexts))
            self._cpu_clock = time.perf_counter  # the host's CPU time says nothing about a GPU
        self._runner = ModelRunner(model, slab, graph_limits)
        slab.normal_()  # zero pages would be one page, and always in the cache
        self._blocks = list(range(sizes.num_blocks - 1))
        self._random = random.Random(0)
        self._random.shuffle(self._blocks)

    def prefill(self, prompt_len: int, chunk: int, repeats: int) -> Timing:
        (sequence,) = self._sequences(1, prompt_len)

        def whole_prompt() -> None:
            sequence.num_computed = 0
            while sequence.num_remaining:
                self._step([sequence], min(chunk, sequence.num_remaining))

        return time_repeats(whole_prompt, repeats, cpu=self._cpu_clock)

    def decode(self, batch: int, context_len: int, repeats: int) -> Timing:
        sequences = self._sequences(batch, context_len)

        def one_step() -> None:
            for sequence in sequences:
                sequence.num_computed = context_len - 1
            self._step(sequences, 1)

        return time_repeats(one_step, repeats, cpu=self._cpu_clock)

    def _step(self, sequences: list[Sequence], num_tokens: int) -> None:
        logits = self._runner.forward(
            build_batch([(sequence, num_tokens) for sequence in sequences], self._block_size)
        )
        for sequence in sequences:
            sequence.num_computed += num_tokens
        done = [s for s in sequences if not s.num_remaining]
        sample(logits, [SampleRequest(_GREEDY, s.spec.prompt_ids, ()) for s in done])

    def _sequences(self, count: int, length: int) -> list[Sequence]:
        """All their blocks differ."""
        per_sequence = -(-length // self._block_size)
        return [
            Sequence(
                call_id=i,
                spec=SequenceSpec(
                    sequence_id=f"s{i}",
                    reply_to="nobody",
                    prompt_ids=tuple(self._random.choices(range(self._vocab_size), k=length)),
                    sampling=_GREEDY,
                ),
                arrived_s=0.0,
                block_table=self._blocks[i * per_sequence : (i + 1) * per_sequence],
            )
            for i in range(count)
        ]


@dataclass(frozen=True)
class _Reason:
    peaks: Peaks
    setting: str

    def of(self, floor: Floor) -> str:
        if floor.reason == "bytes":
            return f"{self.peaks.bytes_per_s / 1e9:.1f} GB/s ({self.setting})"
        return f"{self.peaks.flops_per_s / 1e9:.0f} GFLOP/s ({self.setting})"
