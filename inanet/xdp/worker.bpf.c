// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Results for a worker, from the driver into memory that the worker reads without a system call.
 *
 * Taken is only what a parent sends as a result of one of the worker's jobs: to the worker's own address and port or to a
 * group that it hears, from the parent's, with a header tag made with the job's key. A frame of which any packet is
 * something else goes up the stack as it came, to the worker's socket, and so does what finds no room. Nothing is
 * judged here beyond that: rounds, attempts and checksums are looked at by the worker, as for packets from its socket.
 */
#include "packet.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

const volatile struct inbox_geometry geometry;
struct inbox inbox;

/* sizes are set by the loader */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 8);
} results SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 8);
} runs SEC(".maps");

/* keys of the jobs, by who may send their results */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct sender);
	__type(value, __u64);
} senders SEC(".maps");

/* endpoints of the groups that the worker hears */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, __u64);
	__type(value, __u64);
} groups SEC(".maps");

/* one record whenever the worker sleeps and something has come */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} wakeups SEC(".maps");

LAYOUT(struct xagg_row, unused_row);
LAYOUT(struct run, unused_run);
LAYOUT(enum kind, unused_kind);
LAYOUT(enum inbox_count, unused_count);

/* One frame, and what is known of its sender. */
struct look {
	struct xdp_md *ctx;
	struct sender sender;
	__u64 key;
	/* bytes before the payload, and of the payload */
	__u32 head;
	__u32 size;
	/* `key` is that of the job in `sender` */
	__u32 known;
	/* results found so far */
	__u32 results;
};

static __always_inline void count(enum inbox_count what, __u64 how_many)
{
	inbox.counts[bpf_get_smp_processor_id() & (MAX_CPUS - 1)][what] += how_many;
}

static __always_inline int pass(enum inbox_count why, __u64 how_many)
{
	count(why, how_many);
	count(I_PASSED, 1);
	return XDP_PASS;
}

/* Whether a frame is for this worker: whose it is, and where its payload lies. */
static __always_inline int parse(struct xdp_md *ctx, struct look *l)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__u64 target;
	__u32 bytes;

	if ((void *)(udp + 1) > (void *)(long)ctx->data_end || eth->h_proto != bpf_htons(ETH_P_IP) ||
	    *(__u8 *)ip != 0x45 || ip->frag_off & bpf_htons(0x3FFF))
		return 0;
	bytes = bpf_ntohs(ip->tot_len);
	target = (__u64)bpf_ntohl(ip->daddr) << 16;
	l->sender.endpoint = (__u64)bpf_ntohl(ip->saddr) << 16;
	l->head = sizeof(*eth) + sizeof(*ip);
	if (geometry.port) {
		if (ip->protocol != IPPROTO_UDP || bytes != bpf_ntohs(udp->len) + sizeof(*ip))
			return 0;
		target |= bpf_ntohs(udp->dest);
		l->sender.endpoint |= bpf_ntohs(udp->source);
		l->head += sizeof(*udp);
	} else if (ip->protocol != XAGG_PROTOCOL) {
		return 0;
	}
	bytes += sizeof(*eth);
	if (bytes < l->head || bytes > bpf_xdp_get_buff_len(ctx))
		return 0;
	l->size = bytes - l->head;
	if (target == ((__u64)geometry.address << 16 | geometry.port))
		return 1;
	return target >> 44 == 0xE && bpf_map_lookup_elem(&groups, &target);
}

/* Whether a packet is a result of one of the worker's jobs. Ends the loop at the first that is not. */
static long look_at(__u32 index, void *context)
{
	struct look *l = context;
	__u32 w[HEADER_WORDS];

	if (bpf_xdp_load_bytes(l->ctx, l->head + index * ROW_BYTES, w, sizeof(w)))
		return 1;
	if ((w[0] & 0xFFF) != (MAGIC_VERSION | K_RESULT << 8) || w[1])
		return 1;
	if (!l->known || l->sender.job != w[0] >> 16) {
		__u64 *key;

		l->sender.job = w[0] >> 16;
		key = bpf_map_lookup_elem(&senders, &l->sender);
		if (!key)
			return 1;
		l->key = *key;
		l->known = 1;
	}
	if (tag_of(w[0], w[1], w[2], w[3], w[4], l->key) != w[5])
		return 1;
	l->results++;
	return 0;
}

/* Takes rows of the ring; returns the first one's number, or -1 if there are not enough of them. */
static __always_inline __s64 reserve(__u64 packets)
{
	/* another CPU may be faster, but not that often */
	for (int i = 0; i < 16; i++) {
		__u64 head = READ(inbox.head);

		/* negative if the reader has come past what is an old head by now */
		if ((__s64)(head + packets - READ(inbox.tail)) > geometry.rows)
			return -1;
		if (__sync_val_compare_and_swap(&inbox.head, head, head + packets) == head)
			return head;
	}
	return -1;
}

SEC("xdp.frags")
int receive_results(struct xdp_md *ctx)
{
	struct look l = { .ctx = ctx };
	__u64 packets, bytes, at;
	__u32 zero = 0;
	struct run *run;
	void *ring;
	__s64 head;
	int action;

	if (!parse(ctx, &l))
		return XDP_PASS;
	count(I_FRAMES, 1);
	count(I_BYTES, l.size);
	packets = l.size / ROW_BYTES;
	if (packets == 0 || packets > MAX_SEGMENTS || packets * ROW_BYTES != l.size)
		return pass(I_OTHER, 1);
	bpf_loop(packets, look_at, &l, 0);
	if (l.results != packets)
		return pass(I_FOREIGN, 1);
	ring = bpf_map_lookup_elem(&results, &zero);
	run = bpf_map_lookup_elem(&runs, &zero);
	if (!ring || !run)
		return pass(I_FULL, packets);
	head = reserve(packets);
	if (head < 0)
		return pass(I_FULL, packets);
	at = head & (geometry.rows - 1);
	bytes = packets * ROW_BYTES;
	PIN(at);
	PIN(bytes);
	run += at;
	if (at >= geometry.rows || bytes == 0 || bytes > MAX_SEGMENTS * ROW_BYTES)
		/* for the verifier: they are not */
		return XDP_ABORTED;
	/* rows that were taken must be told of, whatever happens: without a source they are passed over */
	action = bpf_xdp_load_bytes(ctx, l.head, ring + at * ROW_BYTES, bytes) ? XDP_PASS : XDP_DROP;
	run->source = action == XDP_DROP ? l.sender.endpoint : 0;
	run->packets = packets;
	/* in order with what was written before, and with the look at `asleep` after it */
	__sync_lock_test_and_set(&run->ready, head + 1);
	if (READ(inbox.asleep) && __sync_lock_test_and_set(&inbox.asleep, 0))
		bpf_ringbuf_output(&wakeups, &head, sizeof(head), BPF_RB_FORCE_WAKEUP);
	if (action == XDP_PASS)
		return pass(I_OTHER, 1);
	count(I_TAKEN, packets);
	return XDP_DROP;
}
