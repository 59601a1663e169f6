// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * XAgg's Algorithm 1 in the kernel (XAgg, sections IV-A, IV-B and IV-D), on the same tables as user space.
 *
 * inanet/proto/xagg/policy.py is the specification: for a packet that is handled here, slots, logs, counters and what
 * leaves are the same, byte for byte. Everything that is not handled here, ordinary traffic first of all, is passed up
 * the stack, where the daemon's socket gets what is its own: control packets, exponents, restarts, packets that open a
 * round, and all packets while the daemon itself works on the tables (`closed`). So user space never waits for
 * the kernel longer than for one packet, the kernel never waits for user space, and neither needs the other's locks.
 */
#include "layout.h"

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define XAGG_PROTOCOL 253
/* what the arrays of the map `slots` hold for one slot */
#define WORD(name) (*(__u32 *)(words + geometry.name))
#define BYTE(name) (*(__u8 *)(bytes + geometry.name))
#define UNROLL _Pragma("clang loop unroll_count(8)")
#define HEADER_FLAG_END 0x1000u
#define TO_PARENT 32
#define TO_GROUP 33
/* keeps a pointer in one register: the verifier loses a packet's range when the compiler recomputes it */
#define PIN(x) asm volatile("" : "+r"(x))
/* the compiler may neither cache nor repeat this access: others write the same memory */
#define READ(x) (*(volatile typeof(x) *)&(x))
#define WRITE(x, v) (*(volatile typeof(x) *)&(x) = (v))

char LICENSE[] SEC("license") = "Dual BSD/GPL";

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
	/* GROUP_END was set */
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

/* not referred to: they put the layouts into the object's BTF, in a section of their own so that .bss is the tables */
#define LAYOUT(type, name) const type *name SEC(".data.types") __attribute__((unused))
LAYOUT(struct event, unused_event);
LAYOUT(struct xagg_row, unused_row);
LAYOUT(enum kind, unused_kind);
LAYOUT(enum state, unused_state);
LAYOUT(enum shard_column, unused_shard_column);
LAYOUT(enum tree_column, unused_tree_column);
LAYOUT(enum job_column, unused_job_column);
LAYOUT(enum logged, unused_logged);
LAYOUT(enum drop, unused_drop);
LAYOUT(enum count, unused_count);
LAYOUT(enum event_code, unused_event_code);

/* ------------------------------------------------------------------------------------------- small parts */

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

static __always_inline __u32 tag_of(__u32 w0, __u32 w1, __u32 w2, __u32 w3, __u32 w4, __u64 key)
{
	const __u64 m = 0x9E3779B97F4A7C15ull;
	__u64 h = key;

	h = (h ^ w0) * m;
	h ^= h >> 29;
	h = (h ^ w1) * m;
	h ^= h >> 29;
	h = (h ^ w2) * m;
	h ^= h >> 29;
	h = (h ^ w3) * m;
	h ^= h >> 29;
	h = (h ^ w4) * m;
	h ^= h >> 29;
	h *= 0xBF58476D1CE4E5B9ull;
	h ^= h >> 32;
	return h;
}

/* The linear checksum (R3) from sums s and sums of prefix sums t of both halves, by additions only:
 * the sum of (2j + 1) x_j over n values is (2n + 1) s - 2t, and 2n more for every x_j of the second half.
 */
static __always_inline __u32 linear(__u32 s0, __u32 t0, __u32 s1, __u32 t1)
{
	const __u32 half = VALUES / 2;

	return (2 * half + 1) * s0 - 2 * t0 + (4 * half + 1) * s1 - 2 * t1;
}

/* Functions that are not static are checked by the verifier for themselves, whoever calls them. Pointers may be null
 * for all it knows.
 */
__noinline int is_sound(const struct xagg_row *packet)
{
	__u32 s0 = 0, t0 = 0, s1 = 0, t1 = 0;

	if (!packet)
		return 0;
	UNROLL
	for (int j = 0; j < VALUES / 2; j++) {
		s0 += packet->payload[j];
		t0 += s0;
		s1 += packet->payload[j + VALUES / 2];
		t1 += s1;
	}
	return linear(s0, t0, s1, t1) == packet->checksum;
}

