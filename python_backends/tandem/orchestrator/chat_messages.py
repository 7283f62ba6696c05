"""Chat messages in OpenAI's shape, reduced to what a chat template reads."""

from __future__ import annotations

import msgspec

from tandem.errors import InvalidRequest


class _TextPart(
    msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True
):
    text: str


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[_TextPart]
    name: str | None = None


_decoder = msgspec.json.Decoder(list[_Message])


def parse_messages(text: str) -> tuple[dict[str, str], ...]:
    """``role``, ``content`` and ``name`` of each message of a JSON list; at least one message.

    Text parts are joined by a newline, since most chat templates take strings only. Raises
    ``InvalidRequest`` that says where the JSON goes wrong.
    """
    try:
        messages = _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            "messages",
            f'must be a JSON list of {{"role": string, "content": string or text parts}}: {error}',
        ) from error
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message; got an empty list")
    return tuple(_plain(message) for message in messages)


def _plain(message: _Message) -> dict[str, str]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    plain = {"role": message.role, "content": content}
    return plain if message.name is None else plain | {"name": message.name}
