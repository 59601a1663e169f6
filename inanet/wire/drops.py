"""Why a packet was dropped: one named reason for every drop.

The same name is the metric label (``inanet_packets_dropped_total{reason=...}``), the trace field and what tests
assert on. Codes index the counter arrays that the kernels increment, so their order is part of the kernels' contract.
"""

from enum import IntEnum


class Drop(IntEnum):
    """Reason code of a packet; ``OK`` means it was not dropped."""

    OK = 0
    #: shorter than a header, or not the exact length its type requires
    SHORT = 1
    #: longer than its type allows
    OVERSIZED = 2
    #: first byte is not the framing's magic and version
    BAD_MAGIC = 3
    #: packet type unknown to this framing version, or not expected by this role
    BAD_TYPE = 4
    #: job id this node takes no part in
    FOREIGN_JOB = 5
    #: header tag does not match the job's key: forged, corrupted or from an earlier epoch
    BAD_TAG = 6
    #: payload checksum mismatch
    BAD_CHECKSUM = 7
    #: shard id not (or no longer) known for this job
    UNKNOWN_SHARD = 8
    #: fragment or group index beyond the shard
    BAD_FRAGMENT = 9
    #: host id is not one bit of a child of this node, or arrives from another address than that child's
    FOREIGN_HOST = 10
    #: plan version older than the one its host id was issued under, or a retired host id
    STALE_PLAN = 11
    #: plan version this node has not received yet; the sender repeats it
    FUTURE_PLAN = 12
    #: round older than the slot's (serial-number arithmetic)
    STALE_ROUND = 13
    #: round this node has not opened yet: some child has not confirmed the round before
    NOT_OPEN = 14
    #: attempt older than the slot's
    STALE_ATTEMPT = 15
    #: attempt newer than any this node was told of
    FUTURE_ATTEMPT = 16
    #: this host's contribution, or this result, is already there
    DUPLICATE = 17
    #: receive queue of the kernel overflowed before this process read it (counted, never seen)
    KERNEL_OVERFLOW = 18
    #: removed by the fault injector of phy/fault
    INJECTED = 19
    #: index of a slot outside the job's share of the switch
    BAD_SLOT = 20
    #: sequence number older than what its slot, or its place in the PS's table, holds
    STALE_SEQUENCE = 21
    #: partial sum that shares some workers, but not all of them, with what has been added already (leaf bitmaps)
    OVERLAP = 22
    #: answer or request for a slot that no longer holds that fragment
    UNMATCHED = 23
    #: switch: no port leads to where the packet is bound, or the one it came from does
    NO_ROUTE = 24
    #: switch: the egress queue of its port is full (tail drop)
    QUEUE_FULL = 25
    #: switch: the kernel had no room for it at its port
    EGRESS_FULL = 26
    #: switch: needs more passes through the pipeline than the hardware allows
    TOO_MANY_PASSES = 27
    #: switch: its time to live ended here
    TTL_EXPIRED = 28
    #: NetReduce: packet of a ring whose message is not known: the first packet of that was lost, or the switch's tables
    UNRESOLVED = 29
    #: NetReduce: message older than the one that has taken over its place, or not where its connection is by now
    STALE_MSG = 30
    #: NetReduce: message with an INA header on a connection that carries plain ones, or the other way round
    OTHER_MODE = 31
    #: RoCE: the invariant CRC does not match
    BAD_ICRC = 32
    #: RoCE: no queue pair of that number here, or not connected to the address that it came from
    UNKNOWN_QP = 33
    #: RoCE: the queue pair's state does not let it take packets
    WRONG_STATE = 34
    #: RoCE: packets are missing before this one; the requester goes back to them
    PSN_GAP = 35
    #: RoCE: needs a posted receive, and there is none; the requester tries again later
    NOT_READY = 36
    #: RoCE: breaks the rules of requests or the bounds of a memory region; the connection ends
    REFUSED = 37

    @property
    def label(self) -> str:
        """Metric label, lower case."""
        return self.name.lower()


#: Size of a counter array indexed by :class:`Drop`.
DROP_CODES = len(Drop)
