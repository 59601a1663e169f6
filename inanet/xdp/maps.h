/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps, what is known of a frame and of a packet on its way, and small parts that all others use. */
#ifndef INANET_XDP_MAPS_H
#define INANET_XDP_MAPS_H

#include "packet.h"

/* what the arrays of the map `slots` hold for one slot */
#define WORD(name) (*(__u32 *)(words + geometry.name))
#define BYTE(name) (*(__u8 *)(bytes + geometry.name))
#define UNROLL _Pragma("clang loop unroll_count(8)")
/* where more would not stay in registers */
#define UNROLL_LESS _Pragma("clang loop unroll_count(4)")
#define HEADER_FLAG_END 0x1000u
#define HEADER_FLAG_LARGE 0x4000u
#define TO_PARENT 32
#define TO_GROUP 33

const volatile struct geometry geometry;
struct tables tables;

/* 1,052 bytes a slot without a gap, as user space sends them; sizes are set by the loader */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 8);
} rows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 8);
} slots SEC(".maps");

/* One lock a slot and one a shard, of compare and swap: unlike bpf_spin_lock, functions can be called under them, so
 * that the verifier sees the loops over a payload once and not once for every way to them.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} slot_locks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SHARDS);
	__type(key, __u32);
	__type(value, __u64);
} shard_locks SEC(".maps");

/* XAgg's Check Queue, and whatever else user space has to look at */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} events SEC(".maps");

/* link-layer addresses of those who have proven that they know a job's key */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct hop);
} hops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
	__uint(max_entries, 64);
	__uint(key_size, 4);
	__uint(value_size, 4);
} ports SEC(".maps");

/* What is known of a packet when its slot is looked at. */
struct concern {
	__u32 row;
	__u32 tree;
	__u32 job_row;
	__u32 shard;
	__u32 slot;
	__u32 slot0;
	__u32 fragment;
	__u32 round;
	__u32 child;
	__u32 attempt;
	/* exponent that the block needs, and whether it is large enough for the one that it has */
	__u32 need;
	__u32 large;
	/* GROUP_END was set; twice that: in a packet that had come before */
	__u32 ended;
};

/* One received frame on its way through the program. */
struct frame {
	/* endpoint of the sender */
	__u64 source;
	/* one's complement sum of the payload of what leaves */
	__u64 sum;
	/* bytes before the payload, and of the payload */
	__u32 head;
	__u32 size;
	/* of the payload as it arrived */
	__u32 bytes;
	__u32 cpu;
	/* packets now at the front of the payload that leave the program, to user space (`pass`) or to `to` */
	__u32 kept;
	__u32 pass;
	/* tree << 6 | child, TO_PARENT or TO_GROUP; -1: nowhere yet */
	__s32 to;
	__u32 ifindex;
	__u32 wake;
	__u32 whole;
	/* of the packet that is being looked at */
	struct concern concern;
};

struct walk {
	struct xdp_md *ctx;
	struct frame frame;
};

enum verdict { CONSUMED, KEEP, PASS, CONTRIBUTE, ADOPT };

LAYOUT(struct event, unused_event);
LAYOUT(struct xagg_row, unused_row);
LAYOUT(enum kind, unused_kind);
LAYOUT(enum state, unused_state);
LAYOUT(enum shard_column, unused_shard_column);
LAYOUT(enum tree_column, unused_tree_column);
LAYOUT(enum job_column, unused_job_column);
LAYOUT(enum logged, unused_logged);
LAYOUT(enum held, unused_held);
LAYOUT(enum drop, unused_drop);
LAYOUT(enum count, unused_count);
LAYOUT(enum event_code, unused_event_code);

static __always_inline void count_drop(struct frame *f, __u32 reason)
{
	tables.figures[f->cpu & (MAX_CPUS - 1)].drops[reason & (DROPS - 1)]++;
}

static __always_inline void count(struct frame *f, __u32 what)
{
	tables.figures[f->cpu & (MAX_CPUS - 1)].counts[what & (COUNTS - 1)]++;
}

static __always_inline int drop(struct frame *f, __u32 reason)
{
	count_drop(f, reason);
	return CONSUMED;
}

/* Not static: see is_sound. */
__noinline int report(__u32 cpu, __s64 code, __s64 row, __s64 a, __s64 b)
{
	struct event event = { .code = code, .row = row, .a = a, .b = b };

	if (bpf_ringbuf_output(&events, &event, sizeof(event), 0))
		tables.figures[cpu & (MAX_CPUS - 1)].counts[C_UNREPORTED]++;
	return 0;
}

static __always_inline int newer32(__u32 a, __u32 b)
{
	return a != b && a - b < 0x80000000u;
}

static __always_inline int newer8(__u8 a, __u8 b)
{
	return a != b && (__u8)(a - b) < 0x80;
}

/* Tries for some microseconds: whoever holds a lock runs on another CPU and folds one packet. */
__noinline int contend(__u64 *lock)
{
	if (!lock)
		return 0;
	for (int i = 0; i < 2000; i++)
		if (!__sync_val_compare_and_swap(lock, 0, 1))
			return 1;
	return 0;
}

static __always_inline int acquire(__u64 *lock)
{
	return !__sync_val_compare_and_swap(lock, 0, 1) || contend(lock);
}

static __always_inline void release(__u64 *lock)
{
	if (geometry.reorders)
		__sync_lock_test_and_set(lock, 0);
	else
		WRITE(*lock, 0);
}

__noinline __u32 replaced(__u32 tree, __u32 bitmap)
{
	__u32 retired;

	tree &= MAX_TREES - 1;
	retired = tables.trees[tree][TREE_RETIRED] & bitmap;
	if (retired)
		for (int i = 0; i < MAX_CHILDREN; i++)
			bitmap |= tables.routes[tree].stands_for[i] & -(retired >> i & 1);
	return bitmap;
}

/* Bitmap with every retired id in it replaced by what it stands for (re-parenting). */
static __always_inline __u32 effective(__u32 tree, __u32 bitmap)
{
	if (!((__u32)tables.trees[tree & (MAX_TREES - 1)][TREE_RETIRED] & bitmap))
		return bitmap;
	return replaced(tree, bitmap);
}

static __always_inline struct xagg_row *row_of(__u32 slot)
{
	__u32 bank = slot >> geometry.bank_shift;
	__u64 index = slot & ((1u << geometry.bank_shift) - 1);
	void *base = bpf_map_lookup_elem(&rows, &bank);

	if (!base || index >= geometry.bank_rows)
		return 0;
	return base + index * ROW_BYTES;
}

#endif
