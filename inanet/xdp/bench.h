/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Programs for measurements only. */
#ifndef INANET_XDP_BENCH_H
#define INANET_XDP_BENCH_H

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
