// SPDX-License-Identifier: Apache-2.0
// As ptx_wrappers_100a.cu, of GPUs whose warps multiply blocks.
#include "backends/cuda_common/ptx/block_scaled_mma.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/registers.cuh"

namespace ptx = tessera::backends::cuda_common::ptx;

#define PROBE extern "C" __global__ void

// clang-format off

// "mma", block scaling: .m16n8k64.row.col.kind.block_scale.scale_vec.dtype.atype.btype.ctype.stype d, a, b, c,
// scale-a-data, {byte-id-a, thread-id-a}, scale-b-data, {byte-id-b, thread-id-b}. Of four scales byte-id is 0.
//= mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
//+ {t0, t1, t2, t3}, {a.0, a.1, a.2, a.3}, {b0, b1}, {c0, c1, c2, c3}, sfa, {0, 1}, sfb, {0, 0}
//= store [to], {t0, t1, t2, t3}
PROBE mma_second_lanes_of_a(float4* to, float c0, float c1, float c2, float c3, uint4 a, uint32_t b0, uint32_t b1, uint32_t sfa, uint32_t sfb) {
  float sums[4] = {c0, c1, c2, c3};
  ptx::mma_nvfp4<1, 0>(sums, a, b0, b1, sfa, sfb);
  *to = {sums[0], sums[1], sums[2], sums[3]};
}
//= mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
//+ {t0, t1, t2, t3}, {a.0, a.1, a.2, a.3}, {b0, b1}, {c0, c1, c2, c3}, sfa, {0, 0}, sfb, {0, 1}
//= store [to], {t0, t1, t2, t3}
PROBE mma_second_lane_of_b(float4* to, float c0, float c1, float c2, float c3, uint4 a, uint32_t b0, uint32_t b1, uint32_t sfa, uint32_t sfb) {
  float sums[4] = {c0, c1, c2, c3};
  ptx::mma_nvfp4<0, 1>(sums, a, b0, b1, sfa, sfb);
  *to = {sums[0], sums[1], sums[2], sums[3]};
}

// "setmaxnreg": .inc takes registers, .dec gives them back.
//= setmaxnreg.dec.sync.aligned.u32 40
PROBE fewer_registers() { ptx::give_registers_back<40>(); }
//= setmaxnreg.inc.sync.aligned.u32 232
PROBE more_registers() { ptx::take_registers<232>(); }

// "mbarrier" and "cp.async.bulk", as on datacenter Blackwell.
//= mbarrier.init.shared::cta.b64 [&barrier], count
//= fence.mbarrier_init.release.cluster
PROBE barrier_init(ptx::SharedBarrier* barrier, int count) { barrier->init(count); }
//= mbarrier.arrive.shared::cta.b64 _, [&barrier]
PROBE barrier_arrive(ptx::SharedBarrier* barrier) { barrier->arrive(); }
//= mbarrier.arrive.expect_tx.shared::cta.b64 _, [&barrier], bytes
PROBE barrier_expect(ptx::SharedBarrier* barrier, int bytes) { barrier->arrive_and_expect(bytes); }
//= try_again:
//= mbarrier.try_wait.parity.shared::cta.b64 t0, [&barrier], parity
//= @!t0 bra try_again
PROBE barrier_wait(ptx::SharedBarrier* barrier, int parity) { barrier->wait(parity); }
//= cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [&to], [from], bytes, [&arrived]
PROBE bulk_copy(void* to, const void* from, int bytes, ptx::SharedBarrier* arrived) {
  ptx::copy_bulk(to, from, bytes, *arrived);
}

// "cvt", as on datacenter Blackwell.
//= cvt.rn.satfinite.e2m1x2.f32 t0, b, a
//= cvt.rn.satfinite.e2m1x2.f32 t1, d, c
//= cvt.rn.satfinite.e2m1x2.f32 t2, f, e
//= cvt.rn.satfinite.e2m1x2.f32 t3, h, g
//= store [to], {t0, t1, t2, t3}
PROBE codes(uint32_t* to, float a, float b, float c, float d, float e, float f, float g, float h) {
  const float values[8] = {a, b, c, d, e, f, g, h};
  *to = ptx::e2m1_codes(values);
}

// clang-format on