/* Tries for some microseconds: whoever holds a lock runs on another CPU and folds one packet. */
__noinline int acquire(__u64 *lock)
{
	if (!lock)
		return 0;
	for (int i = 0; i < 2000; i++)
		if (!__sync_val_compare_and_swap(lock, 0, 1))
			return 1;
	return 0;
}

static __always_inline void release(__u64 *lock)
{
	__sync_lock_test_and_set(lock, 0);
}

/* Bitmap with every retired id in it replaced by what it stands for (R5). */
__noinline __u32 effective(__u32 tree, __u32 bitmap)
{
	__u32 retired;

	tree &= MAX_TREES - 1;
	retired = tables.trees[tree][TREE_RETIRED] & bitmap;
	if (retired)
		for (int i = 0; i < MAX_CHILDREN; i++)
			bitmap |= tables.routes[tree].stands_for[i] & -(retired >> i & 1);
	return bitmap;
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

/* ------------------------------------------------------------------------------------------- folding, locked */

__noinline int fold_copy(struct xagg_row *row, const struct xagg_row *packet)
{
	if (!row || !packet)
		return 0;
	UNROLL
	for (int j = 0; j < VALUES; j++)
		row->payload[j] = packet->payload[j];
	row->checksum = packet->checksum;
	return 0;
}

__noinline int fold_add(struct xagg_row *row, const struct xagg_row *packet)
{
	if (!row || !packet)
		return 0;
	UNROLL
	for (int j = 0; j < VALUES; j++)
		row->payload[j] += packet->payload[j];
	row->checksum += packet->checksum;
	return 0;
}

/* The last contribution: the sum goes into the slot and into the packet, which leaves with it. `keep` is 0 where there
 * is nothing in the slot yet, else all ones. Adds the one's complement sum to `internet`; returns whether the payload
 * matches its checksum.
 */
__noinline int fold_out(struct xagg_row *row, struct xagg_row *packet, __u64 *internet, __u32 keep)
{
	__u32 s0 = 0, t0 = 0, s1 = 0, t1 = 0, a, b;
	__u64 sum = 0;

	if (!row || !packet || !internet)
		return 0;
	/* two values a turn: more would not stay in registers */
	_Pragma("clang loop unroll_count(4)")
	for (int j = 0; j < VALUES / 2; j++) {
		a = (row->payload[j] & keep) + packet->payload[j];
		b = (row->payload[j + VALUES / 2] & keep) + packet->payload[j + VALUES / 2];
		row->payload[j] = a;
		row->payload[j + VALUES / 2] = b;
		packet->payload[j] = a;
		packet->payload[j + VALUES / 2] = b;
		sum += a;
		sum += b;
		s0 += a;
		t0 += s0;
		s1 += b;
		t1 += s1;
	}
	a = (row->checksum & keep) + packet->checksum;
	row->checksum = a;
	packet->checksum = a;
	*internet += sum + a;
	return linear(s0, t0, s1, t1) == a;
}

/* Slot memory into the packet, header included; adds its one's complement sum to `internet`. */
__noinline int copy_out(const struct xagg_row *row, struct xagg_row *packet, __u64 *internet)
{
	__u64 sum = 0;

	if (!row || !packet || !internet)
		return 0;
	UNROLL
	for (int j = 0; j < ROW_BYTES / 4; j++) {
		((__u32 *)packet)[j] = ((const __u32 *)row)[j];
		sum += ((const __u32 *)row)[j];
	}
	*internet += sum;
	return 0;
}

/* ------------------------------------------------------------------------------------------- leaving */

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

/* The header of a slot's row for its next hop; `kind` with the flags in its high nibble. */
__noinline int stamp(struct xagg_row *row, const struct concern *c, __u32 kind, __u32 host, __u32 attempt)
{
	__u32 *words = (__u32 *)row, job_row;

	if (!row || !c)
		return 0;
	job_row = c->job_row & (MAX_JOBS - 1);
	words[0] = MAGIC_VERSION | kind << 8 | (__u32)tables.jobs[job_row][JOB_JOB] << 16;
	words[1] = host;
	words[2] = c->fragment;
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
		WRITE(*cursor, *cursor + 1);
	}
	release(lock);
	if (*cursor == tables.shards[index][SHARD_COUNT])
		f->wake = 1;
}

