"""The KV handle: a small signed description of what a decode engine may pull, and until when.

Wire form: ``msgpack(KVHandle) + HMAC-SHA256``. Block ids, never addresses; never pickle.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

import msgspec

from tandem import wire
from tandem.errors import InvalidHandle

VERSION = 1
_MAC_BYTES = 32


class KVHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the prefill engine leaves for exactly one decode engine.

    ``num_tokens`` tokens are computed in ``block_ids``; ``first_token`` is sampled but not
    computed. The lease is ``(slot, generation)`` on the exporter's board; it is what decides
    whether the blocks still hold this sequence. ``expires_unix_s`` only bounds how long a stolen
    handle is worth trying.
    """

    version: int
    incarnation: str
    transport: str
    endpoint: str
    fingerprint: str
    block_ids: tuple[int, ...]
    num_tokens: int
    slot: int
    generation: int
    expires_unix_s: float
    sequence_id: str
    first_token: int


_decoder = wire.decoder(KVHandle)


def sign(handle: KVHandle, secret: bytes) -> bytes:
    payload = wire.encode(handle)
    return payload + hmac.digest(secret, payload, sha256)


def verify(blob: bytes, secret: bytes, *, now_unix_s: float) -> KVHandle:
    """The handle in ``blob``; raises ``InvalidHandle`` before anything in it is believed."""
    payload, mac = blob[:-_MAC_BYTES], blob[-_MAC_BYTES:]
    if len(mac) != _MAC_BYTES or not hmac.compare_digest(mac, hmac.digest(secret, payload, sha256)):
        raise InvalidHandle("the signature does not match: truncated, forged or another deployment")
    try:
        handle = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise InvalidHandle(f"cannot be decoded: {error}") from error
    if handle.version != VERSION:
        raise InvalidHandle(f"version {handle.version}, this engine reads version {VERSION}")
    if handle.expires_unix_s < now_unix_s:
        raise InvalidHandle(f"expired {now_unix_s - handle.expires_unix_s:.1f} s ago")
    return handle
