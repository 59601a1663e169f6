/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a packet does to its slot: opening of rounds (confirmed rounds), contributions (Algorithm 1), results. */
#ifndef INANET_XDP_SLOTS_H
#define INANET_XDP_SLOTS_H

#include "fold.h"
#include "leave.h"

struct opening {
	__u64 first;
	__u64 count;
};

/* The emission logs of a new round lack every fragment of every group. */
static long fill_group(__u32 index, void *context)
{
	struct opening *o = context;
	__u64 group = o->first + index, left = o->count - ((__u64)index << GROUP_SHIFT);
	__u32 zero = 0;
	void *base = bpf_map_lookup_elem(&slots, &zero);

	if (!base || group >= geometry.groups)
		return 1;
	if (left > 1 << GROUP_SHIFT)
		left = 1 << GROUP_SHIFT;
	*(__u32 *)(base + geometry.up_left + group * 4) = left;
	*(__u32 *)(base + geometry.down_left + group * 4) = left;
	return 0;
}

/* Whether a shard takes packets of this round; a newer one opens it if the last is committed (confirmed rounds). Slots reset when
 * first touched. -1: user space has to look, as it must when it cannot be told: it does nothing for a round of which it
 * does not know. Only what is sound opens anything.
 */
__noinline int open_round(__u32 row, __u32 round)
{
	__u32 index = row & (MAX_SHARDS - 1), key = index, active;
	__s64 *shard = tables.shards[index];
	struct event *event;
	struct opening o;
	__u64 *lock;
	int verdict = D_OK;

	lock = bpf_map_lookup_elem(&shard_locks, &key);
	if (!lock || !acquire(lock))
		return -1;
	active = READ(shard[SHARD_ACTIVE]);
	if (READ(shard[SHARD_COMMITTED]) && newer32(round, active)) {
		event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
		if (!event) {
			release(lock);
			return -1;
		}
		o.first = shard[SHARD_GROUP0];
		o.count = shard[SHARD_COUNT];
		bpf_loop((o.count + (1 << GROUP_SHIFT) - 1) >> GROUP_SHIFT, fill_group, &o, 0);
		shard[SHARD_ACTIVE] = round;
		shard[SHARD_UP_LOGGED] = 0;
		shard[SHARD_DOWN_LOGGED] = 0;
		__sync_lock_test_and_set(&shard[SHARD_COMMITTED], 0);
		event->code = E_OPENED;
		event->row = index;
		event->a = round;
		event->b = 0;
		bpf_ringbuf_submit(event, 0);
	} else if (round != active || READ(shard[SHARD_COMMITTED])) {
		/* over, or another packet was faster, with another round */
		verdict = newer32(round, active) ? D_NOT_OPEN : D_STALE_ROUND;
	}
	release(lock);
	return verdict;
}

/* Reset a slot when a packet of another round than its own is the first to touch it. */
static __always_inline void claim(void *words, void *bytes, struct xagg_row *row, __u32 round)
{
	WORD(round) = round;
	BYTE(state) = S_COLLECT;
	WORD(bitmap) = 0;
	BYTE(attempt) = 0;
	BYTE(exponent) = 0;
	BYTE(misfit) = 0;
	BYTE(announced) = 0;
	BYTE(logged) = 0;
	*(__u32 *)row = 0;
}

static __always_inline int admit_round(__u32 row, __u32 round, const struct xagg_row *packet)
{
	__s64 *shard = tables.shards[row & (MAX_SHARDS - 1)];
	__u32 active = READ(shard[SHARD_ACTIVE]);

	if (!READ(shard[SHARD_COMMITTED])) {
		/* the round may have been opened between the two looks */
		if (round != active)
			active = READ(shard[SHARD_ACTIVE]);
		if (round == active)
			return D_OK;
		return newer32(round, active) ? D_NOT_OPEN : D_STALE_ROUND;
	}
	/* the round itself may be over, or just being opened: who holds the lock knows */
	if (newer32(active, round))
		return D_STALE_ROUND;
	return is_sound(packet) ? open_round(row, round) : D_BAD_CHECKSUM;
}