/* ------------------------------------------------------------------------------------------- one packet */

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

/* Whether a shard takes packets of this round; a newer one opens it if the last one is committed (R4). Slots reset when
 * first touched. -1: user space has to look.
 */
__noinline int admit_round(__u32 row, __u32 round, __u32 cpu)
{
	__u32 index = row & (MAX_SHARDS - 1), key = index, active;
	__s64 *shard = tables.shards[index];
	struct opening o;
	__u64 *lock;
	int verdict = D_OK;

	active = READ(shard[SHARD_ACTIVE]);
	if (!READ(shard[SHARD_COMMITTED])) {
		if (round == active)
			return D_OK;
		return newer32(round, active) ? D_NOT_OPEN : D_STALE_ROUND;
	}
	if (!newer32(round, active))
		return D_STALE_ROUND;
	lock = bpf_map_lookup_elem(&shard_locks, &key);
	if (!lock || !acquire(lock))
		return -1;
	active = READ(shard[SHARD_ACTIVE]);
	if (READ(shard[SHARD_COMMITTED]) && newer32(round, active)) {
		o.first = shard[SHARD_GROUP0];
		o.count = shard[SHARD_COUNT];
		bpf_loop((o.count + (1 << GROUP_SHIFT) - 1) >> GROUP_SHIFT, fill_group, &o, 0);
		shard[SHARD_ACTIVE] = round;
		shard[SHARD_UP_LOGGED] = 0;
		shard[SHARD_DOWN_LOGGED] = 0;
		__sync_lock_test_and_set(&shard[SHARD_COMMITTED], 0);
		report(cpu, E_OPENED, index, round, 0);
	} else if (round != active) {
		/* another packet was faster, with another round */
		verdict = newer32(round, active) ? D_NOT_OPEN : D_STALE_ROUND;
	}
	release(lock);
	return verdict;
}

