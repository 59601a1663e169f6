/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the kernel program and user space share: the one source of these layouts.
 *
 * The numpy side is inanet/proto/tree/slots.py (tables), inanet/wire/xagg.py (packets) and inanet/xdp/memory.py; a test
 * compares all of them with the BTF of the compiled object. Everything is little-endian. Arrays are ordered by the
 * size of their elements, so that no padding is needed anywhere.
 */
#ifndef INANET_XDP_LAYOUT_H
#define INANET_XDP_LAYOUT_H

#include <linux/types.h>

/* Values per packet: XAgg, section IV-A. Other sizes are compiled only to measure how the cost grows. */
#ifndef VALUES
#define VALUES 256
#endif

#define MAGIC_VERSION 0xA2
#define HEADER_WORDS 6
#define HEADER_BYTES 24
#define ROW_BYTES (HEADER_BYTES + VALUES * 4 + 4)
#define CONTROL_BYTES 36
#define LOST_BYTES 156
#define GROUP_SHIFT 10
/* of the word with the fragment's index; above them is the exponent that the block needs */
#define INDEX_BITS 24

/* a slot's `misfit` bits, from contributions: too large for their exponent; large enough for it to be right */
enum verdict_bit { BLOCK_MISFIT = 1, BLOCK_LARGE = 2 };

#define MAX_JOBS 64
#define MAX_SHARDS_PER_JOB 4096
#define MAX_TREES 256
#define MAX_SHARDS 16384
#define MAX_CPUS 1024
#define MAX_CHILDREN 32
/* of a super-frame: 62 of 1052 B fill the largest UDP datagram */
#define MAX_SEGMENTS 62

struct xagg_header {
	__u8 magic;
	__u8 kind;
	__u16 job;
	__u32 host;
	__u32 gradient;
	__u32 round;
	__u16 shard;
	__u8 plan;
	__u8 attempt;
	__u32 tag;
};

struct xagg_row {
	struct xagg_header header;
	__u32 payload[VALUES];
	__u32 checksum;
};

enum kind { K_DATA = 1, K_EXPONENT, K_RESULT, K_RESTART, K_SENT, K_LOST, K_DONE, K_READY, K_OPEN, K_CREDIT, K_PROBE };

enum state { S_FREE, S_COLLECT, S_SENT, S_RESULT };

enum shard_column {
	SHARD_SLOT0,
	SHARD_COUNT,
	SHARD_FOLD,
	SHARD_TREE,
	SHARD_JOB,
	SHARD_SHARD,
	SHARD_ACTIVE,
	SHARD_COMMITTED,
	SHARD_UP_LOGGED,
	SHARD_DOWN_LOGGED,
	SHARD_GROUP0,
	SHARD_COLUMNS,
};

enum tree_column { TREE_JOB, TREE_LIVE, TREE_RETIRED, TREE_BIT, TREE_PARENT_ENDPOINT, TREE_IS_ROOT, TREE_COLUMNS };

enum job_column { JOB_JOB, JOB_VERSION, JOB_COLUMNS };

/* a slot's `logged` bits: in the emission log; and sent by this program, so that user space need not */
enum logged { LOGGED_UP = 1, LOGGED_DOWN = 2, LEFT_UP = 4, LEFT_DOWN = 8 };

/* as inanet.wire.drops.Drop; those that this program gives */
enum drop {
	D_OK = 0,
	D_SHORT = 1,
	D_OVERSIZED = 2,
	D_BAD_MAGIC = 3,
	D_BAD_TYPE = 4,
	D_FOREIGN_JOB = 5,
	D_BAD_TAG = 6,
	D_BAD_CHECKSUM = 7,
	D_UNKNOWN_SHARD = 8,
	D_BAD_FRAGMENT = 9,
	D_FOREIGN_HOST = 10,
	D_STALE_PLAN = 11,
	D_FUTURE_PLAN = 12,
	D_STALE_ROUND = 13,
	D_NOT_OPEN = 14,
	D_STALE_ATTEMPT = 15,
	D_FUTURE_ATTEMPT = 16,
	D_DUPLICATE = 17,
	DROPS = 64,
};

/* as inanet.proto.tree.engine.Count, then this program's own */
enum count {
	C_CONTRIBUTIONS,
	C_COMPLETED,
	C_RESULTS,
	C_CORRUPT_SLOTS,
	C_FIRST,
	/* packets sent to the parent, to the children's group, and results repeated for one child */
	C_FORWARDED = 8,
	C_BROADCAST,
	C_ANSWERED,
	/* packets left to user space, and reports for which the ring had no room */
	C_PASSED,
	C_UNREPORTED,
	/* datagrams for this node, and bytes in them: with the receive offload, one holds many packets */
	C_FRAMES,
	C_BYTES,
	COUNTS = 16,
};

/* as inanet.proto.tree.engine.Event, then this program's own */
enum event_code {
	E_GROUP_END = 1,
	E_ANSWER = 2,
	E_AGAIN_UP = 3,
	E_AGAIN_DOWN = 4,
	E_CORRUPT_SLOT = 7,
	E_OPENED = 8,
	/* look at logs and credits; at most one of these is on its way */
	E_WORK = 100,
	/* another link-layer address for an endpoint */
	E_HOP = 101,
	/* an entry for an emission log that was locked for too long; b is 1 for that towards the parent */
	E_LOG = 102,
};

