"""The attention of GPUs, around the calls that need one; and what happens where they fail."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fake_kernels import FLASHINFER, varlen
from tandem.engine.attention import AttentionOptions
from tandem.engine.attention_choice import KERNELS, choose_attention, kernel_error
from tandem.engine.batch import SequenceSlice
from tandem.engine.block_attention import BlockAttention, GraphShape
from tandem.engine.kernels.flashinfer import FlashInferKernels
from tandem.engine.kernels.varlen import VarlenKernel
from tandem.engine.sequence_attention import SequenceAttention
from tandem.engine.step_inputs import FreshInputs, StaticInputs

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_HEADS = 6  # of queries, to 2 of keys
SLAB = torch.zeros(4, 3, 2, BLOCK_SIZE, 2, 16)
OPTIONS = (AttentionOptions(0.25, None), AttentionOptions(0.3, 2 * BLOCK_SIZE))
SOFTCAPPED = (*OPTIONS, AttentionOptions(0.25, 4, softcap=2.0))


def varlen_kernels(function=varlen):
    return partial(VarlenKernel, varlen=function)


def test_one_call_a_layer_computes_what_each_sequence_alone_does():
    assert kernel_error(varlen_kernels(), SLAB, NUM_HEADS, OPTIONS) < 1e-5
    assert kernel_error(FlashInferKernels(FLASHINFER, CPU), SLAB, NUM_HEADS, SOFTCAPPED) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda window: (window[0], 0) if window[0] < 0 else (window[0] + 1, 0),  # a key too many
        lambda window: (window[0], 0) if window[0] < 0 else (window[0] - 1, 0),  # one too few
        lambda window: (-1, -1),  # sees the future
    ],
    ids=["wide", "narrow", "not causal"],
)
def test_a_kernel_with_another_mask_is_not_used(wrong, caplog):
    def kernel(*args, window_size, **options):
        return varlen(*args, window_size=wrong(window_size), **options)

    choice = choose_attention(
        SLAB, NUM_HEADS, OPTIONS, None, {"wrong": lambda _: varlen_kernels(kernel)}
    )
    assert isinstance(choice.attention, SequenceAttention) and choice.new_kernel is None
    assert "attention: not wrong: it is" in caplog.text
    assert "gathered for each sequence" in caplog.text


def test_a_kernel_that_reads_what_no_token_wrote_is_not_used(caplog):
    def kernel(*args, seqused_k, **options):
        return varlen(*args, seqused_k=seqused_k + 1, **options)

    choice = choose_attention(
        SLAB, NUM_HEADS, OPTIONS, None, {"greedy": lambda _: varlen_kernels(kernel)}
    )
    assert choice.new_kernel is None
    assert "attention: not greedy: it is nan off" in caplog.text


def test_the_first_kernel_that_works_is_used(caplog):
    def broken(*args, **options):
        raise RuntimeError("no kernel image")

    new_kernel = varlen_kernels()
    kernels = {
        "missing": KERNELS["FlashInfer"],
        "broken": lambda _: varlen_kernels(broken),
        "good": lambda _: new_kernel,
        "never tried": lambda _: pytest.fail("a kernel was found already"),
    }
    with caplog.at_level("INFO"):
        choice = choose_attention(SLAB, NUM_HEADS, OPTIONS, None, kernels)
    assert isinstance(choice.attention, BlockAttention) and choice.new_kernel is new_kernel
    assert "attention: not missing: ModuleNotFoundError" in caplog.text
    assert "attention: not broken: RuntimeError: no kernel image" in caplog.text
    assert "attention: good, one call a layer" in caplog.text


def test_softcapped_layers_need_a_kernel_that_has_it(caplog):
    kernels = {"varlen": lambda _: varlen_kernels()}
    assert choose_attention(SLAB, NUM_HEADS, SOFTCAPPED, None, kernels).new_kernel is None
    assert "no softcap" in caplog.text


def test_torchs_kernel_refuses_what_it_cannot_do_and_the_engine_goes_on(caplog):
    """The call itself, with its real signature: there is no such kernel for a CPU."""
    kernels = {"torch": KERNELS["torch varlen_attn"]}
    assert choose_attention(SLAB, NUM_HEADS, OPTIONS, None, kernels).new_kernel is None
    assert "attention: not torch: NotImplementedError" in caplog.text
    assert isinstance(choose_attention(SLAB, NUM_HEADS, OPTIONS, None).attention, SequenceAttention)


def test_tables_of_a_graph_are_as_wide_as_those_of_the_longest_sequence():
    seen = {}

    def kernel(*args, **options):
        seen.update(options, max_q=args[5], max_k=args[6])
        return varlen(*args, **options)

    inputs = StaticInputs(CPU)
    attend = VarlenKernel(SLAB, inputs, GraphShape(3, 4), varlen=kernel)
    query = torch.randn(3, 4, 16)
    parts = [SequenceSlice(1, 9, [3, 1]), SequenceSlice(1, 8, [2, 0]), SequenceSlice(1, 1, [0])]
    attend.start(parts)
    attend.attend(1, query, 0.25, None, None)
    table = seen["block_table"]
    assert table.tolist() == [[3, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert seen["seqused_k"].tolist() == [9, 8, 1]
    assert (seen["max_q"], seen["max_k"]) == (1, 4 * BLOCK_SIZE)
    assert seen["window_size"] == (-1, -1), "one query sees all its keys without a mask"
    attend.start(parts[::-1])
    attend.attend(1, query, 0.25, 4, None)
    assert seen["block_table"].data_ptr() == table.data_ptr()
    assert table.tolist() == [[0, 0, 0, 0], [2, 0, 0, 0], [3, 1, 0, 0]]
    assert seen["window_size"] == (3, 0), "the window counts the query itself"


def test_static_inputs_stay_where_they_are_and_keep_their_length():
    static = StaticInputs(CPU)
    first = static.put("slots", [1, 2, 3])
    again = static.put("slots", [7, 8, 9])
    assert again is first and first.tolist() == [7, 8, 9]
    with pytest.raises(AssertionError, match="slots"):
        static.put("slots", [1])
    fresh = FreshInputs(CPU)
    old = fresh.put("slots", [1, 2, 3])
    assert fresh.put("slots", [4]).tolist() == [4] and old.tolist() == [1, 2, 3]
