// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ops between the large products, for the kernels of an instruction set: threads, scalars, and what a kernel needs
// beforehand.
#include <string>

#include "backends/cpu_common/row_kernels.h"
#include "ops/backend.h"

namespace tessera::backends::cpu_common {

void embedding_run(const ops::Embedding::Desc& desc, const ops::Embedding::Args& args, device::Queue& queue);
void top_k_run(const ops::TopK::Desc& desc, const ops::TopK::Args& args, device::Queue& queue);
void rms_norm_run(const RowKernels& kernels, const ops::RmsNorm::Desc& desc, const ops::RmsNorm::Args& args,
                  device::Queue& queue);
void rope_run(const RowKernels& kernels, const ops::Rope::Desc& desc, const ops::Rope::Args& args,
              device::Queue& queue);
void mhc_pre_run(const RowKernels& kernels, const ops::MhcDesc& desc, const ops::MhcPre::Args& args,
                 device::Queue& queue);
void mhc_post_run(const RowKernels& kernels, const ops::MhcDesc& desc, const ops::MhcPost::Args& args,
                  device::Queue& queue);
void mhc_head_run(const RowKernels& kernels, const ops::MhcDesc& desc, const ops::MhcHead::Args& args,
                  device::Queue& queue);
void swiglu_run(const RowKernels& kernels, const ops::SwiGlu::Desc& desc, const ops::SwiGlu::Args& args,
                device::Queue& queue);
void moe_combine_run(const RowKernels& kernels, const ops::MoeCombine::Desc& desc, const ops::MoeCombine::Args& args,
                     device::Queue& queue);
void stream_add_run(const RowKernels& kernels, const ops::StreamAdd::Desc& desc, const ops::StreamAdd::Args& args,
                    device::Queue& queue);
void hadamard_run(const RowKernels& kernels, const ops::Hadamard::Desc& desc, const ops::Hadamard::Args& args,
                  device::Queue& queue);
void cache_write_run(const RowKernels& kernels, const ops::CacheWrite::Desc& desc, const ops::CacheWrite::Args& args,
                     device::Queue& queue);
void compressor_pool_run(const RowKernels& kernels, const ops::CompressorPool::Desc& desc,
                         const ops::CompressorPool::Args& args, device::Queue& queue);
void router_run(const RowKernels& kernels, const ops::Router::Desc& desc, const ops::Router::Args& args,
                device::Queue& queue);
void sample_run(const RowKernels& kernels, const ops::Sample::Desc& desc, const ops::Sample::Args& args,
                device::Queue& queue);
int64_t sample_workspace(const ops::Sample::Desc& desc, int64_t max_tokens);

bool embedding_supports(const ops::Embedding::Desc& desc, std::string& why_not);
bool rms_norm_supports(const ops::RmsNorm::Desc& desc, std::string& why_not);
bool rope_supports(const ops::Rope::Desc& desc, std::string& why_not);
bool mhc_supports(const ops::MhcDesc& desc, std::string& why_not);
bool swiglu_supports(const ops::SwiGlu::Desc& desc, std::string& why_not);
bool moe_combine_supports(const ops::MoeCombine::Desc& desc, std::string& why_not);
bool stream_add_supports(const ops::StreamAdd::Desc& desc, std::string& why_not);
bool hadamard_supports(const ops::Hadamard::Desc& desc, std::string& why_not);
bool cache_write_supports(const ops::CacheWrite::Desc& desc, std::string& why_not);
bool compressor_pool_supports(const ops::CompressorPool::Desc& desc, std::string& why_not);
bool router_supports(const ops::Router::Desc& desc, std::string& why_not);
bool sample_supports(const ops::Sample::Desc& desc, std::string& why_not);

}  // namespace tessera::backends::cpu_common
