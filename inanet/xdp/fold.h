/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Loops over a payload: checksum, copy, sum. What changes a slot is called under its lock. */
#ifndef INANET_XDP_FOLD_H
#define INANET_XDP_FOLD_H

#include "maps.h"

enum soundness { SOUND, DAMAGED_PACKET, DAMAGED_SLOT };

/* The linear checksum from sums s and sums of prefix sums t of both halves, by additions only:
 * the sum of (2j + 1) x_j over n values is (2n + 1) s - 2t, and 2n more for every x_j of the second half.
 */
static __always_inline __u32 linear(__u32 s0, __u32 t0, __u32 s1, __u32 t1)
{
	const __u32 half = VALUES / 2;

	return (2 * half + 1) * s0 - 2 * t0 + (4 * half + 1) * s1 - 2 * t1;
}

/* Values of each half of a payload in a turn of a loop; a turn costs four instructions of its own, as long as both pointers
 * are moved on, which the compiler has to be told: it would keep an index, and not in a register.
 */
#define TURN 16
#define TURNS (VALUES / 2 / TURN)
_Static_assert(TURNS * TURN * 2 == VALUES, "payloads are taken in whole turns");
#define EACH _Pragma("clang loop unroll(full)") for (int k = 0; k < TURN; k++)
#define ONCE _Pragma("clang loop unroll(disable)") for (int turn = 0; turn < TURNS; turn++)
#define MOVE_ON(pointer) pointer += TURN; PIN(pointer)

/* Running sum, and sum of running sums. Written so that no register has to be copied: there are too few of them. Both halves
 * of a payload have their own, as each addition waits for the one before.
 */
#define WEIGH(s, t, value) asm volatile("%0 += %2\n\t%1 += %0" : "+&r"(s), "+&r"(t) : "r"(value))

/* Functions that are not static are checked by the verifier for themselves, whoever calls them. Pointers may be null
 * for all it knows.
 */
__noinline int is_sound(const struct xagg_row *packet)
{
	__u64 s = 0, t = 0, u = 0, v = 0, a;
	const __u32 *from;

	if (!packet)
		return 0;
	from = packet->payload;
	ONCE {
		EACH {
			a = from[k];
			WEIGH(s, t, a);
			a = from[k + VALUES / 2];
			WEIGH(u, v, a);
		}
		MOVE_ON(from);
	}
	return linear(s, t, u, v) == packet->checksum;
}

/* Two values at a time: rows are not aligned to 8 bytes, which no processor with a BPF compiler minds. */
__noinline int fold_copy(struct xagg_row *row, const struct xagg_row *packet)
{
	const __u64 *from;
	__u64 *to;

	if (!row || !packet)
		return 0;
	to = (__u64 *)row->payload;
	from = (const __u64 *)packet->payload;
	ONCE {
		EACH
			to[k] = from[k];
		MOVE_ON(to);
		MOVE_ON(from);
	}
	row->checksum = packet->checksum;
	return 0;
}

/* Takes off again what did not match its checksum. */
__noinline int fold_off(struct xagg_row *row, const struct xagg_row *packet)
{
	if (!row || !packet)
		return 0;
	UNROLL
	for (int j = 0; j < VALUES; j++)
		row->payload[j] -= packet->payload[j];
	return 0;
}

/* Adds a packet to its slot and checks it on the way, in one pass; if it is damaged, the slot is as before. */
__noinline int fold_add(struct xagg_row *row, const struct xagg_row *packet)
{
	__u64 s = 0, t = 0, u = 0, v = 0, a;
	const __u32 *from;
	__u32 *to;

	if (!row || !packet)
		return 0;
	to = row->payload;
	from = packet->payload;
	ONCE {
		EACH {
			a = from[k];
			WEIGH(s, t, a);
			to[k] += a;
			a = from[k + VALUES / 2];
			WEIGH(u, v, a);
			to[k + VALUES / 2] += a;
		}
		MOVE_ON(to);
		MOVE_ON(from);
	}
	if (linear(s, t, u, v) != packet->checksum) {
		fold_off(row, packet);
		return 0;
	}
	row->checksum += packet->checksum;
	return 1;
}

/* The last contribution: the sum goes into the slot and into the packet, which leaves with it. It is the sum that is
 * checked, and only if that is not sound, who is to blame. Adds the one's complement sum to `internet`.
 */
__noinline int fold_last(struct xagg_row *row, struct xagg_row *packet, __u64 *internet)
{
	__u64 s = 0, t = 0, u = 0, v = 0, a;
	const __u32 *from;
	__u32 *to, check;

	if (!row || !packet || !internet)
		return 0;
	to = row->payload;
	from = packet->payload;
	ONCE {
		EACH {
			a = to[k] + from[k];
			WEIGH(s, t, a);
			to[k] = a;
			a = to[k + VALUES / 2] + from[k + VALUES / 2];
			WEIGH(u, v, a);
			to[k + VALUES / 2] = a;
		}
		MOVE_ON(to);
		MOVE_ON(from);
	}
	check = row->checksum + packet->checksum;
	if (linear(s, t, u, v) != check) {
		if (!is_sound(packet)) {
			fold_off(row, packet);
			return DAMAGED_PACKET;
		}
		row->checksum = check;
		return DAMAGED_SLOT;
	}
	row->checksum = check;
	fold_copy(packet, row);
	*internet += s + u + check;
	return SOUND;
}

/* Slot memory into the packet, header included; adds its one's complement sum to `internet`. */
__noinline int copy_out(const struct xagg_row *row, struct xagg_row *packet, __u64 *internet)
{
	__u64 sum = 0;

	if (!row || !packet || !internet)
		return 0;
	UNROLL_LESS
	for (int j = 0; j < ROW_BYTES / 4; j++) {
		((__u32 *)packet)[j] = ((const __u32 *)row)[j];
		sum += ((const __u32 *)row)[j];
	}
	*internet += sum;
	return 0;
}

#endif
