// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * XAgg's Algorithm 1 in the kernel (XAgg, sections IV-A, IV-B and IV-D), on the same tables as user space.
 *
 * inanet/proto/tree/xagg/policy.py is the specification: for a packet that is handled here, slots, logs, counters and what
 * leaves are the same, byte for byte. Everything that is not handled here, ordinary traffic first of all, is passed up
 * the stack, where the daemon's socket gets what is its own: control packets, exponents, restarts, and
 * all packets while the daemon itself works on the tables (`closed`). So user space never waits for the kernel longer than
 * for one packet, the kernel never waits for user space, and neither needs the other's locks.
 */
#include "resolve.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

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
static __noinline int emit_frame(struct xdp_md *ctx, struct frame *f, int partial)
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
static __noinline void learn(struct xdp_md *ctx, struct frame *f, const __u32 *packet)
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
static __noinline int parse(struct xdp_md *ctx, struct frame *f)
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

/* Not static, and so checked by the verifier once instead of in every turn of a loop and for every program; and compiled
 * once.
 */
__noinline int take_apart(struct frame *f, struct xagg_row *packet)
{
	return f && packet ? take(f, packet) : PASS;
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
	verdict = take_apart(f, (struct xagg_row *)packet);
	if (verdict == PASS) {
		/* exponents come before any data does */
		learn(ctx, f, packet);
		return XDP_PASS;
	}
	return verdict == KEEP ? emit_frame(ctx, f, 0) : XDP_DROP;
}

/* What is kept moves to the front. */
static __noinline int move_up(struct xdp_md *ctx, __u64 from, __u64 to)
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
static __noinline int move_tail(struct xdp_md *ctx, __u64 from, __u64 to, __u32 bytes)
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
	verdict = take_apart(f, (struct xagg_row *)packet);
	if (verdict == CONSUMED)
		return 0;
	if (verdict == PASS)
		learn(ctx, f, packet);
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
	/* an exchange, which nothing overtakes: an addition of which nobody wants the result would be no barrier */
	if (geometry.reorders)
		__sync_lock_test_and_set(&tables.busy[f->cpu & (MAX_CPUS - 1)].inside,
					 READ(tables.busy[f->cpu & (MAX_CPUS - 1)].inside) - 1);
	else
		WRITE(tables.busy[f->cpu & (MAX_CPUS - 1)].inside, READ(tables.busy[f->cpu & (MAX_CPUS - 1)].inside) - 1);
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
#include "bench.h"
#endif
