/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Loops over a payload: checksum, copy, sum. All but the checksum under the lock of the slot. */
#ifndef INANET_XDP_FOLD_H
#define INANET_XDP_FOLD_H

#include "maps.h"

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

/* Two values at a time: rows are not aligned to 8 bytes, which no processor with a BPF compiler minds. */
__noinline int fold_copy(struct xagg_row *row, const struct xagg_row *packet)
{
	__u64 *target = (__u64 *)row->payload;
	const __u64 *source = (const __u64 *)packet->payload;

	if (!row || !packet)
		return 0;
	UNROLL
	for (int j = 0; j < VALUES / 2; j++)
		target[j] = source[j];
	row->checksum = packet->checksum;
	return 0;
}

__noinline int fold_add(struct xagg_row *row, const struct xagg_row *packet)
{
	__u64 *target = (__u64 *)row->payload;
	const __u64 *source = (const __u64 *)packet->payload;
	const __u64 carry = 1ull << 32;

	if (!row || !packet)
		return 0;
	UNROLL
	for (int j = 0; j < VALUES / 2; j++) {
		__u64 a = target[j], b = source[j], sum = a + b;

		/* what the lower half carries into the upper one is taken off again */
		target[j] = sum - ((a ^ b ^ sum) & carry);
	}
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
	UNROLL_LESS
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
	UNROLL_LESS
	for (int j = 0; j < ROW_BYTES / 4; j++) {
		((__u32 *)packet)[j] = ((const __u32 *)row)[j];
		sum += ((const __u32 *)row)[j];
	}
	*internet += sum;
	return 0;
}

#endif
