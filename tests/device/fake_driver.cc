// SPDX-License-Identifier: Apache-2.0
// A made-up libcuda and libnvidia-ml in one library, whose answers come from environment variables that the test sets.
#include <cstdlib>
#include <cstring>

namespace {

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

// nvmlGpuFabricInfo_t as the manual states it.
struct FabricInfo {
  unsigned char cluster_uuid[16];
  int status;
  unsigned clique_id;
  unsigned char state;
};

}  // namespace

extern "C" {

int cuInit(unsigned) {
  return number("FAKE_CUDA_INIT", 0);
}
int cuDriverGetVersion(int* version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = number("FAKE_GPUS", 2);
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = 10 + index;
  return 0;
}
int cuDeviceGetName(char* name, int length, int device) {
  std::strncpy(name, device == 10 ? "Made GPU A" : "Made GPU B", static_cast<size_t>(length));
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = static_cast<size_t>(device) << 30;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 1 : -1;
  return 0;
}
// Device 10 reaches 11, and not the other way round.
int cuDeviceCanAccessPeer(int* can_access, int device, int) {
  *can_access = device == 10;
  return 0;
}

int nvmlInit_v2() {
  return number("FAKE_NVML_INIT", 0);
}
int nvmlShutdown() {
  return 0;
}
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::strncpy(version, "580.95.05", length);
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(number("FAKE_GPUS", 2));
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  static int devices[8];
  *device = &devices[index];
  return 0;
}
int nvmlDeviceGetGpuFabricInfo(void*, FabricInfo* info) {
  info->state = static_cast<unsigned char>(number("FAKE_FABRIC", 3));
  return 0;
}

}  // extern "C"
