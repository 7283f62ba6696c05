"""Whatever is sent, is answered: no crash, no traceback, no fault inside, and nothing stays held.

About 20 s; TANDEM_TEST_EXAMPLES=2000 for a long search.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from running_server import held_blocks, metric, wait_until
from server_processes import processes
from tandem import wire
from tandem.orchestrator.contract_fields import FIELDS
from tandem.types import SamplingParams
from tandem_cli.runtime_dir import SHM
from tandem_cli.server import TandemServer
from triton_calls import Answer, ask, post, stream_infer

NUM_EXAMPLES = int(os.environ.get("TANDEM_TEST_EXAMPLES", "60"))
SOME = settings(max_examples=NUM_EXAMPLES)
TEXT = "hello the world"
MIB = 1 << 20
STATES = ("free", "cached")


def num_available(server: TandemServer) -> float:
    return sum(metric(server, "tandem_kv_blocks", state=state) for state in STATES)


@pytest.fixture(scope="module", autouse=True)
def unharmed(tiny_server: TandemServer) -> Iterator[None]:
    """Afterwards the same processes run, nothing is held and a normal request works."""
    wait_until(lambda: held_blocks(tiny_server) == 0)
    before = {name: process.pid for name, process in processes(tiny_server).items()}
    num_blocks = num_available(tiny_server)
    yield
    wait_until(lambda: metric(tiny_server, "tandem_requests_live") == 0)
    wait_until(lambda: num_available(tiny_server) == num_blocks)
    assert {name: process.pid for name, process in processes(tiny_server).items()} == before
    assert ask(tiny_server, "generate", {"text_input": TEXT, "max_tokens": 2}).error is None


def assert_handled(answer: Answer) -> None:
    """An answer to its end, or an error that is not a fault of ours."""
    if answer.error is None:
        assert answer.responses
        return
    assert answer.error
    for word in ("Traceback", 'File "', "[INTERNAL]"):
        assert word not in answer.error, answer.error


# ---- HTTP ------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3.5, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64, 10**30]
    + [float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, -0.0]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from([*FIELDS, "parameters", "id", "triton_x"]) | st.text(max_size=12)


@given(changes=st.dictionaries(NAMES, JSON, min_size=1, max_size=3), as_json=st.booleans())
@SOME
def test_any_json(tiny_server: TandemServer, changes: dict[str, Any], as_json: bool) -> None:
    """As inputs and parameters, or inside ``sampling_parameters``."""
    body: dict[str, Any] = {"text_input": TEXT, "max_tokens": 2}
    if as_json:
        body["sampling_parameters"] = json.dumps(changes)
    else:
        body |= changes
    answer = post(tiny_server, "llm/generate", body)
    assert_handled(answer)
    assert answer.status in (200, 400, 500)  # Triton 24.10 answers JSON of a wrong type with 500


@given(body=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@SOME
def test_any_body(tiny_server: TandemServer, body: bytes) -> None:
    reply = httpx.post(
        f"{tiny_server.http_url}/v2/models/llm/generate", content=body, timeout=30, verify=False
    )
    assert reply.status_code in (200, 400, 500)
    assert "Traceback" not in reply.text


LARGE = "x" * (10 * MIB)
DEEP = "[" * 100_000


@pytest.mark.parametrize("protocol", ["generate", "grpc"])
@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"text_input": LARGE}, "text_input: must be at most 1000000 bytes"),
        ({"messages": LARGE}, "messages: must be at most 1000000 bytes"),
        ({"messages": DEEP}, "messages: "),
        ({"messages": '[{"role": "user", "content": ' + DEEP}, "messages: "),
        ({"sampling_parameters": LARGE}, "sampling_parameters: "),
        ({"sampling_parameters": '{"stop": ' + DEEP[:60_000]}, "sampling_parameters: "),
        ({"stop": [LARGE]}, "stop: "),
        ({"cache_salt": LARGE}, "cache_salt: "),
        ({"input_ids": [1] * 1_000_000}, "input_ids: "),
        ({"stop_token_ids": [1] * 1_000_000}, "stop_token_ids: "),
        ({"stop": ["a"] * 100_000}, "stop: "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_too_much(
    tiny_server: TandemServer, protocol: str, inputs: dict[str, Any], named: str
) -> None:
    prompts = {"text_input", "messages", "input_ids"}
    if not prompts & inputs.keys():
        inputs = {"text_input": TEXT} | inputs
    answer = ask(tiny_server, protocol, inputs | {"max_tokens": 2})
    assert_handled(answer)
    assert answer.error is not None and f"[INVALID_ARG] {named}" in answer.error
    assert len(answer.error) < 2000, "the answer does not repeat it"


# ---- gRPC ------------------------------------------------------------------------------------

ELEMENTS = {"INT32": 4, "INT64": 8, "FP32": 4, "BOOL": 1, "BYTES": 4, "UINT8": 1, "FP64": 8}
WILD_BYTES = st.binary(max_size=40) | st.sampled_from(
    [b"\xff" * 4, b"\0" * 4, b"\x04\0\0\0caf\xe9", b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", b"\1"]
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, str, list[int], bytes]:
    """A tensor of ``llm`` whose type, shape and bytes may or may not fit each other."""
    name = draw(st.sampled_from(sorted(FIELDS)))
    datatype = FIELDS[name].data_type.name if draw(st.booleans()) else draw(_DATATYPES)
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, -1, 2**40]), max_size=3))
    data = draw(WILD_BYTES)
    if draw(st.booleans()):  # at least the right number of bytes
        count = 1
        for size in shape:
            count *= size
        size = max(0, min(count, 100)) * ELEMENTS[datatype]
        data = (data * (size + 1))[:size]
    return name, datatype, shape, data


_DATATYPES = st.sampled_from(sorted(ELEMENTS))


@given(wild=st.lists(tensors(), min_size=1, max_size=2, unique_by=lambda tensor: tensor[0]))
@SOME
def test_any_tensors(
    tiny_server: TandemServer, wild: list[tuple[str, str, list[int], bytes]]
) -> None:
    request = service_pb2.ModelInferRequest(model_name="llm")
    given_names = {name for name, *_ in wild}
    ids = (5).to_bytes(4, "little") * 3
    known = [("input_ids", "INT32", [3], ids), ("max_tokens", "INT32", [1], b"\2\0\0\0")]
    for name, datatype, shape, data in [*(t for t in known if t[0] not in given_names), *wild]:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    try:
        answer = stream_infer(tiny_server, request)
    except grpc.RpcError as error:  # refused by Triton's front end
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    else:
        assert_handled(answer)


# ---- what only llm should call -----------------------------------------------------------------


def a_spec(**changes: Any) -> dict[str, Any]:
    spec = wire.SequenceSpec(
        sequence_id="fuzz.0",
        reply_to="llm_0_0",
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=1),  # the first token is the last: no lease stays
    )
    return dict(msgspec.to_builtins(spec)) | changes


@st.composite
def specs(draw: st.DrawFn) -> bytes:
    spec = a_spec(sequence_id=f"fuzz.{draw(st.integers(0, 2**32))}")
    name = draw(st.sampled_from([*spec, "unknown"]))
    if name == "sampling" and draw(st.booleans()):
        field = draw(st.sampled_from([f for f in SamplingParams.__struct_fields__]))
        value = 1 if field == "max_tokens" else draw(JSON.filter(_is_msgpack))
        spec["sampling"] = spec["sampling"] | {field: value}
    elif name in ("prompt_ids", "output_ids"):
        spec[name] = draw(st.lists(st.integers(-5, 2**31), max_size=8))
    else:
        spec[name] = draw(JSON.filter(_is_msgpack))
    encoded = bytearray(msgspec.msgpack.encode(spec))
    if draw(st.integers(0, 3)) == 0:
        encoded[draw(st.integers(0, len(encoded) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(encoded)


def _is_msgpack(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@given(
    model=st.sampled_from(["prefill", "decode"]),
    spec=specs() | st.binary(max_size=64),
    handle=st.just(b"") | st.binary(max_size=64),
)
@SOME
def test_any_call_of_the_pools(
    tiny_server: TandemServer, model: str, spec: bytes, handle: bytes
) -> None:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in (("request", spec), ("handle", handle)):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        tensor.contents.bytes_contents.append(value)
    with grpc.insecure_channel(tiny_server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=30)
        except grpc.RpcError as error:
            allowed = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED)
            assert error.code() in allowed, error
            assert "Traceback" not in error.details()


def test_internal_memory_cannot_be_registered(tiny_server: TandemServer) -> None:
    """The KV cache has no name; the regions of Triton's stubs have one, and the API is closed."""
    regions = list(SHM.glob(f"{tiny_server.runtime_dir.shm_prefix}*"))
    assert regions
    for region in regions:
        body = {"key": f"/{region.name}", "offset": 0, "byte_size": 64}
        url = f"{tiny_server.http_url}/v2/systemsharedmemory/region/spy/register"
        assert httpx.post(url, json=body, timeout=10, verify=False).status_code == 403
        message = service_pb2.SystemSharedMemoryRegisterRequest(
            name="spy", key=f"/{region.name}", offset=0, byte_size=64
        )
        with grpc.insecure_channel(tiny_server.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError, match="restricted"):
                stub.SystemSharedMemoryRegister(message, timeout=10)


def test_nothing_of_it_is_open_to_other_users(tiny_server: TandemServer) -> None:
    """But Triton's regions in /dev/shm: it gives them mode 0644, whatever the umask says."""
    folder = tiny_server.runtime_dir.path
    for path in (folder, *(f for f in folder.iterdir() if not f.is_dir())):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_ps_shows_no_secret(tiny_server: TandemServer) -> None:
    secret = (tiny_server.runtime_dir.path / "secret").read_bytes()
    assert len(secret) == 32
    for process in processes(tiny_server).values():
        command = "\0".join(process.cmdline()).encode()
        assert secret not in command and secret.hex().encode() not in command
