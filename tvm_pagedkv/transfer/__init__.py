# SPDX-License-Identifier: Apache-2.0
"""Transfer of K and V from one cache to another, for disaggregated prefill and decode.

A `Receiver` requests the rows of a sequence, and a `Sender` offers them as they are computed. A
`Channel` connects the two: `local_channels` within a process, `SharedMemoryChannel` between
processes of a host, `NixlChannel` over NIXL.
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
