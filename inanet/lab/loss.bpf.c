// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Loses a share of the IPv4 packets with UDP or TCP that arrive on an interface, one by one, before the receiver merges them.
 * On a veth the peer segments for it, as a network card would have.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* packets of a million that are lost; set before the program is loaded */
const volatile __u32 per_million = 0;

/* packets lost, by processor */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

SEC("xdp")
int lose(struct xdp_md *ctx)
{
	unsigned char *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 key = 0;
	__u64 *count;

	if (frame + 34 > end || frame[12] != 8 || frame[13] != 0 || (frame[23] != 17 && frame[23] != 6))
		return XDP_PASS;
	if (bpf_get_prandom_u32() % 1000000 >= per_million)
		return XDP_PASS;
	count = bpf_map_lookup_elem(&lost, &key);
	if (count)
		(*count)++;
	return XDP_DROP;
}