/* Admit, fold and emit a contribution (Algorithm 1, lines 5 to 13). */
__noinline int contribute(struct frame *f, struct xagg_row *packet)
{
	struct concern *c;
	__u32 zero = 0, slot, tree, row_index;
	__u32 host, live, present, group, kind;
	__u32 root, to, emit, first = 0;
	int outcome = D_OK, done = 0, again = 0, sound = 1, pass = 0, answer = 0;
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
	host = 1u << (c->child & 31);
	row = row_of(slot);
	lock = bpf_map_lookup_elem(&slot_locks, &slot);
	base = bpf_map_lookup_elem(&slots, &zero);
	if (!row || !lock || !base || slot >= geometry.capacity)
		return PASS;
	PIN(slot);
	if (slot >= geometry.capacity)
		return PASS;

	words = base + (__u64)slot * 4;
	bytes = base + slot;

	group = (__u32)tables.shards[row_index][SHARD_GROUP0] + (c->fragment >> GROUP_SHIFT);
	if (group >= geometry.groups)
		return PASS;
	root = tables.trees[tree][TREE_IS_ROOT] != 0;
	to = root ? TO_GROUP : TO_PARENT;
	live = tables.trees[tree][TREE_LIVE];
	emit = may_leave(f, tree, to);

	if (!acquire(lock))
		return PASS;
	int untouched = BYTE(state) == S_FREE || WORD(round) != c->round;
	if (BYTE(state) == S_RESULT && !untouched) {
		outcome = D_DUPLICATE;
		answer = may_leave(f, tree, c->child);
		if (answer)
			copy_out(row, packet, &sum);
	} else if (!untouched && BYTE(misfit)) {
		pass = 1;
	} else if (c->attempt != (untouched ? 0 : BYTE(attempt))) {
		if (newer8(untouched ? 0 : BYTE(attempt), c->attempt))
			outcome = D_STALE_ATTEMPT;
		else if (root)
			pass = 1;
		else
			outcome = D_FUTURE_ATTEMPT;
	} else {
		if (untouched) {
			WORD(round) = c->round;
			BYTE(state) = S_COLLECT;
			WORD(bitmap) = 0;
			BYTE(attempt) = 0;
			BYTE(exponent) = 0;
			BYTE(misfit) = 0;
			BYTE(announced) = 0;
			BYTE(logged) = 0;
			*(__u32 *)row = 0;
		}
		present = effective(tree, WORD(bitmap));
		if (present & host) {
			outcome = D_DUPLICATE;
		} else {
			first = WORD(bitmap) == 0;
			WORD(bitmap) |= host;
			done = ((present | host) & live) == live;
			if (done) {
				sound = fold_out(row, packet, &sum, first ? 0 : ~0u);
				if (!sound) {
					WORD(bitmap) = 0;
				} else {
					__u8 bit = root ? LOGGED_DOWN : LOGGED_UP;
					__s32 *left = base + (root ? geometry.down_left : geometry.up_left) +
						      (__u64)group * 4;

					again = BYTE(logged) & bit;
					kind = root ? K_RESULT : K_DATA;
					if (!again) {
						if (__sync_fetch_and_add(left, -1) == 1)
							kind |= 0x10;
						BYTE(logged) |= emit ? bit | bit << 2 : bit;
					}
					stamp(row, c, kind, root ? 0 : (__u32)tables.trees[tree][TREE_BIT],
					      c->attempt);
					sum += copy_header(row, packet);
					BYTE(state) = root ? S_RESULT : S_SENT;
				}
			} else if (first) {
				fold_copy(row, packet);
			} else {
				fold_add(row, packet);
			}
			outcome = first ? -2 : -1;
		}
	}
	release(lock);

	if (pass)
		return PASS;
	if (outcome >= 0) {
		if (outcome != D_DUPLICATE)
			c->ended = 0;
		count_drop(f, outcome);
		if (answer) {
			leaves(f, tree, c->child);
			f->sum = sum;
			return KEEP;
		}
		if (outcome == D_DUPLICATE && !untouched && BYTE(state) == S_RESULT)
			report(f->cpu, E_ANSWER, row_index, c->fragment, c->child);
		return CONSUMED;
	}
	count_drop(f, D_OK);
	count(f, C_CONTRIBUTIONS);
	if (outcome == -2)
		count(f, C_FIRST);
	if (!done)
		return CONSUMED;
	count(f, C_COMPLETED);
	if (!sound) {
		count(f, C_CORRUPT_SLOTS);
		report(f->cpu, E_CORRUPT_SLOT, row_index, c->fragment, 0);
		return CONSUMED;
	}
	if (again) {
		report(f->cpu, root ? E_AGAIN_DOWN : E_AGAIN_UP, row_index, c->fragment, 0);
		return CONSUMED;
	}
	append(f, row_index, c->slot0, c->fragment, !root, base);
	if (!emit) {
		f->wake = 1;
		return CONSUMED;
	}
	leaves(f, tree, to);
	f->sum = sum;
	return KEEP;
}

/* A result from the parent takes the slot over and goes on downwards (R4). */
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
		WORD(round) = c->round;
		BYTE(state) = S_COLLECT;
		WORD(bitmap) = 0;
		BYTE(attempt) = 0;
		BYTE(exponent) = 0;
		BYTE(misfit) = 0;
		BYTE(announced) = 0;
		BYTE(logged) = 0;
		*(__u32 *)row = 0;
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
			if (__sync_fetch_and_add(left, -1) == 1)
				kind |= 0x10;
			BYTE(logged) |= emit ? LOGGED_DOWN | LEFT_DOWN : LOGGED_DOWN;
		}
		stamp(row, c, kind, 0, BYTE(attempt));
		BYTE(misfit) = 0;
		BYTE(state) = S_RESULT;
		if (emit)
			copy_out(row, packet, &sum);
	}
	release(lock);

	count_drop(f, outcome);
	if (outcome == D_STALE_ATTEMPT)
		c->ended = 0;
	if (outcome != D_OK)
		return CONSUMED;
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

