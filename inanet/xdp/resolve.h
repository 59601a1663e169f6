/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whose a packet is and which slot it concerns, each thing looked at before anything that relies on it. */
#ifndef INANET_XDP_RESOLVE_H
#define INANET_XDP_RESOLVE_H

#include "slots.h"

/* Which bit is the only one, by the five highest bits of its product with a de Bruijn sequence. */
static const __u8 position[MAX_CHILDREN] SEC(".rodata.position") = { 0,	 1,  28, 2,  29, 14, 24, 3, 30, 22, 20, 15, 25, 17, 4,	8,
					     31, 27, 13, 23, 21, 19, 16, 7, 26, 12, 18, 6,  11, 5,  10, 9 };

/* Whose an uplink packet is: child index, or minus a reason; `taken` counts it for CREDIT. */
static __always_inline int resolve_child(__u32 tree, __u32 host, __u64 source, __u8 plan)
{
	__u32 lower = host - 1, child;

	/* or the compiler counts the bits */
	PIN(lower);
	if (!host || host & lower)
		return -D_FOREIGN_HOST;
	child = host * 0x077CB531u >> 27;
	PIN(child);
	child = position[child & (MAX_CHILDREN - 1)] & (MAX_CHILDREN - 1);
	if (!((__u32)tables.trees[tree][TREE_LIVE] & host))
		return (__u32)tables.trees[tree][TREE_RETIRED] & host ? -D_STALE_PLAN : -D_FOREIGN_HOST;
	if ((__u64)tables.child_endpoint[tree][child] != source)
		return -D_FOREIGN_HOST;
	if (newer8(tables.since[tree][child], plan))
		return -D_STALE_PLAN;
	return child;
}

/* The slot of a packet whose tag is right, and whether it may be touched; minus a reason to drop it. */
static __always_inline int locate(struct frame *f, const struct xagg_row *at, __u32 kind)
{
	const __u32 *packet = (const __u32 *)at;
	struct concern *c = &f->concern;
	__u32 row, tree, w4 = packet[4];
	int found, child;

	if (c->shard >= MAX_SHARDS_PER_JOB)
		return -D_UNKNOWN_SHARD;
	found = tables.shard_row[c->job_row & (MAX_JOBS - 1)][w4 & (MAX_SHARDS_PER_JOB - 1)];
	if (found < 0)
		return -D_UNKNOWN_SHARD;
	row = found & (MAX_SHARDS - 1);
	if (c->fragment >= (__u64)tables.shards[row][SHARD_COUNT])
		return -D_BAD_FRAGMENT;
	if (tables.shards[row][SHARD_FOLD])
		return PASS;
	tree = tables.shards[row][SHARD_TREE] & (MAX_TREES - 1);
	c->row = row;
	c->tree = tree;
	c->slot0 = tables.shards[row][SHARD_SLOT0];
	c->slot = c->slot0 + c->fragment;
	if (kind == K_RESULT)
		return (__u64)tables.trees[tree][TREE_PARENT_ENDPOINT] == f->source ? ADOPT : -D_FOREIGN_HOST;
	child = resolve_child(tree, packet[1], f->source, w4 >> 16);
	if (child < 0)
		return child;
	c->child = child;
	if (newer8(w4 >> 16, tables.jobs[c->job_row & (MAX_JOBS - 1)][JOB_VERSION]))
		return -D_FUTURE_PLAN;
	found = admit_round(row, c->round, at);
	if (found < 0)
		return PASS;
	return found ? -found : CONTRIBUTE;
}

/* A packet with the length of a row: whose it is and which slot it concerns, or why it is none of ours. What is added to
 * a slot is checked there; all else has to be sound before anything is said about it.
 */
static __always_inline int resolve(struct frame *f, const struct xagg_row *at)
{
	const __u32 *packet = (const __u32 *)at;
	struct concern *c = &f->concern;
	__u32 w0 = packet[0], kind = w0 >> 8 & 0xF;
	int job_row, verdict;

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
	if (tag_of(w0, packet[1], packet[2], packet[3], packet[4], tables.keys[job_row]) != packet[5])
		return drop(f, D_BAD_TAG);
	if (kind == K_EXPONENT || kind == K_RESTART || (kind == K_RESULT && packet[1]))
		return PASS;
	c->job_row = job_row;
	c->ended = w0 & HEADER_FLAG_END;
	c->fragment = packet[2] & ((1u << INDEX_BITS) - 1);
	c->need = packet[2] >> INDEX_BITS;
	c->large = w0 & HEADER_FLAG_LARGE ? BLOCK_LARGE : 0;
	c->round = packet[3];
	c->shard = packet[4] & 0xFFFF;
	c->attempt = packet[4] >> 24;
	c->child = MAX_CHILDREN;
	verdict = locate(f, at, kind);
	if (verdict == CONTRIBUTE)
		return CONTRIBUTE;
	if (!is_sound(at))
		return drop(f, D_BAD_CHECKSUM);
	if (verdict >= 0)
		return verdict;
	if (verdict == -D_FUTURE_PLAN || verdict == -D_STALE_ROUND || verdict == -D_NOT_OPEN)
		take_off_wire(f, c->tree & (MAX_TREES - 1), c->child);
	return drop(f, -verdict);
}

/* All stages for a packet with the length of a row. */
static __always_inline int take(struct frame *f, struct xagg_row *packet)
{
	struct concern *c = &f->concern;
	int verdict = resolve(f, packet), from;
	__s64 group;

	if (verdict == CONTRIBUTE)
		verdict = contribute(f, packet);
	else if (verdict == ADOPT)
		verdict = adopt(f, packet);
	else
		return verdict;
	if (verdict != PASS && c->ended) {
		from = c->child < MAX_CHILDREN ? (int)c->child : -1;
		group = c->fragment >> GROUP_SHIFT;
		/* it had come before: its sender waits */
		if (c->ended != HEADER_FLAG_END)
			group = -1 - group;
		report(f->cpu, E_GROUP_END, c->row & (MAX_SHARDS - 1), from, group);
	}
	return verdict;
}

#endif
