// SPDX-License-Identifier: Apache-2.0
// What the wrappers of backends/cuda_common/ptx that datacenter Blackwell executes must become: one kernel each, in
// front of it the instructions by hand, of the syntax that the PTX ISA's section has. tools/check_ptx_wrappers compiles
// these and compares; nothing runs them.
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/cluster.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/float_pairs.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/ptx/tcgen05.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"

namespace ptx = tessera::backends::cuda_common::ptx;
using ptx::SharedBarrier;

#define PROBE extern "C" __global__ void

// clang-format off

// "tcgen05.mma": .cta_group.kind.block_scale.block16 [d-tmem], a-desc, b-desc, idesc, [scale-A-tmem], [scale-B-tmem],
// enable-input-d; true: D = A B + D, false: D = A B. Of a pair cta_group::2.
//= tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [d], a, b, idesc, [sfa], [sfb], adds != 0
PROBE mma_one(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t sfa, uint32_t sfb, int adds) {
  ptx::tcgen05::mma_nvfp4<1>(d, a, b, idesc, sfa, sfb, adds != 0);
}
//= tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [d], a, b, idesc, [sfa], [sfb], adds != 0
PROBE mma_pair(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t sfa, uint32_t sfb, int adds) {
  ptx::tcgen05::mma_nvfp4<2>(d, a, b, idesc, sfa, sfb, adds != 0);
}

// "tcgen05.cp": .cta_group.shape.multicast [taddr], s-desc; 32 rows of 128 bits, to the lanes of all four warps.
//= tcgen05.cp.cta_group::1.32x128b.warpx4 [to], desc
PROBE cp_one(uint32_t to, uint64_t desc) { ptx::tcgen05::cp_scales<1>(to, desc); }
//= tcgen05.cp.cta_group::2.32x128b.warpx4 [to], desc
PROBE cp_pair(uint32_t to, uint64_t desc) { ptx::tcgen05::cp_scales<2>(to, desc); }

// "tcgen05.alloc": .cta_group.sync.aligned.shared::cta.b32 [dst], nCols; dealloc: taddr, nCols.
//= tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [&to], columns
PROBE alloc_one(uint32_t* to, int columns) { ptx::tcgen05::alloc<1>(to, columns); }
//= tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [&to], columns
PROBE alloc_pair(uint32_t* to, int columns) { ptx::tcgen05::alloc<2>(to, columns); }
//= tcgen05.dealloc.cta_group::1.sync.aligned.b32 at, columns
PROBE dealloc_one(uint32_t at, int columns) { ptx::tcgen05::dealloc<1>(at, columns); }
//= tcgen05.dealloc.cta_group::2.sync.aligned.b32 at, columns
PROBE dealloc_pair(uint32_t at, int columns) { ptx::tcgen05::dealloc<2>(at, columns); }
//= tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned
PROBE relinquish_one() { ptx::tcgen05::relinquish_alloc_permit<1>(); }
//= tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned
PROBE relinquish_pair() { ptx::tcgen05::relinquish_alloc_permit<2>(); }

// "tcgen05.commit": .cta_group.mbarrier::arrive::one.shared::cluster.b64 [mbar]; with .multicast::cluster a mask of 16
// bits, bit r for the block of rank r.
//= tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [&barrier]
PROBE commit_one(SharedBarrier* barrier) { ptx::tcgen05::commit<1>(*barrier); }
//= tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [&barrier], blocks
PROBE commit_pair(SharedBarrier* barrier, uint32_t blocks) { ptx::tcgen05::commit<2>(*barrier, blocks); }

// "tcgen05.fence".
//= tcgen05.fence::before_thread_sync
PROBE fence_before() { ptx::tcgen05::fence_before_thread_sync(); }
//= tcgen05.fence::after_thread_sync
PROBE fence_after() { ptx::tcgen05::fence_after_thread_sync(); }

// "tcgen05.ld": .sync.aligned.shape.num.b32 r, [taddr]; 32x32b: register i of a lane is column i of its lane. Of use
// behind "tcgen05.wait::ld" alone.
//= tcgen05.ld.sync.aligned.32x32b.x8.b32 {t0, t1, t2, t3, t4, t5, t6, t7}, [from]
//= tcgen05.wait::ld.sync.aligned
//= store [to], t0
//= store [to+4], t1
//= store [to+8], t2
//= store [to+12], t3
//= store [to+16], t4
//= store [to+20], t5
//= store [to+24], t6
//= store [to+28], t7
PROBE ld_8(uint32_t from, uint32_t* to) {
  uint32_t r[8];
  ptx::tcgen05::ld(r, from);
  ptx::tcgen05::wait_ld(r);
  for (int i = 0; i < 8; ++i) to[i] = r[i];
}
//= tcgen05.ld.sync.aligned.32x32b.x16.b32
//+ {t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15}, [from]
//= tcgen05.wait::ld.sync.aligned
//= store [to], t0
//= store [to+4], t1
//= store [to+8], t2
//= store [to+12], t3
//= store [to+16], t4
//= store [to+20], t5
//= store [to+24], t6
//= store [to+28], t7
//= store [to+32], t8
//= store [to+36], t9
//= store [to+40], t10
//= store [to+44], t11
//= store [to+48], t12
//= store [to+52], t13
//= store [to+56], t14
//= store [to+60], t15
PROBE ld_16(uint32_t from, uint32_t* to) {
  uint32_t r[16];
  ptx::tcgen05::ld(r, from);
  ptx::tcgen05::wait_ld(r);
  for (int i = 0; i < 16; ++i) to[i] = r[i];
}
//= tcgen05.st.sync.aligned.32x32b.x8.b32 [to], {a, b, c, d, e, f, g, h}
//= tcgen05.wait::st.sync.aligned
PROBE st_8(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e, uint32_t f, uint32_t g, uint32_t h) {
  const uint32_t r[8] = {a, b, c, d, e, f, g, h};
  ptx::tcgen05::st(to, r);
  ptx::tcgen05::wait_st();
}