/* What has become of a contribution. */
struct outcome {
	/* one's complement sum of what leaves */
	__u64 sum;
	/* reason to drop it; D_OK: it was folded */
	int reason;
	int pass;
	int answer;
	int result;
	int first;
	int done;
	int soundness;
	int again;
	/* it may leave without user space */
	int emit;
};

/* The slot is complete with this packet: stamped for its next hop in memory and in the packet. Under the slot's lock. */
static __always_inline void complete(struct concern *c, struct outcome *o, void *base, __u64 slot, __u64 group, int root,
				     struct xagg_row *row, struct xagg_row *packet)
{
	void *words = base + slot * 4, *bytes = base + slot;
	__u32 kind = root ? K_RESULT : K_DATA, tree = c->tree & (MAX_TREES - 1);
	__u8 bit = root ? LOGGED_DOWN : LOGGED_UP;
	__s32 *left = base + (root ? geometry.down_left : geometry.up_left) + group * 4;

	if (o->first) {
		fold_copy(row, packet);
	} else {
		o->soundness = fold_last(row, packet, &o->sum);
		if (o->soundness == DAMAGED_PACKET) {
			o->reason = D_BAD_CHECKSUM;
			return;
		}
		if (o->soundness == DAMAGED_SLOT) {
			WORD(bitmap) = 0;
			return;
		}
	}
	WORD(bitmap) |= 1u << (c->child & 31);
	o->again = BYTE(logged) & bit;
	if (!o->again && __sync_fetch_and_add(left, -1) == 1) {
		kind |= 0x10;
		if (READ(tables.routes[tree].ends_held) & (root ? HELD_DOWN : HELD_UP))
			o->emit = 0;
	}
	BYTE(logged) |= o->emit ? bit | bit << 2 : bit;
	if (!root && BYTE(misfit) & BLOCK_LARGE)
		kind |= HEADER_FLAG_LARGE >> 8;
	stamp(row, c, kind, root ? 0 : (__u32)tables.trees[tree][TREE_BIT], c->attempt << 8 | BYTE(exponent));
	if (o->first)
		copy_out(row, packet, &o->sum);
	else
		o->sum += copy_header(row, packet);
	BYTE(state) = root ? S_RESULT : S_SENT;
	if (root)
		BYTE(misfit) = 0;
}

/* Whether a contribution is for the slot as it is, else why not. Under the slot's lock. */
static __always_inline int suits(const struct concern *c, struct outcome *o, void *words, void *bytes, int untouched, int root)
{
	__u8 known = untouched ? 0 : BYTE(attempt);

	if (!untouched && BYTE(state) == S_RESULT) {
		o->reason = D_DUPLICATE;
		o->result = 1;
	} else if (c->attempt != known) {
		if (newer8(known, c->attempt))
			o->reason = D_STALE_ATTEMPT;
		else if (root)
			o->pass = 1;
		else
			o->reason = D_FUTURE_ATTEMPT;
	} else if (untouched) {
		return 1;
	} else if (BYTE(misfit) & BLOCK_MISFIT) {
		o->pass = 1;
	} else if (effective(c->tree, WORD(bitmap)) & 1u << (c->child & 31)) {
		o->reason = D_DUPLICATE;
	} else {
		return 1;
	}
	return 0;
}

/* Admit and fold. Under the slot's lock. */
static __always_inline void fold(struct frame *f, struct outcome *o, void *base, __u64 slot, __u64 group, int root,
				 struct xagg_row *row, struct xagg_row *packet)
{
	struct concern *c = &f->concern;
	void *words = base + slot * 4, *bytes = base + slot;
	__u32 tree = c->tree & (MAX_TREES - 1), host = 1u << (c->child & 31), live = tables.trees[tree][TREE_LIVE];
	int untouched = BYTE(state) == S_FREE || WORD(round) != c->round;
	int suited = suits(c, o, words, bytes, untouched, root);
	__u32 need = c->need, large = c->large, marks;

