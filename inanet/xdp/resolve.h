/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whose a packet is and which slot it concerns, each thing looked at before anything that relies on it. */
#ifndef INANET_XDP_RESOLVE_H
#define INANET_XDP_RESOLVE_H

#include "slots.h"

/* Whose an uplink packet is: child index, or minus a reason; `taken` counts it for CREDIT. */
static __always_inline int resolve_child(__u32 tree, __u32 host, __u64 source, __u8 plan)
{
	__u32 child = 0;

	if (!host || host & (host - 1))
		return -D_FOREIGN_HOST;
	/* the position of the only bit */
	child = (!!(host & 0xFFFF0000)) << 4 | (!!(host & 0xFF00FF00)) << 3 | (!!(host & 0xF0F0F0F0)) << 2 |
		(!!(host & 0xCCCCCCCC)) << 1 | !!(host & 0xAAAAAAAA);
	child &= 31;
	if (!((__u32)tables.trees[tree][TREE_LIVE] & host))
		return (__u32)tables.trees[tree][TREE_RETIRED] & host ? -D_STALE_PLAN : -D_FOREIGN_HOST;
	if ((__u64)tables.child_endpoint[tree][child] != source)
		return -D_FOREIGN_HOST;
	if (newer8(tables.since[tree][child], plan))
		return -D_STALE_PLAN;
	return child;
}

static __always_inline void take_off_wire(struct frame *f, __u32 tree, __u32 from)
{
	__s64 before;

	if (from > MAX_CHILDREN)
		return;
	before = __sync_fetch_and_add(&tables.taken[tree][from], 1);
	if (!((before + 1) & tables.routes[tree].credit_mask))
		f->wake = 1;
}

/* A packet with the length of a row: whose it is and which slot it concerns, or why it is none of ours. */
__noinline int resolve(struct frame *f, struct xagg_row *at)
{
	__u32 *packet = (__u32 *)at, w0, w4, kind, row, tree;
	struct concern *c;
	int job_row, found, child;

	if (!f || !at)
		return PASS;
	c = &f->concern;
	w0 = packet[0];
	kind = w0 >> 8 & 0xF;
	if ((w0 & 0xFF) != MAGIC_VERSION)
		return drop(f, D_BAD_MAGIC);
	if (kind == 0 || kind > K_PROBE)
		return drop(f, D_BAD_TYPE);
	if (kind > K_RESTART)
		return drop(f, D_OVERSIZED);
	job_row = tables.job_row[w0 >> 16];
	if (job_row < 0)
		return drop(f, D_FOREIGN_JOB);
	job_row &= MAX_JOBS - 1;
	w4 = packet[4];
	if (tag_of(w0, packet[1], packet[2], packet[3], w4, tables.keys[job_row]) != packet[5])
		return drop(f, D_BAD_TAG);
	if (kind == K_EXPONENT || kind == K_RESTART || (kind == K_RESULT && packet[1]))
		return PASS;
	if (!is_sound(at))
		return drop(f, D_BAD_CHECKSUM);
	c->job_row = job_row;
	c->ended = w0 & HEADER_FLAG_END;
	c->fragment = packet[2];
	c->round = packet[3];
	c->shard = w4 & 0xFFFF;
	c->attempt = w4 >> 24;
	if (c->shard >= MAX_SHARDS_PER_JOB)
		return drop(f, D_UNKNOWN_SHARD);
	found = tables.shard_row[job_row][w4 & (MAX_SHARDS_PER_JOB - 1)];
	if (found < 0)
		return drop(f, D_UNKNOWN_SHARD);
	row = found & (MAX_SHARDS - 1);
	if (c->fragment >= (__u64)tables.shards[row][SHARD_COUNT])
		return drop(f, D_BAD_FRAGMENT);
	if (tables.shards[row][SHARD_FOLD])
		return PASS;
	tree = tables.shards[row][SHARD_TREE] & (MAX_TREES - 1);
	c->row = row;
	c->tree = tree;
	c->slot0 = tables.shards[row][SHARD_SLOT0];
	c->slot = c->slot0 + c->fragment;
	c->child = MAX_CHILDREN;
	if (kind == K_RESULT) {
		if ((__u64)tables.trees[tree][TREE_PARENT_ENDPOINT] != f->source)
			return drop(f, D_FOREIGN_HOST);
		return ADOPT;
	}
	child = resolve_child(tree, packet[1], f->source, w4 >> 16);
	if (child < 0)
		return drop(f, -child);
	c->child = child;
	if (newer8(w4 >> 16, tables.jobs[job_row][JOB_VERSION])) {
		take_off_wire(f, tree, child);
		return drop(f, D_FUTURE_PLAN);
	}
	found = admit_round(row, c->round, f->cpu);
	if (found < 0)
		return PASS;
	if (found) {
		take_off_wire(f, tree, child);
		return drop(f, found);
	}
	return CONTRIBUTE;
}

/* All stages for a packet with the length of a row. */
static __always_inline int take(struct frame *f, struct xagg_row *packet)
{
	struct concern *c = &f->concern;
	int verdict = resolve(f, packet), from;
	__u32 row = c->row & (MAX_SHARDS - 1);

	if (verdict == CONTRIBUTE)
		verdict = contribute(f, packet);
	else if (verdict == ADOPT)
		verdict = adopt(f, packet);
	else
		return verdict;
	if (verdict == PASS)
		return PASS;
	take_off_wire(f, c->tree & (MAX_TREES - 1), c->child);
	if (c->ended) {
		from = c->child < MAX_CHILDREN ? (int)c->child : -1;
		report(f->cpu, E_GROUP_END, row, from, c->fragment >> GROUP_SHIFT);
	}
	return verdict;
}

#endif
