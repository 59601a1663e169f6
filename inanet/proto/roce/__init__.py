"""RoCEv2 in user space: reliable connections that carry RDMA WRITEs. It knows nothing of aggregation."""

from inanet.proto.roce.queue_pair import ChannelAdapter, QueuePair
from inanet.proto.roce.verbs import (
    Access,
    AsyncError,
    Attributes,
    Completion,
    Drained,
    Event,
    Failed,
    MemoryRegion,
    Peer,
    ProtectionDomain,
    Received,
    State,
    Status,
)

__all__ = [
    "Access",
    "AsyncError",
    "Attributes",
    "ChannelAdapter",
    "Completion",
    "Drained",
    "Event",
    "Failed",
    "MemoryRegion",
    "Peer",
    "ProtectionDomain",
    "QueuePair",
    "Received",
    "State",
    "Status",
]