	o->first = untouched || WORD(bitmap) == 0;
	/* whatever changes nothing but this slot is checked where it is added */
	if ((!suited || o->first) && !is_sound(packet)) {
		o->reason = D_BAD_CHECKSUM;
		o->pass = o->result = 0;
		return;
	}
	if (!suited) {
		o->answer = o->result && may_leave(f, tree, c->child);
		if (o->answer)
			copy_out(row, packet, &o->sum);
		return;
	}
	o->done = ((effective(tree, untouched ? 0 : WORD(bitmap)) | host) & live) == live;
	if (!untouched) {
		if (need < BYTE(exponent))
			need = BYTE(exponent);
		large |= BYTE(misfit);
	}
	if (o->done && root && need && !(large & BLOCK_LARGE)) {
		/* nobody's block is large enough for its exponent: to be started again, which user space does */
		if (!o->first && !is_sound(packet))
			o->reason = D_BAD_CHECKSUM;
		else
			o->pass = 1;
		return;
	}
	if (untouched)
		claim(words, bytes, row, c->round);
	marks = BYTE(exponent) | BYTE(misfit) << 8;
	BYTE(exponent) = need;
	BYTE(misfit) = large;
	if (o->done)
		complete(c, o, base, slot, group, root, row, packet);
	else if (o->first)
		fold_copy(row, packet);
	else if (!fold_add(row, packet))
		o->reason = D_BAD_CHECKSUM;
	if (o->reason != D_OK) {
		BYTE(exponent) = marks;
		BYTE(misfit) = marks >> 8;
	} else if (!o->done) {
		WORD(bitmap) |= host;
	}
}

/* What follows from it: counters, reports, the emission log, and whether the packet leaves. */
static __always_inline int follow(struct frame *f, struct outcome *o, void *base, int root)
{
	struct concern *c = &f->concern;
	__u32 tree = c->tree & (MAX_TREES - 1), row = c->row & (MAX_SHARDS - 1);

	f->sum = o->sum;
	count_drop(f, o->reason);
	if (o->reason != D_OK) {
		c->ended = o->reason == D_DUPLICATE ? c->ended << 1 : 0;
		if (o->answer) {
			leaves(f, tree, c->child);
			return KEEP;
		}
		if (o->result)
			report(f->cpu, E_ANSWER, row, c->fragment, c->child);
		return CONSUMED;
	}
	count(f, C_CONTRIBUTIONS);
	if (o->first)
		count(f, C_FIRST);
	if (!o->done)
		return CONSUMED;
	count(f, C_COMPLETED);
	if (o->soundness != SOUND) {
		count(f, C_CORRUPT_SLOTS);
		report(f->cpu, E_CORRUPT_SLOT, row, c->fragment, 0);
		return CONSUMED;
	}
	if (!o->again)
		append(f, row, c->slot0, c->fragment, !root, base);
	else if (!o->emit)
		report(f->cpu, root ? E_AGAIN_DOWN : E_AGAIN_UP, row, c->fragment, 0);
	if (!o->emit) {
		f->wake |= !o->again;
		return CONSUMED;
	}
	leaves(f, tree, root ? TO_GROUP : TO_PARENT);
	return KEEP;
}

/* Admit, fold and emit a contribution (Algorithm 1, lines 5 to 13). */
static __always_inline int contribute(struct frame *f, struct xagg_row *packet)
{
	struct concern *c = &f->concern;
	__u32 zero = 0, slot = c->slot, tree = c->tree & (MAX_TREES - 1);
	__u64 at, group;
	struct outcome o = {};
	struct xagg_row *row;
	int root;
	__u64 *lock;
	void *base;

	row = row_of(slot);
	lock = bpf_map_lookup_elem(&slot_locks, &slot);
	base = bpf_map_lookup_elem(&slots, &zero);
	if (!row || !lock || !base)
		return PASS;
	at = slot;
	PIN(at);
	group = (__u32)tables.shards[c->row & (MAX_SHARDS - 1)][SHARD_GROUP0] + (c->fragment >> GROUP_SHIFT);
	PIN(group);
	if (at >= geometry.capacity || group >= geometry.groups)
		return PASS;
	root = tables.trees[tree][TREE_IS_ROOT] != 0;
	o.emit = may_leave(f, tree, root ? TO_GROUP : TO_PARENT);
	/* not after it: an atomic operation waits for all stores before */
	take_off_wire(f, tree, c->child);
	if (!acquire(lock)) {
		put_back(tree, c->child);
		return PASS;
	}
	fold(f, &o, base, at, group, root, row, packet);
	release(lock);
	if (o.pass || o.reason == D_BAD_CHECKSUM)
		put_back(tree, c->child);
	return o.pass ? PASS : follow(f, &o, base, root);
}

