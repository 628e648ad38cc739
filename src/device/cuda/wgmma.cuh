/* wgmma: the warpgroup's matrix product, D (64 x N, f32 registers) += A (64 x 16) * B (16 x N).
 *
 * B, and A in the first form, are read from shared memory through descriptors; A in the second form is in registers. All tiles
 * have rows of 128 bytes (64 elements: one "panel" of a wider matrix) in the 128-byte swizzle that TMA writes:
 *
 *     K-major (q, k: the sum runs along a row)              MN-major (v: the sum runs down the rows)
 *     8 rows further: + 1024 bytes ("stride")               8 rows further: + 1024 bytes ("stride")
 *     16 columns further: start + 32 bytes                  16 rows further: start + 2048 bytes
 *                                                           next panel: + `panel` bytes ("leading")
 */
#ifndef RA_KERNELS_CUDA_WGMMA_CUH
#define RA_KERNELS_CUDA_WGMMA_CUH

#include "ptx.cuh"

namespace ra {

/* The low half of a descriptor; the high half (stride 1024, 128-byte swizzle) is the same for all. Adding to it moves the
 * start, in units of 16 bytes. */
__device__ __forceinline__ uint32_t wgmma_descriptor(const void *shared, uint32_t panel_bytes) {
    return (shared_address(shared) & 0x3ffff) >> 4 | (panel_bytes >> 4) << 16;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/* Keeps the compiler from moving uses of accumulators across a wait: it does not know that they change there. */
template <int R> __device__ __forceinline__ void wgmma_settle(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* Operands in registers must be there before the fence. */
template <int R> __device__ __forceinline__ void wgmma_settle(uint32_t (&a)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+r"(a[i])::"memory");
}

/* ss: D = A*B + (keep ? D : 0), both K-major in shared memory. rs: D += A*B, A in registers, B MN-major in shared memory. st:
 * as ss, B MN-major. Those called _begin overwrite D, and the compiler knows it: D takes no registers before. */
template <typename T, int N> struct Wgmma;

/* The accumulators as a list of placeholders and as a list of operands with constraint c, for N/2 = 32, 40, ... of them. */
#define RA_L0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RA_L8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define RA_L16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define RA_L24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define RA_L32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define RA_L40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define RA_L48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define RA_L56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define RA_L64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define RA_L72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define RA_L80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define RA_L88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define RA_L96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define RA_L104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define RA_L112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define RA_L120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define RA_S32 RA_L0 ", " RA_L8 ", " RA_L16 ", " RA_L24
#define RA_S40 RA_S32 ", " RA_L32
#define RA_S48 RA_S40 ", " RA_L40
#define RA_S56 RA_S48 ", " RA_L48
#define RA_S64 RA_S56 ", " RA_L56
#define RA_S72 RA_S64 ", " RA_L64
#define RA_S80 RA_S72 ", " RA_L72
#define RA_S88 RA_S80 ", " RA_L80
#define RA_S96 RA_S88 ", " RA_L88
#define RA_S104 RA_S96 ", " RA_L96
#define RA_S112 RA_S104 ", " RA_L104
#define RA_S120 RA_S112 ", " RA_L112
#define RA_S128 RA_S120 ", " RA_L120
#define RA_F8(c, d, i)                                                                                                         \
    c "f"(d[i]), c "f"(d[i + 1]), c "f"(d[i + 2]), c "f"(d[i + 3]), c "f"(d[i + 4]), c "f"(d[i + 5]), c "f"(d[i + 6]),         \
        c "f"(d[i + 7])
#define RA_O32(c, d) RA_F8(c, d, 0), RA_F8(c, d, 8), RA_F8(c, d, 16), RA_F8(c, d, 24)
#define RA_O40(c, d) RA_O32(c, d), RA_F8(c, d, 32)
#define RA_O48(c, d) RA_O40(c, d), RA_F8(c, d, 40)
#define RA_O56(c, d) RA_O48(c, d), RA_F8(c, d, 48)
#define RA_O64(c, d) RA_O56(c, d), RA_F8(c, d, 56)
#define RA_O72(c, d) RA_O64(c, d), RA_F8(c, d, 64)
#define RA_O80(c, d) RA_O72(c, d), RA_F8(c, d, 72)
#define RA_O88(c, d) RA_O80(c, d), RA_F8(c, d, 80)
#define RA_O96(c, d) RA_O88(c, d), RA_F8(c, d, 88)
#define RA_O104(c, d) RA_O96(c, d), RA_F8(c, d, 96)
#define RA_O112(c, d) RA_O104(c, d), RA_F8(c, d, 104)
#define RA_O120(c, d) RA_O112(c, d), RA_F8(c, d, 112)
#define RA_O128(c, d) RA_O120(c, d), RA_F8(c, d, 120)
/* A .. E number the operands that follow the R accumulators. */
#define RA_WGMMA_SHARED(METHOD, TRANSPOSE_A, TRANSPOSE_B, CONSTRAINT, KEEP, N, R, NAME, A, B)                                  \
    static __device__ __forceinline__ void METHOD(float (&d)[N / 2], uint32_t a, uint32_t b) {                                 \
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\n.reg .b32 h;\nmov.b32 h, 0x40000040;\n"                               \
                     "mov.b64 a, {%" #A ", h};\nmov.b64 b, {%" #B ", h};\nsetp.ne.b32 p, " #KEEP ", 0;\n"                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" RA_S##R                              \
                     "}, a, b, p, 1, 1, " #TRANSPOSE_A ", " #TRANSPOSE_B ";\n}"                                                \
                     : RA_O##R(CONSTRAINT, d)                                                                                  \
                     : "r"(a), "r"(b)                                                                                          \
                     : "memory");                                                                                              \
    }
#define RA_WGMMA_TYPE(N, R, TYPE, NAME, A, B, C, D, E)                                                                         \
    template <> struct Wgmma<TYPE, N> {                                                                                        \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint32_t a, uint32_t b, int keep) {                       \
            asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\n.reg .b32 h;\nmov.b32 h, 0x40000040;\n"                           \
                         "mov.b64 a, {%" #A ", h};\nmov.b64 b, {%" #B ", h};\nsetp.ne.b32 p, %" #C ", 0;\n"                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" RA_S##R                          \
                         "}, a, b, p, 1, 1, 0, 0;\n}"                                                                          \
                         : RA_O##R("+", d)                                                                                     \
                         : "r"(a), "r"(b), "r"(keep)                                                                           \
                         : "memory");                                                                                          \
        }                                                                                                                      \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,       \
                                                  uint32_t b) {                                                                \
            asm volatile("{\n.reg .b64 b;\n.reg .b32 h;\nmov.b32 h, 0x40000040;\nmov.b64 b, {%" #E ", h};\n"                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" RA_S##R                          \
                         "}, {%" #A ", %" #B ", %" #C ", %" #D "}, b, 1, 1, 1, 1;\n}"                                          \
                         : RA_O##R("+", d)                                                                                     \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b)                                                          \
                         : "memory");                                                                                          \
        }                                                                                                                      \
        static __device__ __forceinline__ void rs_begin(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                                        uint32_t b) {                                                          \
            asm volatile("{\n.reg .pred p;\n.reg .b64 b;\n.reg .b32 h;\nmov.b32 h, 0x40000040;\nmov.b64 b, {%" #E ", h};\n"    \
                         "setp.ne.b32 p, 0, 0;\n"                                                                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" RA_S##R                          \
                         "}, {%" #A ", %" #B ", %" #C ", %" #D "}, b, p, 1, 1, 1;\n}"                                          \
                         : RA_O##R("=", d)                                                                                     \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b)                                                          \
                         : "memory");                                                                                          \
        }                                                                                                                      \
        RA_WGMMA_SHARED(ss_begin, 0, 0, "=", 0, N, R, NAME, A, B)                                                              \
        RA_WGMMA_SHARED(ss_more, 0, 0, "+", 1, N, R, NAME, A, B)                                                               \
        RA_WGMMA_SHARED(st_begin, 0, 1, "=", 0, N, R, NAME, A, B)                                                              \
        RA_WGMMA_SHARED(st_more, 0, 1, "+", 1, N, R, NAME, A, B)                                                               \
    };
#define RA_WGMMA(N, R, A, B, C, D, E)                                                                                          \
    RA_WGMMA_TYPE(N, R, bf16, "bf16", A, B, C, D, E)                                                                           \
    RA_WGMMA_TYPE(N, R, f16, "f16", A, B, C, D, E)

RA_WGMMA(64, 32, 32, 33, 34, 35, 36)
RA_WGMMA(80, 40, 40, 41, 42, 43, 44)
RA_WGMMA(96, 48, 48, 49, 50, 51, 52)
RA_WGMMA(112, 56, 56, 57, 58, 59, 60)
RA_WGMMA(128, 64, 64, 65, 66, 67, 68)
RA_WGMMA(144, 72, 72, 73, 74, 75, 76)
RA_WGMMA(160, 80, 80, 81, 82, 83, 84)
RA_WGMMA(176, 88, 88, 89, 90, 91, 92)
RA_WGMMA(192, 96, 96, 97, 98, 99, 100)
RA_WGMMA(256, 128, 128, 129, 130, 131, 132)

} // namespace ra
#endif
