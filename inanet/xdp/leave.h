/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What is complete leaves: whether it may, its header, its entry in the emission log. */
#ifndef INANET_XDP_LEAVE_H
#define INANET_XDP_LEAVE_H

#include "maps.h"

/* Whether a packet may leave for `to` without user space. The window is a bound, not a count: CPUs may pass it by one
 * packet each.
 */
static __always_inline int may_leave(struct frame *f, __u32 tree, __u32 to)
{
	struct route *route = &tables.routes[tree & (MAX_TREES - 1)];

	if (f->pass || (f->to >= 0 && f->to != (__s32)(tree << 6 | to)))
		return 0;
	if (to == TO_PARENT)
		return route->parent_ifindex &&
		       (f->whole == 0 || route->parent_ifindex == f->ifindex) &&
		       (__s64)(READ(route->up_limit) - route->up_sent) > 0;
	if (to == TO_GROUP)
		return route->group && (f->whole == 0 || geometry.ports == 1) &&
		       (__s64)(READ(route->down_limit) - route->down_sent) > 0;
	return 1;
}

static __always_inline void leaves(struct frame *f, __u32 tree, __u32 to)
{
	struct route *route = &tables.routes[tree & (MAX_TREES - 1)];

	f->to = tree << 6 | to;
	if (to == TO_PARENT) {
		__sync_fetch_and_add(&route->up_sent, 1);
		count(f, C_FORWARDED);
	} else if (to == TO_GROUP) {
		__sync_fetch_and_add(&route->down_sent, 1);
		count(f, C_BROADCAST);
	} else {
		count(f, C_ANSWERED);
	}
}

/* Counts what CREDIT returns. */
static __always_inline void take_off_wire(struct frame *f, __u32 tree, __u32 from)
{
	__s64 before;

	if (from > MAX_CHILDREN)
		return;
	before = __sync_fetch_and_add(&tables.taken[tree][from], 1);
	if (!((before + 1) & tables.routes[tree].credit_mask))
		f->wake = 1;
}

static __always_inline void put_back(__u32 tree, __u32 from)
{
	if (from <= MAX_CHILDREN)
		__sync_fetch_and_add(&tables.taken[tree][from], -1);
}

/* The header of a slot's row for its next hop; `kind` with the flags in its high nibble, `marks` is the attempt << 8 and what
 * the block needs.
 */
__noinline int stamp(struct xagg_row *row, const struct concern *c, __u32 kind, __u32 host, __u32 marks)
{
	__u32 *words = (__u32 *)row, job_row, need = marks & 0xFF, attempt = marks >> 8;

	if (!row || !c)
		return 0;
	job_row = c->job_row & (MAX_JOBS - 1);
	words[0] = MAGIC_VERSION | kind << 8 | (__u32)tables.jobs[job_row][JOB_JOB] << 16;
	words[1] = host;
	words[2] = c->fragment | need << INDEX_BITS;
	words[3] = c->round;
	words[4] = (c->shard & 0xFFFF) | (__u32)tables.jobs[job_row][JOB_VERSION] << 16 | attempt << 24;
	words[5] = tag_of(words[0], words[1], words[2], words[3], words[4], tables.keys[job_row]);
	return 0;
}

static __always_inline __u64 copy_header(const struct xagg_row *row, struct xagg_row *packet)
{
	__u64 sum = 0;

#pragma clang loop unroll(full)
	for (int i = 0; i < HEADER_WORDS; i++) {
		((__u32 *)packet)[i] = ((const __u32 *)row)[i];
		sum += ((const __u32 *)row)[i];
	}
	return sum;
}

/* An entry of the emission log, visible only once it is there. */
static __always_inline void append(struct frame *f, __u32 shard_row, __u32 slot0, __u32 fragment, int up, void *base)
{
	__u32 index = shard_row & (MAX_SHARDS - 1), key = index;
	__u64 *lock = bpf_map_lookup_elem(&shard_locks, &key);
	__s64 *cursor = &tables.shards[index][up ? SHARD_UP_LOGGED : SHARD_DOWN_LOGGED];
	__u64 at;

	if (!lock || !acquire(lock)) {
		/* another CPU of a virtual machine may stand still with it */
		report(f->cpu, E_LOG, index, fragment, up);
		return;
	}
	at = slot0 + *cursor;
	if (at < geometry.capacity) {
		WRITE(*(__u32 *)(base + (up ? geometry.up_log : geometry.down_log) + at * 4), fragment);
		if (geometry.reorders)
			__sync_lock_test_and_set(cursor, *cursor + 1);
		else
			WRITE(*cursor, *cursor + 1);
	}
	release(lock);
	if (*cursor == tables.shards[index][SHARD_COUNT])
		f->wake = 1;
}

#endif
