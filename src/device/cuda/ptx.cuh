/* The instructions of Hopper and Ampere that CUDA C has no functions for, one function each. */
#ifndef RA_KERNELS_CUDA_PTX_CUH
#define RA_KERNELS_CUDA_PTX_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace ra {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/* Hides from the compiler where a value comes from: it would keep values derived from it in registers, and spill. */
template <typename I> __device__ __forceinline__ I afresh(I x) {
    if constexpr (sizeof(I) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}

/* x in a register from now on. What derives from threadIdx.x the assembler would make anew wherever it is needed, and reading
 * that takes as long as a small product; it cannot repeat a shuffle, though. */
__device__ __forceinline__ uint32_t keep(uint32_t x) {
    asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(x));
    return x;
}

/* ----------------------------------------------------------------------------------------------- between the blocks */

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *from) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(from)) : "memory");
    return x;
}

__device__ __forceinline__ void add_release(uint32_t *to, uint32_t x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}

/* The same within a block, through shared memory. */
__device__ __forceinline__ uint32_t load_acquire_shared(const uint32_t *from) {
    uint32_t x;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(from)) : "memory");
    return x;
}
__device__ __forceinline__ void store_release_shared(uint32_t *to, uint32_t x) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(x) : "memory");
}

/* Four floats to an address that is a multiple of 16: stored, or added by memory itself to what is there, for which nobody
 * waits. */
__device__ __forceinline__ void put_4(uint64_t to, float4 x, bool store, bool add) {
    asm volatile("{\n.reg .pred s, a;\nsetp.ne.b32 s, %5, 0;\nsetp.ne.b32 a, %6, 0;\n"
                 "@s st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
                 "@a red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"((int)store), "r"((int)add)
                 : "memory");
}

/* Between two kernels of a stream: the next one may start before this one ends, and waits until all of it is done. */
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* Some warps of a block wait for each other. */
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ------------------------------------------------------------------------------------------------------- arithmetic */

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats as a pair of 16-bit values, the first in the low half. */
template <typename T> __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    if constexpr (Same<T, bf16>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* --------------------------------------------------------------------------------------------------------- mbarrier */

__device__ __forceinline__ void mbarrier_init(uint64_t *bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(uint64_t *bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(bar)), "r"(parity)
                 : "memory");
    return done != 0;
}

/* The same at once: the other may wait for a while. */
__device__ __forceinline__ bool mbarrier_test(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(bar)), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t *bar, uint32_t parity) {
#ifdef RA_WATCHDOG /* a lost arrival becomes a trap instead of a hang */
    for (int spins = 0; !mbarrier_try(bar, parity); spins++)
        if (spins > 1 << 22) __trap();
#else
    while (!mbarrier_try(bar, parity)) {}
#endif
}

/* -------------------------------------------------------------------------------------------------------------- TMA */

/* The box at coordinates (c0 .. c4) of a 5-D tensor map into shared memory; bar counts its bytes. */
__device__ __forceinline__ void tma_load(void *shared, const CUtensorMap *map, uint64_t *bar, int c0, int c1, int c2, int c3,
                                         int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
                 "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

/* The same back to the tensor, by threads with `mine` set: a branch would cost more. Outside the tensor nothing is written. */
__device__ __forceinline__ void tma_store(bool mine, const CUtensorMap *map, const void *shared, int c0, int c1, int c2, int c3,
                                          int c4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %7, 0;\n"
                 "@p cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n}" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"((int)mine)
                 : "memory");
}

/* Bytes (a multiple of 16) from shared to global memory, or added to what is there; the thread's stores so far, as one group;
 * waits for all groups but the last Pending ones, or until all have read what they store. */
__device__ __forceinline__ void bulk_store(void *global, const void *shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add(float *global, const void *shared, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/* What this thread wrote to shared memory is there for TMA and wgmma, too. */
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* ---------------------------------------------------------------------------------------------------------- cp.async */

/* 16 bytes from global to shared memory, or 16 zero bytes. */
__device__ __forceinline__ void cp_async_16(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* --------------------------------------------------------------------------------------------------------- mma.sync */

__device__ __forceinline__ void ldmatrix_4(uint32_t (&r)[4], const void *shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

__device__ __forceinline__ void stmatrix_4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1), "r"(r2),
                 "r"(r3)
                 : "memory");
}

/* Rows of the matrices become columns. */
__device__ __forceinline__ void stmatrix_4_trans(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_4_trans(uint32_t (&r)[4], const void *shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

/* d += a * b, 16 x 8 x 16. */
template <typename T> __device__ __forceinline__ void mma_16816(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (Same<T, bf16>::value)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace ra
#endif
