/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What all programs know of packets, whatever maps they have. */
#ifndef INANET_XDP_PACKET_H
#define INANET_XDP_PACKET_H

#include "layout.h"

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define XAGG_PROTOCOL 253
/* keeps a value in one register: the verifier loses a range when the compiler recomputes what it belongs to */
#define PIN(x) asm volatile("" : "+r"(x))
/* the compiler may neither cache nor repeat this access: others write the same memory */
#define READ(x) (*(volatile typeof(x) *)&(x))
#define WRITE(x, v) (*(volatile typeof(x) *)&(x) = (v))

/* not referred to: they put the layouts into the object's BTF, in a section of their own so that .bss is the tables */
#define LAYOUT(type, name) const type *name SEC(".data.types") __attribute__((unused))

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

#endif
