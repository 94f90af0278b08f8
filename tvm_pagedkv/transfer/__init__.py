# SPDX-License-Identifier: Apache-2.0
"""K and V of a sequence from one cache to another: prefill in one place, decode in another.

A `Receiver` requests the rows of a sequence, a `Sender` sends them as they are computed; between
them lies a `Channel`: `local_channels` within a process, `SharedMemoryChannel` between processes of
a host, `NixlChannel` over NIXL.
"""

from .channel import (
    AuthenticationError,
    Channel,
    ChannelClosed,
    MessageError,
    TransferError,
    TransferTimeout,
    local_channels,
)
from .connections import Listener
from .nixl import NixlChannel
from .receiver import Receiver, Ticket
from .requests import Request
from .sender import Send, Sender
from .shared_memory import SharedMemoryChannel

__all__ = [
    "AuthenticationError",
    "Channel",
    "ChannelClosed",
    "Listener",
    "MessageError",
    "NixlChannel",
    "Receiver",
    "Request",
    "Send",
    "Sender",
    "SharedMemoryChannel",
    "Ticket",
    "TransferError",
    "TransferTimeout",
    "local_channels",
]
