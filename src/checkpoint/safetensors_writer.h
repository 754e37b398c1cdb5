// SPDX-License-Identifier: Apache-2.0
#pragma once
// Writes safetensors files that appear whole or not at all (temporary file, fsync, rename).
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/atomic_file.h"
#include "tensor/tensor_view.h"

namespace tessera::checkpoint {

struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};

// Writes one file: give all tensors up front, then their bytes, in the order of order() with write() or in any order
// with write_part(), then finish().
class SafetensorsWriter {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;

  // Writes the header. Throws kInvalidArgument for a name used twice, a size that ends inside a byte, or a path that
  // can't be written.
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors, const Metadata& metadata = {});

  // The file's order: falling alignment of the dtype, then name.
  const std::vector<TensorSpec>& order() const { return tensors_; }
  // The next bytes of the data; may be called any number of times per tensor.
  void write(const void* data, size_t bytes);
  // Bytes [begin, begin + bytes) of a tensor's data. Every byte must be given once; a file takes either this or
  // write(). Throws kInternal for a name that is not in the file, or bytes behind the tensor's end.
  void write_part(std::string_view tensor, uint64_t begin, const void* data, size_t bytes);
  // Throws kInternal where fewer or more bytes came than the header says; else flushes and renames.
  void finish();

 private:
  struct Place {
    uint64_t file_offset = 0, num_bytes = 0;
  };
  std::vector<TensorSpec> tensors_;
  std::map<std::string, Place, std::less<>> places_;
  uint64_t expected_bytes_ = 0, written_bytes_ = 0;
  AtomicFile file_;
};

// The simple form: every tensor at hand.
void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, TensorView>>& tensors,
                       const SafetensorsWriter::Metadata& metadata = {});

}  // namespace tessera::checkpoint
