"""The calls of the CUDA runtime that moving KV takes, under the names that cupy gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from tandem.errors import ConfigError

MEMCPY_DEFAULT = 4  # the runtime sees from the addresses where each side is
STREAM_NON_BLOCKING = 1  # no implicit waits for the stream that the model computes on
EVENT_DISABLE_TIMING = 2
LAZY_PEER_ACCESS = 1
SUCCESS, NOT_READY = 0, 600


class CudaRuntime(Protocol):
    """``cupy.cuda.runtime``, or a fake of it. A failed call raises a ``RuntimeError``, but for
    ``eventQuery``, which returns the status.
    """

    def setDevice(self, device: int) -> None: ...  # of the calling thread
    def getDeviceCount(self) -> int: ...
    def getDeviceProperties(self, device: int) -> Mapping[str, Any]: ...
    def deviceCanAccessPeer(self, device: int, peer: int) -> int: ...
    def malloc(self, size: int) -> int: ...  # cudaMalloc itself: no pool, so IPC can export it
    def free(self, address: int) -> None: ...
    def memset(self, address: int, value: int, size: int) -> None: ...
    def memcpy(self, to: int, source: int, size: int, kind: int) -> None: ...
    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None: ...
    def deviceSynchronize(self) -> None: ...
    def ipcGetMemHandle(self, address: int) -> bytes: ...
    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int: ...
    def ipcCloseMemHandle(self, address: int) -> None: ...
    def streamCreateWithFlags(self, flags: int) -> int: ...
    def streamDestroy(self, stream: int) -> None: ...
    def eventCreateWithFlags(self, flags: int) -> int: ...
    def eventDestroy(self, event: int) -> None: ...
    def eventRecord(self, event: int, stream: int) -> None: ...
    def eventQuery(self, event: int) -> int: ...


def load_runtime() -> CudaRuntime:
    """Raises ``ConfigError`` where there is no cupy or no driver."""
    try:
        from cupy.cuda import runtime

        runtime.getDeviceCount()
    except ImportError as error:
        raise ConfigError(
            f"transport = 'cuda_ipc': pip install 'tandem-triton[cuda]': {error}"
        ) from error
    except RuntimeError as error:
        raise ConfigError(f"transport = 'cuda_ipc': no usable GPU: {error}") from error
    return cast(CudaRuntime, runtime)


def device_uuid(runtime: CudaRuntime, device: int) -> str:
    """32 hex digits, the same in every process; ordinals depend on CUDA_VISIBLE_DEVICES. Padded,
    because some versions of cupy end the bytes at the first zero.
    """
    uuid = bytes(runtime.getDeviceProperties(device)["uuid"])
    return uuid[:16].ljust(16, b"\0").hex()


def device_of_uuid(runtime: CudaRuntime, uuid: str) -> int | None:
    """The ordinal here of that GPU; None if it is not visible, or not the only one so called."""
    matches = [d for d in range(runtime.getDeviceCount()) if device_uuid(runtime, d) == uuid]
    return matches[0] if len(matches) == 1 else None
