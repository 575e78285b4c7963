"""The two ends of a topic over sockets."""

from asyncrl.transport.receiver import QueueReceiver
from asyncrl.transport.sender import QueueSender

__all__ = ["QueueReceiver", "QueueSender"]
