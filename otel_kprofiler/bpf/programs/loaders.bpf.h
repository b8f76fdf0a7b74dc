// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What every program needs of its loader: types, maps, helpers, sections.
 *
 * libbpf loads the compiled object: it makes the maps from their definitions here and relocates
 * them. bcc compiles the source but allows its own map functions in no macro: there our loader
 * makes the maps and passes their descriptors, KPROFILER_FD_name.
 */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef short s16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define INLINE static inline __attribute__((always_inline))
#define SIZED_BY_LOADER 1 /* the loader sets the real size before it loads */

#ifdef KPROFILER_BCC

#define ARRAY(name, value, entries)
#define MMAP_ARRAY(name, value, entries)
#define SCRATCH(name, value)
#define HASH(name, value, entries)
#define RING(name)
#define MAP_FD(name) bpf_pseudo_fd(1, KPROFILER_FD_##name)
#define LOOKUP(name, key) bpf_map_lookup_elem_(MAP_FD(name), key)
#define RING_OUTPUT(name, data, size, flags) \
	bpf_ringbuf_output((void *)MAP_FD(name), data, size, flags)
#define RING_USED(name) bpf_ringbuf_query((void *)MAP_FD(name), 0)
#define PROGRAM(section)

#else

#define SECTION(name) __attribute__((section(name), used))
#define MAP(name, kind, value_type, entries, flag_bits) \
	struct { \
		int(*type)[kind]; \
		u32 *key; \
		value_type *value; \
		int(*max_entries)[entries]; \
		int(*map_flags)[flag_bits]; \
	} name SECTION(".maps")
#define ARRAY(name, value, entries) MAP(name, 2, value, entries, 0)
#define MMAP_ARRAY(name, value, entries) MAP(name, 2, value, entries, 1 << 10)
#define SCRATCH(name, value) MAP(name, 6, value, 1, 0)
#define HASH(name, value, entries) MAP(name, 1, value, entries, 0)
#define RING(name) \
	struct { \
		int(*type)[27]; \
		int(*max_entries)[4096]; \
	} name SECTION(".maps")
#define LOOKUP(map, key) bpf_map_lookup_elem(&map, key)
#define RING_OUTPUT(map, data, size, flags) bpf_ringbuf_output(&map, data, size, flags)
#define RING_USED(map) bpf_ringbuf_query(&map, 0)
#define PROGRAM(section) SECTION(section)

/* Helper numbers are ABI: the order of __BPF_FUNC_MAPPER in include/uapi/linux/bpf.h. */
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static u32 (*bpf_get_smp_processor_id)(void) = (void *)8;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_get_current_comm)(void *buffer, u32 size) = (void *)16;
static u64 (*bpf_get_current_task)(void) = (void *)35;
static long (*bpf_get_stack)(void *ctx, void *buffer, u32 size, u64 flags) = (void *)67;
static u64 (*bpf_get_current_cgroup_id)(void) = (void *)80;
static long (*bpf_probe_read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static unsigned long (*bpf_probe_read_kernel_str)(void *to, u32 size, const void *from) =
	(void *)115;
static long (*bpf_get_ns_current_pid_tgid)(u64 device, u64 inode, void *ids, u32 size) =
	(void *)120;
static u64 (*bpf_ktime_get_boot_ns)(void) = (void *)125;
static long (*bpf_seq_printf)(void *seq, const char *format, u32 size, const void *values,
			      u32 values_size) = (void *)126;
static long (*bpf_seq_write)(void *seq, const void *data, u32 size) = (void *)127;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
static u64 (*bpf_ringbuf_query)(void *ring, u64 flags) = (void *)134;

enum {
	BPF_RB_NO_WAKEUP = 1,
	BPF_RB_FORCE_WAKEUP = 2,
	BPF_F_USER_STACK = 1 << 8,
};

char license_text[] SECTION("license") = "Dual BSD/GPL";

#endif
