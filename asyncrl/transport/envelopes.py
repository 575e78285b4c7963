"""A message with its ids on the outside and its frames as one payload, and back."""

from __future__ import annotations

from asyncrl.errors import MalformedFrame
from asyncrl.messages.codec import Frame, Message, envelope, from_payload, to_payload
from asyncrl.transport.records import Incoming


def pack(message: Message) -> Incoming:
    """Raises MalformedFrame for a message that its receiver would refuse."""
    message_id, group_id = envelope(message)
    return Incoming(message_id, group_id, to_payload(message))


def unpack(message_id: str, payload: Frame) -> Message:
    """Raises a FrameError for a payload that is no message, or another than its envelope says."""
    message = from_payload(payload)
    found = str(message.id)
    if found != message_id:
        raise MalformedFrame(f"the envelope says {message_id}, the message {found}")
    return message