// "mbarrier.init": [addr], count. "fence.mbarrier_init": what the copy engine and other blocks need behind it.
//= mbarrier.init.shared::cta.b64 [&barrier], count
//= fence.mbarrier_init.release.cluster
PROBE barrier_init(SharedBarrier* barrier, int count) { barrier->init(count); }
//= mbarrier.arrive.shared::cta.b64 _, [&barrier]
PROBE barrier_arrive(SharedBarrier* barrier) { barrier->arrive(); }
//= mbarrier.arrive.expect_tx.shared::cta.b64 _, [&barrier], bytes
PROBE barrier_expect(SharedBarrier* barrier, int bytes) { barrier->arrive_and_expect(bytes); }
// "mbarrier.try_wait": waitComplete, [addr], phaseParity; again while the phase has not ended.
//= try_again:
//= mbarrier.try_wait.parity.shared::cta.b64 t0, [&barrier], parity
//= @!t0 bra try_again
PROBE barrier_wait(SharedBarrier* barrier, int parity) { barrier->wait(parity); }

// "cp.async.bulk": .dst.src.mbarrier::complete_tx::bytes [dstMem], [srcMem], size, [mbar]; .multicast::cluster: a mask.
//= cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [&to], [from], bytes, [&arrived]
PROBE bulk_copy(void* to, const void* from, int bytes, SharedBarrier* arrived) {
  ptx::copy_bulk(to, from, bytes, *arrived);
}
//= cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [&to], [from], bytes,
//+ [&arrived], blocks
PROBE bulk_copy_to(uint32_t blocks, void* to, const void* from, int bytes, SharedBarrier* arrived) {
  ptx::copy_bulk_to(blocks, to, from, bytes, *arrived);
}

// "fence.proxy.async": what a pair's odd block passes on.
//= fence.proxy.async.shared::cta
PROBE show_to_products() { ptx::show_to_products(); }

// "%cluster_ctarank", "barrier.cluster".
//= store [to], %cluster_ctarank
PROBE rank(int* to) { *to = ptx::cluster_rank(); }
//= barrier.cluster.arrive.release.aligned
//= barrier.cluster.wait.acquire.aligned
PROBE cluster_barrier() { ptx::sync_cluster(); }
// "mapa": d, a, rank: the address of block `rank` of the cluster. "fence": .release and .acquire of .sync_restrict;
// "mbarrier.arrive.relaxed" orders nothing itself.
//= mapa.shared::cluster.u32 t0, &barrier, rank
//= fence.release.sync_restrict::shared::cta.cluster
//= mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [t0]
PROBE arrive_elsewhere(SharedBarrier* barrier, int rank) { ptx::arrive_at(*barrier, rank); }
//= try_again:
//= mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 t0, [&barrier], parity
//= @!t0 bra try_again
//= fence.acquire.sync_restrict::shared::cluster.cluster
PROBE wait_for_others(SharedBarrier* barrier, int parity) { ptx::wait_for_cluster(*barrier, parity); }

// "cvt": of two sources the first goes to the upper half, the second to the lower one.
//= cvt.rn.satfinite.e2m1x2.f32 t0, b, a
//= cvt.rn.satfinite.e2m1x2.f32 t1, d, c
//= cvt.rn.satfinite.e2m1x2.f32 t2, f, e
//= cvt.rn.satfinite.e2m1x2.f32 t3, h, g
//= store [to], {t0, t1, t2, t3}
PROBE codes(uint32_t* to, float a, float b, float c, float d, float e, float f, float g, float h) {
  const float values[8] = {a, b, c, d, e, f, g, h};
  *to = ptx::e2m1_codes(values);
}
//= cvt.rn.satfinite.e4m3x2.f32 t0, 0f00000000, value
//= store [to], t0
PROBE scale_code(uint8_t* to, float value) { *to = ptx::e4m3_code(value); }
//= cvt.rn.bf16x2.f32 t0, second, first
//= store [to], t0
PROBE two_bf16(uint32_t* to, float first, float second) { *to = ptx::bf16_pair(first, second); }
//= cvt.rn.bf16x2.f32 t0, second, first
//= store [to], t0
PROBE two_outputs(uint32_t* to, float first, float second) { *to = ptx::round_to_bf16x2(first, second); }
// "rcp", "max".
//= rcp.approx.ftz.f32 t0, b
//= store [to], t0
PROBE reciprocal(float* to, float b) { *to = ptx::reciprocal_estimate(b); }
//= max.NaN.bf16x2 t0, a, b
//= store [to], t0
PROBE larger_of_two(uint32_t* to, uint32_t a, uint32_t b) { *to = ptx::larger_bf16x2(a, b); }
// "mul" (.f32x2).
//= mul.rn.f32x2 t0, a, b
//= store [to], t0
PROBE two_products(float2* to, float2 a, float2 b) { *to = ptx::multiply_two(a, b); }

// clang-format on
