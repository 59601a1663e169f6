"""The kernel that judges packets on the data path agrees with the plain decoder, packet by packet and reason by reason."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inanet.kernels.header import tag_of
from inanet.proto.tree.engine import tables_of
from inanet.proto.tree.slots import SlotMemory
from inanet.proto.tree.xagg import policy
from inanet.wire.drops import Drop
from inanet.wire.integrity import header_tag
from inanet.wire.xagg import Kind, MalformedPacket, Packet, body_bytes, decode

JOBS = {0: 0, 65535: 2**64 - 1, 77: 0x0123_4567_89AB_CDEF}


def make_tables():
    memory = SlotMemory(1)
    for job, key in JOBS.items():
        memory.add_job(job, 1, key)
    return tables_of(memory)


TABLES = make_tables()


def judge(data: bytes) -> Drop:
    """The kernel's reason for one packet, which lies in the middle of an arena."""
    arena = np.full(len(data) // 4 + 9, -1, np.int32)
    arena.view(np.uint8)[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
    return Drop(policy.parse(TABLES, arena, 8, len(data)))


def expected(data: bytes) -> Drop:
    """What the plain decoder says; it takes the job's key from elsewhere, so a job without one is its caller's affair."""
    job = int.from_bytes(data[2:4], "little")
    try:
        decode(data, JOBS.get(job, 0))
    except MalformedPacket as error:
        reason = Drop[error.reason.upper()]
        if reason in (Drop.BAD_TAG, Drop.BAD_CHECKSUM) and job not in JOBS:
            return Drop.FOREIGN_JOB
        return reason
    return Drop.OK if job in JOBS else Drop.FOREIGN_JOB


def some_packet(rng: np.random.Generator) -> bytes:
    kind = Kind(int(rng.integers(1, 12)))
    job = int(rng.choice([0, 65535, 77, 78]))
    fields = [int(rng.integers(0, 1 << bits)) for bits in (32, 32, 32, 16, 8, 8)]
    return Packet(kind, job, *fields, rng.bytes(body_bytes(kind))).encode(JOBS.get(job, 5))


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    damaged = bytearray(data)
    what = int(rng.integers(0, 7))
    if what == 0:
        return data
    if what == 1:
        return bytes(damaged[: int(rng.integers(0, len(data)))])
    if what == 2:
        return data + rng.bytes(int(rng.integers(1, 1100)))
    if what == 3:
        damaged[int(rng.integers(0, 2))] = int(rng.integers(0, 256))
        return bytes(damaged)
    if what == 4:
        # the tag of the new job or kind, so that the decision falls later
        damaged[1] = int(rng.integers(0, 256))
        words = tuple(int(w) for w in np.frombuffer(bytes(damaged[:20]), "<u4"))
        key = JOBS.get(words[0] >> 16, 5)
        damaged[20:24] = header_tag(words, key).to_bytes(4, "little")
        return bytes(damaged)
    for _ in range(int(rng.integers(1, 4))):
        bit = int(rng.integers(0, (24 if what == 5 else len(data)) * 8))
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_kernel_and_decoder_give_the_same_reason_for_thousands_of_mutants():
    rng = np.random.default_rng(11)
    seen: dict[Drop, int] = {}
    for _ in range(6000):
        data = mutate(some_packet(rng), rng)
        want = expected(data)
        assert judge(data) == want, (want, data[:28].hex(), len(data))
        seen[want] = seen.get(want, 0) + 1
    reasons = (
        Drop.OK,
        Drop.SHORT,
        Drop.OVERSIZED,
        Drop.BAD_MAGIC,
        Drop.BAD_TYPE,
        Drop.FOREIGN_JOB,
        Drop.BAD_TAG,
    )
    assert all(seen.get(reason, 0) > 30 for reason in (*reasons, Drop.BAD_CHECKSUM)), seen


@given(st.binary(max_size=1200))
def test_kernel_and_decoder_agree_on_random_bytes(data):
    assert judge(data) == expected(data)


@given(st.tuples(*[st.integers(0, 0xFFFFFFFF)] * 5), st.integers(0, 2**64 - 1))
def test_both_tags_are_the_same_function(words, key):
    assert tag_of(*words, key) == header_tag(words, key)


def test_a_packet_that_is_not_aligned_is_refused():
    data = some_packet(np.random.default_rng(0))
    arena = np.zeros(len(data) // 4 + 2, np.int32)
    arena.view(np.uint8)[1 : 1 + len(data)] = np.frombuffer(data, np.uint8)
    assert policy.parse(TABLES, arena, 1, len(data)) == Drop.SHORT