struct event {
	__s64 code;
	__s64 row;
	__s64 a;
	__s64 b;
};

enum held { HELD_UP = 1, HELD_DOWN = 2 };

/* What leaves without user space: per tree. `sent` is written here and `limit` there. */
struct route {
	__u64 up_sent;
	__u64 up_limit;
	__u64 down_sent;
	__u64 down_limit;
	/* endpoint of the group that all children hear; 0: results are sent by user space */
	__u64 group;
	/* a child's packets are worth a report whenever taken & mask is 0 */
	__u64 credit_mask;
	/* 0: not known */
	__u32 parent_ifindex;
	__u8 parent_mac[8];
	/* what a retired id stands for, to the end of the chain (re-parenting) */
	__u32 stands_for[MAX_CHILDREN];
	/* bits of `held`: user space has still something to send, and the end of a group must not overtake it (emission groups) */
	__u32 ends_held;
};

struct figures {
	__u64 drops[DROPS];
	__u64 counts[COUNTS];
};

/* on a cache line of its own */
struct busy {
	__u64 inside;
	__u64 spare[7];
};

struct hop {
	__u32 ifindex;
	__u8 mac[8];
};

struct tables {
	/* not 0: user space is in the tables, every packet is passed to it */
	__u64 closed;
	/* not 0: E_WORK is on its way */
	__u64 woken;
	__u64 spare[6];
	struct busy busy[MAX_CPUS];
	struct figures figures[MAX_CPUS];
	struct route routes[MAX_TREES];
	__s64 shards[MAX_SHARDS][SHARD_COLUMNS];
	__s64 trees[MAX_TREES][TREE_COLUMNS];
	__s64 child_endpoint[MAX_TREES][MAX_CHILDREN];
	__s64 jobs[MAX_JOBS][JOB_COLUMNS];
	__u64 keys[MAX_JOBS];
	__s64 taken[MAX_TREES][MAX_CHILDREN + 1];
	__s32 job_row[65536];
	__s32 shard_row[MAX_JOBS][MAX_SHARDS_PER_JOB];
	__u32 mask[MAX_TREES][MAX_CHILDREN];
	__u8 since[MAX_TREES][MAX_CHILDREN];
};

/* Set before the program is loaded; the verifier takes them for constants. */
struct geometry {
	__u32 capacity;
	/* slots are rows of banks: a map's value may not exceed what the verifier can address */
	__u32 bank_rows;
	__u32 bank_shift;
	/* where the arrays of one element per slot, or per group, begin in `slots` */
	__u32 bitmap;
	__u32 round;
	__u32 up_log;
	__u32 down_log;
	__u32 up_left;
	__u32 down_left;
	__u32 state;
	__u32 attempt;
	__u32 exponent;
	__u32 misfit;
	__u32 announced;
	__u32 logged;
	__u32 groups;
	/* this node's own endpoint; port 0 is the raw IPv4 framing */
	__u32 address;
	__u32 port;
	/* several interfaces: results for the group leave by all of them */
	__u32 ports;
	/* not 0: this processor may show its stores to others in another order (all but x86 and s390) */
	__u32 reorders;
};

/*
 * A worker's results (worker.bpf.c). They lie in a ring of rows; one frame's lie side by side, so the last frame before the
 * end may reach MAX_SEGMENTS - 1 rows beyond it. `runs` says of each row at which a frame begins what came there.
 */
struct run {
	/* number of this row since the start, counted from 1; written last */
	__u64 ready;
	__u64 source;
	__u64 packets;
};

/* as inanet.xdp.inbox.InboxCount */
enum inbox_count {
	/* frames for this worker, and payload bytes in them: with the receive offload, one holds many packets */
	I_FRAMES,
	I_BYTES,
	/* results put into the ring */
	I_TAKEN,
	/* frames left to the socket, for any of the reasons below */
	I_PASSED,
	/* for want of room in the ring; in packets */
	I_FULL,
	/* no result of a job of this worker's from where it expects them: another sender, kind, job or tag */
	I_FOREIGN,
	/* no whole number of rows */
	I_OTHER,
	INBOX_COUNTS = 8,
};

struct inbox {
	/* rows that the program has taken, written by it alone */
	__u64 head;
	__u64 spare_head[7];
	/* rows that user space has given back, and whether it wants a record in `wakeups` when there is something */
	__u64 tail;
	__u64 asleep;
	__u64 spare_tail[6];
	__u64 counts[MAX_CPUS][INBOX_COUNTS];
};

/* Who may send results: an endpoint, for a job */
struct sender {
	__u64 endpoint;
	__u64 job;
};

/* Set before the program is loaded. */
struct inbox_geometry {
	/* a power of two */
	__u32 rows;
	/* this worker's own endpoint; port 0 is the raw IPv4 framing */
	__u32 address;
	__u32 port;
};

#endif