/* ------------------------------------------------------------------------------------------- frames */

static __always_inline __u32 folded(__u64 sum)
{
	sum = (sum & 0xFFFFFFFF) + (sum >> 32);
	sum = (sum & 0xFFFFFFFF) + (sum >> 32);
	sum = (sum & 0xFFFF) + (sum >> 16);
	sum = (sum & 0xFFFF) + (sum >> 16);
	return (sum & 0xFFFF) + (sum >> 16);
}

static __always_inline __u64 pseudo_sum(const struct iphdr *ip, __u32 bytes)
{
	return (__u64)ip->saddr + ip->daddr + bpf_htons(ip->protocol) + bpf_htons(bytes);
}

/* Ethernet, IP and UDP headers of what is left in the frame; `partial`: the sum is finished further down (a local
 * sender's, in generic mode). Returns false if the frame has become too short, which cannot be.
 */
static __always_inline int address_frame(struct xdp_md *ctx, struct frame *f, __u64 from, __u64 to, const __u8 *mac, __u32 bytes,
					 int partial)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__u64 sum;

	if ((void *)(udp + 1) > end)
		return 0;
	if (mac) {
		__builtin_memcpy(eth->h_source, eth->h_dest, ETH_ALEN);
		__builtin_memcpy(eth->h_dest, mac, ETH_ALEN);
		ip->saddr = bpf_htonl(from >> 16);
		ip->daddr = bpf_htonl(to >> 16);
		/* groups stay in the segment, as those that user space sends */
		ip->ttl = (to >> 44) == 0xE ? 1 : 64;
	}
	ip->tot_len = bpf_htons(bytes + f->head - sizeof(*eth));
	ip->check = 0;
	sum = 0;
#pragma clang loop unroll(full)
	for (int i = 0; i < 10; i++)
		sum += ((__u16 *)ip)[i];
	ip->check = ~folded(sum);
	if (!geometry.port)
		return 1;
	bytes += sizeof(*udp);
	if (mac) {
		udp->source = bpf_htons(from & 0xFFFF);
		udp->dest = bpf_htons(to & 0xFFFF);
	}
	udp->len = bpf_htons(bytes);
	if (partial) {
		udp->check = folded(pseudo_sum(ip, bytes));
	} else if (mac) {
		sum = f->sum + pseudo_sum(ip, bytes) + udp->source + udp->dest + udp->len;
		udp->check = ~folded(sum);
		if (!udp->check)
			udp->check = 0xFFFF;
	}
	return 1;
}

/* What has to leave this machine leaves. */
static __always_inline int emit_frame(struct xdp_md *ctx, struct frame *f, int partial)
{
	__u64 own = (__u64)geometry.address << 16 | geometry.port, to;
	__u32 tree = (__u32)f->to >> 6 & (MAX_TREES - 1), whom = f->to & 63, ifindex = f->ifindex;
	struct route *route = &tables.routes[tree];
	__u8 mac[8] = {};

	if (whom == TO_PARENT) {
		to = tables.trees[tree][TREE_PARENT_ENDPOINT];
		ifindex = route->parent_ifindex;
		__builtin_memcpy(mac, route->parent_mac, ETH_ALEN);
	} else if (whom == TO_GROUP) {
		to = route->group;
		mac[0] = 0x01;
		mac[2] = 0x5E;
		mac[3] = to >> 32 & 0x7F;
		mac[4] = to >> 24;
		mac[5] = to >> 16;
	} else {
		struct ethhdr *eth = (void *)(long)ctx->data;

		if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
			return XDP_ABORTED;
		to = f->source;
		__builtin_memcpy(mac, eth->h_source, ETH_ALEN);
	}
	if (!address_frame(ctx, f, own, to, mac, f->size, partial))
		return XDP_ABORTED;
	if (whom == TO_GROUP && geometry.ports > 1)
		return bpf_redirect_map(&ports, 0, BPF_F_BROADCAST);
	if (f->whole && ifindex == f->ifindex)
		return XDP_TX;
	/* on veth, a redirected frame needs nothing of the other end, one that bounces needs a program there */
	return bpf_redirect(ifindex, 0);
}

