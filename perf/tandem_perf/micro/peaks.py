"""What this machine reaches with torch: memory bandwidth of reads, and FLOPs of a matrix product.

The best kernel and the best repeat count: a peak that noise lowered would flatter every figure
that stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem_perf.micro.floors import Peaks
from tandem_perf.micro.timing import time_repeats

READ_BYTES = 256 << 20  # far beyond a last-level cache
GEMM_SIZE = 2048
_GEMM_ROWS = 512


@torch.inference_mode()
def measure_peaks(
    dtype: torch.dtype,
    repeats: int,
    read_bytes: int = READ_BYTES,
    gemm_size: int = GEMM_SIZE,
    device: str = "cpu",
) -> Peaks:
    """With the threads that torch has now, or on the current GPU."""
    # Written once: untouched pages of zeros would all be one page, and in the cache.
    columns = 1024
    matrix = torch.randn(read_bytes // dtype.itemsize // columns, columns, device=device).to(dtype)
    vector = torch.randn(columns, device=device).to(dtype)
    read_s = _best([lambda: matrix.sum(), lambda: matrix @ vector], repeats, device)
    num_rows = _GEMM_ROWS if device == "cpu" else gemm_size
    rows = torch.randn(num_rows, gemm_size, device=device).to(dtype)
    weight = torch.randn(gemm_size, gemm_size, device=device).to(dtype)
    products: list[Callable[[], object]] = [lambda: rows @ weight, lambda: rows @ weight.T]
    if device == "cpu":
        products += _packed_product(rows, weight)
    product_s = _best(products, repeats, device)
    return Peaks(
        bytes_per_s=matrix.numel() * dtype.itemsize / read_s,
        flops_per_s=2 * num_rows * gemm_size * gemm_size / product_s,
    )


def _packed_product(rows: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], object]]:
    """oneDNN's product on a weight laid out for it, as the engine uses; none where it has none."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _GEMM_ROWS)
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no instructions for this dtype; torch without oneDNN
        return []
    return [lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")]


def _best(kernels: list[Callable[[], object]], repeats: int, device: str) -> float:
    if device != "cpu":
        return min(_best_on_gpu(kernel, repeats) for kernel in kernels)
    timings = [time_repeats(kernel, repeats) for kernel in kernels]
    # The CPU time of one thread says what it cost only if there is no other.
    is_alone = torch.get_num_threads() == 1
    return min(timing.best_cpu_s if is_alone else timing.best_s for timing in timings)


def _best_on_gpu(kernel: Callable[[], object], repeats: int) -> float:
    """By events in the stream, so that the launch is not counted."""
    kernel()
    seconds = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        kernel()
        end.record()
        end.synchronize()
        seconds.append(float(start.elapsed_time(end)) / 1e3)
    return min(seconds)
