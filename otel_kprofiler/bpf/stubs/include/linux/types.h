/* Types used by bcc's headers; identical on x86-64 and arm64. */
typedef unsigned char __u8, u8;
typedef signed char __s8, s8;
typedef unsigned short __u16, u16, __be16;
typedef short __s16, s16;
typedef unsigned int __u32, u32, __be32, __wsum;
typedef int __s32, s32;
typedef unsigned long long __u64, u64;
typedef long long __s64, s64;
typedef __u64 __attribute__((aligned(8))) __aligned_u64;
typedef unsigned long size_t, uintptr_t;
