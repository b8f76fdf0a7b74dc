// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Loader-specific definitions for BPF programs: types, maps, helpers, sections.
 *
 * libbpf loads the compiled object, creates the maps that these macros define and relocates the
 * references to them. bcc compiles the source, but does not allow its own map functions in macros,
 * so the profiler's loader creates the maps for bcc and passes their descriptors as
 * KPROFILER_FD_name.
 */
#pragma once

typedef unsigned char u8;
typedef signed char s8;
typedef unsigned short u16;
typedef short s16;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
typedef long long s64;

#define INLINE static inline __attribute__((always_inline))
#define SIZED_BY_LOADER 1 /* the loader sets the actual size before loading */

#ifdef KPROFILER_BCC

#define GLOBAL INLINE
#define ARRAY(name, value, entries)
#define MMAP_ARRAY(name, value, entries)
#define SCRATCH(name, value)
#define HASH(name, value, entries)
#define HASH_OF(name, key, value, entries)
#define RING(name)
#define MAP_FD(name) bpf_pseudo_fd(1, KPROFILER_FD_##name)
#define LOOKUP(name, key) bpf_map_lookup_elem_(MAP_FD(name), key)
#define UPDATE(name, key, value) bpf_map_update_elem_(MAP_FD(name), key, value, BPF_ANY)
#define RING_OUTPUT(name, data, size, flags) \
	bpf_ringbuf_output((void *)MAP_FD(name), data, size, flags)
#define RING_USED(name) bpf_ringbuf_query((void *)MAP_FD(name), 0)
#define PROGRAM(section)

#else

#define GLOBAL __attribute__((noinline)) /* the verifier checks each global function once */
#define SECTION(name) __attribute__((section(name), used))
#define MAP(name, kind, key_type, value_type, entries, flag_bits) \
	struct { \
		int(*type)[kind]; \
		key_type *key; \
		value_type *value; \
		int(*max_entries)[entries]; \
		int(*map_flags)[flag_bits]; \
	} name SECTION(".maps")
#define ARRAY(name, value, entries) MAP(name, 2, u32, value, entries, 0)
#define MMAP_ARRAY(name, value, entries) MAP(name, 2, u32, value, entries, BPF_F_MMAPABLE)
#define SCRATCH(name, value) MAP(name, 6, u32, value, 1, 0)
#define HASH(name, value, entries) MAP(name, 1, u32, value, entries, 0)
#define HASH_OF(name, key, value, entries) MAP(name, 1, key, value, entries, 0)
#define LRU_HASH_OF(name, key, value, entries) MAP(name, 9, key, value, entries, 0)
/* An array of arrays of pages. The inner arrays can have any number of pages. */
#define ARRAY_OF_TABLES(name, page_bytes, slots) \
	struct { \
		int(*type)[12]; \
		int(*key_size)[4]; \
		int(*value_size)[4]; \
		int(*max_entries)[slots]; \
		struct { \
			int(*type)[2]; \
			int(*key_size)[4]; \
			int(*value_size)[page_bytes]; \
			int(*max_entries)[1]; \
			int(*map_flags)[BPF_F_MMAPABLE | BPF_F_INNER_MAP]; \
		} * values[]; \
	} name SECTION(".maps")
#define RING(name) \
	struct { \
		int(*type)[27]; \
		int(*max_entries)[4096]; \
	} name SECTION(".maps")
#define LOOKUP(map, key) bpf_map_lookup_elem(&map, key)
#define UPDATE(map, key, value) bpf_map_update_elem(&map, key, value, BPF_ANY)
#define RING_OUTPUT(map, data, size, flags) bpf_ringbuf_output(&map, data, size, flags)
#define RING_USED(map) bpf_ringbuf_query(&map, 0)
#define PROGRAM(section) SECTION(section)

/* Helper numbers are ABI: see the order of __BPF_FUNC_MAPPER in include/uapi/linux/bpf.h. */
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) =
	(void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static u32 (*bpf_get_prandom_u32)(void) = (void *)7;
static u32 (*bpf_get_smp_processor_id)(void) = (void *)8;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_get_current_comm)(void *buffer, u32 size) = (void *)16;
static u64 (*bpf_get_current_task)(void) = (void *)35;
static long (*bpf_perf_prog_read_value)(void *ctx, void *value, u32 size) = (void *)56;
static long (*bpf_get_stack)(void *ctx, void *buffer, u32 size, u64 flags) = (void *)67;
static u64 (*bpf_get_current_cgroup_id)(void) = (void *)80;
static long (*bpf_probe_read_user)(void *to, u32 size, const void *from) = (void *)112;
static long (*bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static unsigned long (*bpf_probe_read_kernel_str)(void *to, u32 size, const void *from) =
	(void *)115;
static long (*bpf_get_ns_current_pid_tgid)(u64 device, u64 inode, void *ids, u32 size) =
	(void *)120;
static u64 (*bpf_get_current_ancestor_cgroup_id)(int level) = (void *)123; /* 5.7 */
static u64 (*bpf_ktime_get_boot_ns)(void) = (void *)125;
static long (*bpf_seq_printf)(void *seq, const char *format, u32 size, const void *values,
			      u32 values_size) = (void *)126;
static long (*bpf_seq_write)(void *seq, const void *data, u32 size) = (void *)127;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
static u64 (*bpf_ringbuf_query)(void *ring, u64 flags) = (void *)134;
static long (*bpf_get_task_stack)(void *task, void *buffer, u32 size, u64 flags) =
	(void *)141; /* 5.9 */
static void *(*bpf_get_current_task_btf)(void) = (void *)158; /* 5.11 */
static u64 (*bpf_task_pt_regs)(void *task) = (void *)175;    /* 5.15 */

enum {
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
	BPF_RB_NO_WAKEUP = 1,
	BPF_RB_FORCE_WAKEUP = 2,
	BPF_F_USER_STACK = 1 << 8,
	BPF_F_MMAPABLE = 1 << 10,
	BPF_F_INNER_MAP = 1 << 12,
};

char license_text[] SECTION("license") = "Dual BSD/GPL";

#endif

#define READ_KERNEL(to, from) bpf_probe_read_kernel(&(to), sizeof(to), (void *)(from))
#define READ_USER(to, from) bpf_probe_read_user(&(to), sizeof(to), (void *)(from))
/*
 * Bounds x with a mask of consecutive ones, so that the verifier knows its range. The asm keeps the
 * compiler from removing the mask, which some verifiers need.
 */
#define BOUND(x, mask) asm volatile("%0 &= %1" : "+r"(x) : "i"(mask))
