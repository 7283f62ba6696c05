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
_GEMM_ROWS, _GEMM_SIZE = 512, 2048


@torch.inference_mode()
def measure_peaks(
    dtype: torch.dtype, repeats: int, read_bytes: int = READ_BYTES, gemm_size: int = _GEMM_SIZE
) -> Peaks:
    """With the threads that torch has now."""
    # Written once: untouched pages of zeros would all be one page, and in the cache.
    columns = 1024
    matrix = torch.randn(read_bytes // dtype.itemsize // columns, columns).to(dtype)
    vector = torch.randn(columns).to(dtype)
    read_s = _best([lambda: matrix.sum(), lambda: matrix @ vector], repeats)
    rows = torch.randn(_GEMM_ROWS, gemm_size).to(dtype)
    weight = torch.randn(gemm_size, gemm_size).to(dtype)
    products: list[Callable[[], object]] = [lambda: rows @ weight, lambda: rows @ weight.T]
    products += _packed_product(rows, weight)
    product_s = _best(products, repeats)
    return Peaks(
        bytes_per_s=matrix.numel() * dtype.itemsize / read_s,
        flops_per_s=2 * _GEMM_ROWS * gemm_size * gemm_size / product_s,
    )


def _packed_product(rows: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], object]]:
    """oneDNN's product on a weight laid out for it, as the engine uses; none where it has none."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _GEMM_ROWS)
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no instructions for this dtype; torch without oneDNN
        return []
    return [lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")]


def _best(kernels: list[Callable[[], object]], repeats: int) -> float:
    timings = [time_repeats(kernel, repeats) for kernel in kernels]
    # The CPU time of one thread says what it cost only if there is no other.
    is_alone = torch.get_num_threads() == 1
    return min(timing.best_cpu_s if is_alone else timing.best_s for timing in timings)