/* Remember where the packets of a neighbour come from, once it has shown that it knows the job's key. */
static __always_inline void learn(struct xdp_md *ctx, struct frame *f, const __u32 *packet)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	int job_row = tables.job_row[packet[0] >> 16];
	struct hop hop = { .ifindex = f->ifindex }, *known;

	if (job_row < 0 || (void *)(eth + 1) > (void *)(long)ctx->data_end)
		return;
	if (tag_of(packet[0], packet[1], packet[2], packet[3], packet[4], tables.keys[job_row & (MAX_JOBS - 1)]) !=
	    packet[5])
		return;
	__builtin_memcpy(hop.mac, eth->h_source, ETH_ALEN);
	known = bpf_map_lookup_elem(&hops, &f->source);
	if (known && known->ifindex == hop.ifindex && *(__u32 *)known->mac == *(__u32 *)hop.mac &&
	    *(__u32 *)(known->mac + 4) == *(__u32 *)(hop.mac + 4))
		return;
	bpf_map_update_elem(&hops, &f->source, &hop, BPF_ANY);
	report(f->cpu, E_HOP, -1, f->source, 0);
}

/* The addressed payload of a frame, if it is one for this node: fills in `f`. */
static __always_inline int parse(struct xdp_md *ctx, struct frame *f)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__u32 bytes;

	if ((void *)(udp + 1) > end || eth->h_proto != bpf_htons(ETH_P_IP) || *(__u8 *)ip != 0x45 ||
	    ip->daddr != bpf_htonl(geometry.address) || ip->frag_off & bpf_htons(0x3FFF))
		return 0;
	bytes = bpf_ntohs(ip->tot_len);
	if (geometry.port) {
		if (ip->protocol != IPPROTO_UDP || udp->dest != bpf_htons(geometry.port) ||
		    bytes != bpf_ntohs(udp->len) + sizeof(*ip))
			return 0;
		f->head = sizeof(*eth) + sizeof(*ip) + sizeof(*udp);
		f->source = (__u64)bpf_ntohl(ip->saddr) << 16 | bpf_ntohs(udp->source);
	} else {
		if (ip->protocol != XAGG_PROTOCOL)
			return 0;
		f->head = sizeof(*eth) + sizeof(*ip);
		f->source = (__u64)bpf_ntohl(ip->saddr) << 16;
	}
	bytes += sizeof(*eth);
	if (bytes < f->head + CONTROL_BYTES || (void *)eth + bytes > end)
		return 0;
	f->size = bytes - f->head;
	f->bytes = f->size;
	return 1;
}

static __always_inline void *payload(struct xdp_md *ctx, __u64 at, __u32 bytes)
{
	void *packet = (void *)(long)ctx->data;

	packet += at + (geometry.port ? 42 : 34);
	PIN(packet);
	return packet + bytes > (void *)(long)ctx->data_end ? 0 : packet;
}

/* One frame, one packet. */
static __always_inline int take_frame(struct xdp_md *ctx, struct frame *f)
{
	__u32 *packet = payload(ctx, 0, CONTROL_BYTES), kind, want;
	int verdict;

	if (!packet)
		return XDP_PASS;
	kind = packet[0] >> 8 & 0xF;
	if ((packet[0] & 0xFF) != MAGIC_VERSION) {
		count_drop(f, D_BAD_MAGIC);
		return XDP_DROP;
	}
	if (kind == 0 || kind > K_PROBE) {
		count_drop(f, D_BAD_TYPE);
		return XDP_DROP;
	}
	want = kind <= K_RESTART ? ROW_BYTES : kind == K_LOST ? LOST_BYTES : CONTROL_BYTES;
	if (f->size != want) {
		count_drop(f, f->size < want ? D_SHORT : D_OVERSIZED);
		return XDP_DROP;
	}
	if (kind > K_RESTART) {
		learn(ctx, f, packet);
		return XDP_PASS;
	}
	packet = payload(ctx, 0, ROW_BYTES);
	if (!packet)
		return XDP_PASS;
	verdict = take(f, (struct xagg_row *)packet);
	if (verdict == PASS)
		return XDP_PASS;
	return verdict == KEEP ? emit_frame(ctx, f, 0) : XDP_DROP;
}