/* A result from the parent takes the slot over and goes on downwards (slot states). */
__noinline int adopt(struct frame *f, struct xagg_row *packet)
{
	struct concern *c;
	__u32 zero = 0, slot, tree, row_index;
	__u32 active, group, kind = K_RESULT;
	__u32 emit;
	int outcome = D_OK, again = 0;
	__u64 *lock;
	__u64 sum = 0;
	void *base, *words, *bytes;
	struct xagg_row *row;

	if (!f || !packet)
		return PASS;
	c = &f->concern;
	slot = c->slot;
	tree = c->tree & (MAX_TREES - 1);
	row_index = c->row & (MAX_SHARDS - 1);
	active = READ(tables.shards[row_index][SHARD_ACTIVE]);
	if (c->round != active || READ(tables.shards[row_index][SHARD_COMMITTED])) {
		take_off_wire(f, tree, MAX_CHILDREN);
		c->ended = 0;
		return drop(f, newer32(c->round, active) ? D_NOT_OPEN : D_STALE_ROUND);
	}
	row = row_of(slot);
	lock = bpf_map_lookup_elem(&slot_locks, &slot);
	base = bpf_map_lookup_elem(&slots, &zero);
	if (!row || !lock || !base)
		return PASS;
	PIN(slot);
	if (slot >= geometry.capacity)
		return PASS;

	words = base + (__u64)slot * 4;
	bytes = base + slot;

	group = (__u32)tables.shards[row_index][SHARD_GROUP0] + (c->fragment >> GROUP_SHIFT);
	if (group >= geometry.groups)
		return PASS;
	emit = may_leave(f, tree, TO_GROUP);

	if (!acquire(lock))
		return PASS;
	if (BYTE(state) == S_FREE || WORD(round) != c->round) {
		claim(words, bytes, row, c->round);
	}
	if (BYTE(state) == S_RESULT) {
		outcome = D_DUPLICATE;
	} else if (newer8(BYTE(attempt), c->attempt) && BYTE(announced)) {
		outcome = D_STALE_ATTEMPT;
	} else {
		__s32 *left = base + geometry.down_left + (__u64)group * 4;

		if (!newer8(BYTE(attempt), c->attempt))
			BYTE(attempt) = c->attempt;
		fold_copy(row, packet);
		again = BYTE(logged) & LOGGED_DOWN;
		if (!again) {
			if (__sync_fetch_and_add(left, -1) == 1) {
				kind |= 0x10;
				if (READ(tables.routes[tree].ends_held) & HELD_DOWN)
					emit = 0;
			}
			BYTE(logged) |= emit ? LOGGED_DOWN | LEFT_DOWN : LOGGED_DOWN;
		}
		BYTE(exponent) = c->need;
		stamp(row, c, kind, 0, BYTE(attempt) << 8 | c->need);
		BYTE(misfit) = 0;
		BYTE(state) = S_RESULT;
		if (emit)
			copy_out(row, packet, &sum);
	}
	take_off_wire(f, tree, MAX_CHILDREN);
	release(lock);

	count_drop(f, outcome);
	if (outcome != D_OK) {
		c->ended = outcome == D_DUPLICATE ? c->ended << 1 : 0;
		return CONSUMED;
	}
	count(f, C_RESULTS);
	if (again) {
		report(f->cpu, E_AGAIN_DOWN, row_index, c->fragment, 0);
		return CONSUMED;
	}
	append(f, row_index, c->slot0, c->fragment, 0, base);
	if (!emit) {
		f->wake = 1;
		return CONSUMED;
	}
	leaves(f, tree, TO_GROUP);
	f->sum = sum;
	return KEEP;
}

#endif
