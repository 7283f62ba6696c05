import hmac
import pickle
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from tandem.errors import ErrorCode, InvalidHandle
from tandem.kv.handle import VERSION, KVHandle, sign, verify

SECRET = b"the deployment's secret"
EXPIRES_S = 1000.0
NOW_S = 900.0


def _handle(**changes: Any) -> KVHandle:
    fields: dict[str, Any] = {
        "version": VERSION,
        "incarnation": "abcd",
        "transport": "shm",
        "endpoint": "12:3",
        "fingerprint": "f",
        "block_ids": (5, 4, 9),
        "num_tokens": 40,
        "slot": 2,
        "generation": 7,
        "expires_unix_s": EXPIRES_S,
        "sequence_id": "r.0",
        "first_token": 11,
    }
    return KVHandle(**(fields | changes))


def _signed(payload: bytes) -> bytes:
    return payload + hmac.digest(SECRET, payload, sha256)


def test_a_handle_comes_back_as_it_was_signed() -> None:
    handle = _handle()
    assert verify(sign(handle, SECRET), SECRET, now_unix_s=NOW_S) == handle


def test_every_single_bit_flip_is_refused() -> None:
    blob = sign(_handle(), SECRET)
    for index in range(len(blob)):
        for bit in range(8):
            forged = bytearray(blob)
            forged[index] ^= 1 << bit
            with pytest.raises(InvalidHandle):
                verify(bytes(forged), SECRET, now_unix_s=NOW_S)


def test_every_truncation_is_refused() -> None:
    blob = sign(_handle(), SECRET)
    for length in range(len(blob)):
        with pytest.raises(InvalidHandle, match="signature"):
            verify(blob[:length], SECRET, now_unix_s=NOW_S)
        with pytest.raises(InvalidHandle, match="signature"):
            verify(blob[length + 1 :], SECRET, now_unix_s=NOW_S)


def test_appended_bytes_are_refused() -> None:
    with pytest.raises(InvalidHandle, match="signature"):
        verify(sign(_handle(), SECRET) + b"\0", SECRET, now_unix_s=NOW_S)


@pytest.mark.parametrize("secret", [b"another deployment", b"", SECRET[:-1]])
def test_another_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(InvalidHandle, match="signature"):
        verify(sign(_handle(), secret), SECRET, now_unix_s=NOW_S)


def test_it_is_good_until_the_second_in_which_it_expires() -> None:
    blob = sign(_handle(), SECRET)
    assert verify(blob, SECRET, now_unix_s=EXPIRES_S).slot == 2
    with pytest.raises(InvalidHandle, match="expired"):
        verify(blob, SECRET, now_unix_s=EXPIRES_S + 0.001)
    with pytest.raises(InvalidHandle, match=r"expired 2\.5 s ago"):
        verify(blob, SECRET, now_unix_s=EXPIRES_S + 2.5)


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(InvalidHandle, match=f"version {version}, .* version {VERSION}"):
        verify(sign(_handle(version=version), SECRET), SECRET, now_unix_s=NOW_S)


def test_an_unknown_or_a_missing_field_is_refused() -> None:
    fields = msgspec.to_builtins(_handle())
    unknown = fields | {"address": 0xDEADBEEF}
    missing = {name: value for name, value in fields.items() if name != "generation"}
    for named, changed in (("address", unknown), ("generation", missing)):
        with pytest.raises(InvalidHandle, match=named):
            verify(_signed(msgspec.msgpack.encode(changed)), SECRET, now_unix_s=NOW_S)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x81\xa7version\xa1\xff",  # not UTF-8
        pickle.dumps({"version": 1}),
        msgspec.json.encode(_handle()),
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
    ],
)
def test_signed_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidHandle, match="cannot be decoded"):
        verify(_signed(payload), SECRET, now_unix_s=NOW_S)


def test_a_pickle_is_never_loaded() -> None:
    """A pickle that would raise something else, were it ever loaded."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, ("raise SystemExit('loaded')",))

    for blob in (pickle.dumps(Bomb()), _signed(pickle.dumps(Bomb()))):
        with pytest.raises(InvalidHandle):
            verify(blob, SECRET, now_unix_s=NOW_S)


def test_a_refused_handle_is_the_fault_of_whoever_sent_it() -> None:
    with pytest.raises(InvalidHandle) as refused:
        verify(b"", SECRET, now_unix_s=NOW_S)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.field == "handle"