/* What is kept moves to the front. */
static __always_inline int move_up(struct xdp_md *ctx, __u64 from, __u64 to)
{
	__u32 *a, *b;

	PIN(from);
	PIN(to);
	if (from >= MAX_SEGMENTS || to >= MAX_SEGMENTS)
		return 0;
	a = payload(ctx, from * ROW_BYTES, ROW_BYTES);
	b = payload(ctx, to * ROW_BYTES, ROW_BYTES);
	if (!a || !b)
		return 0;
	UNROLL
	for (int j = 0; j < ROW_BYTES / 4; j++)
		b[j] = a[j];
	return 1;
}

/* The last packet of a super-frame may be a shorter one; it is user space's. */
static __always_inline int move_tail(struct xdp_md *ctx, __u64 from, __u64 to, __u32 bytes)
{
	__u32 *a, *b;

	PIN(from);
	PIN(to);
	if (from > MAX_SEGMENTS || to > from)
		return 0;
	a = payload(ctx, from * ROW_BYTES, CONTROL_BYTES);
	b = payload(ctx, to * ROW_BYTES, CONTROL_BYTES);
	if (!a || !b)
		return 0;
	UNROLL
	for (int j = 0; j < CONTROL_BYTES / 4; j++)
		b[j] = a[j];
	if (bytes == CONTROL_BYTES)
		return 1;
	a = payload(ctx, from * ROW_BYTES, LOST_BYTES);
	b = payload(ctx, to * ROW_BYTES, LOST_BYTES);
	if (!a || !b)
		return 0;
	UNROLL
	for (int j = CONTROL_BYTES / 4; j < LOST_BYTES / 4; j++)
		b[j] = a[j];
	return 1;
}

static long take_segment(__u32 index, void *context)
{
	struct walk *w = context;
	struct frame *f = &w->frame;
	struct xdp_md *ctx = w->ctx;
	__u64 at = index;
	__u32 *packet;
	int verdict;

	if (at >= MAX_SEGMENTS)
		return 1;
	packet = payload(ctx, at * ROW_BYTES, ROW_BYTES);
	if (!packet)
		return 1;
	verdict = take(f, (struct xagg_row *)packet);
	if (verdict == CONSUMED)
		return 0;
	if (verdict == PASS && !f->pass) {
		/* what was to leave is lost here, and asked for again as any lost packet is */
		f->pass = 1;
		f->kept = 0;
	}
	if (f->kept < at)
		move_up(ctx, at, f->kept);
	f->kept++;
	return 0;
}

/* One frame of many packets: what a local sender, or the receive offload, put together. */
static __always_inline int take_frames(struct xdp_md *ctx, struct walk *w)
{
	__u32 *packet = payload(ctx, 0, CONTROL_BYTES), kind, segments, tail, i;
	struct frame *f = &w->frame;
	struct iphdr *ip;
	struct udphdr *udp;
	int partial;

	if (!packet)
		return XDP_PASS;
	kind = packet[0] >> 8 & 0xF;
	if ((packet[0] & 0xFF) != MAGIC_VERSION || kind > K_RESTART || f->size < ROW_BYTES) {
		if (f->size == CONTROL_BYTES || f->size == LOST_BYTES)
			learn(ctx, f, packet);
		return XDP_PASS;
	}
	ip = (void *)(long)ctx->data + sizeof(struct ethhdr);
	udp = (void *)(ip + 1);
	if ((void *)(udp + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	partial = geometry.port && folded(pseudo_sum(ip, f->size + sizeof(*udp))) == udp->check;
	segments = f->size / ROW_BYTES;
	tail = f->size % ROW_BYTES;
	/* a super-frame whose sum has been computed is nothing that this program could shorten */
	if (segments > MAX_SEGMENTS || (tail && segments == 1) || (segments > 1 && !partial))
		return XDP_PASS;
	bpf_loop(segments, take_segment, w, 0);
	if (tail) {
		if (!f->pass)
			f->kept = 0;
		f->pass = 1;
		if (tail != CONTROL_BYTES && tail != LOST_BYTES) {
			count_drop(f, D_SHORT);
			tail = 0;
		} else if (!move_tail(ctx, segments, f->kept, tail)) {
			return XDP_ABORTED;
		}
	}
	if (f->kept == 0 && !tail)
		return XDP_DROP;
	i = f->kept * ROW_BYTES + (f->pass ? tail : 0);
	if (i != f->size) {
		if (bpf_xdp_adjust_tail(ctx, (int)i - (int)f->size))
			return XDP_ABORTED;
		f->size = i;
		if (f->pass && !address_frame(ctx, f, 0, 0, 0, i, partial))
			return XDP_ABORTED;
	}
	if (f->pass)
		return XDP_PASS;
	return emit_frame(ctx, f, partial);
}

static __always_inline int aggregate(struct xdp_md *ctx, int whole)
{
	struct walk w = { .ctx = ctx, .frame = { .to = -1, .whole = whole, .ifindex = ctx->ingress_ifindex } };
	struct frame *f = &w.frame;
	int action;

	if (!parse(ctx, f))
		return XDP_PASS;
	f->cpu = bpf_get_smp_processor_id() & (MAX_CPUS - 1);
	/* entered first, then looked: user space closes first, then looks who is in */
	if (__sync_fetch_and_add(&tables.busy[f->cpu].inside, 1) < MAX_CPUS && !READ(tables.closed))
		action = whole ? take_frames(ctx, &w) : take_frame(ctx, f);
	else
		action = XDP_PASS;
	__sync_fetch_and_add(&tables.busy[f->cpu & (MAX_CPUS - 1)].inside, -1);
	if (action == XDP_PASS)
		count(f, C_PASSED);
	count(f, C_FRAMES);
	tables.figures[f->cpu & (MAX_CPUS - 1)].counts[C_BYTES] += f->bytes;
	if (f->wake && !__sync_lock_test_and_set(&tables.woken, 1))
		report(f->cpu, E_WORK, -1, 0, 0);
	return action;
}

/* for drivers: a frame is a packet */
SEC("xdp")
int aggregate_frames(struct xdp_md *ctx)
{
	return aggregate(ctx, 0);
}

/* for generic mode, where super-frames arrive whole */
SEC("xdp")
int aggregate_super_frames(struct xdp_md *ctx)
{
	return aggregate(ctx, 1);
}

#ifdef BENCH
/*
 * For measurements: the same packet again and again is another one every time. Child i % 4 sends fragment i / 4; the
 * counter, the first sender's address and the job's key are in tables.spare. `bench_vary` is what this itself costs.
 */
static __always_inline int vary(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__u32 *w = (void *)(udp + 1);
	__u64 i = tables.spare[0]++;

	if ((void *)(w + HEADER_WORDS) > (void *)(long)ctx->data_end)
		return 0;
	ip->saddr = bpf_htonl((__u32)tables.spare[1] + (i & 3));
	ip->daddr = bpf_htonl(geometry.address);
	udp->source = udp->dest = bpf_htons(geometry.port);
	w[0] = MAGIC_VERSION | K_DATA << 8 | (__u32)tables.jobs[0][JOB_JOB] << 16;
	w[1] = 1u << (i & 3);
	w[2] = i >> 2;
	w[3] = tables.shards[0][SHARD_ACTIVE];
	w[4] = 0;
	w[5] = tag_of(w[0], w[1], w[2], w[3], w[4], tables.keys[0]);
	return 1;
}

SEC("xdp")
int bench_vary(struct xdp_md *ctx)
{
	return vary(ctx) ? XDP_DROP : XDP_ABORTED;
}

SEC("xdp")
int bench_frames(struct xdp_md *ctx)
{
	return vary(ctx) ? aggregate(ctx, 0) : XDP_ABORTED;
}
#endif
