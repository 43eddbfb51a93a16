// What a CUDA build of torch offers to a library of kernels -> the same without CUDA; and what was launched.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" {

long emulated_launches = 0;
long emulated_failure = 0;  // the error of the next launch
thread_local long emulated_guards = 0;  // how many are alive

static char stream;

int emulated_launch(size_t bytes, unsigned int blocks, unsigned int threads, void* on) {
  if (emulated_failure != 0) {
    const int error = static_cast<int>(emulated_failure);
    emulated_failure = 0;
    return error;
  }
  ++emulated_launches;
  const bool configured = bytes <= 4096 && blocks > 0 && blocks < 0x7fffffff && threads > 0 && threads <= 1024;
  return configured && on == &stream && emulated_guards == 1 ? 0 : 9;
}

int32_t emulated_get_device_index(void*, int32_t* index) {
  *index = 0;
  return 0;
}

int32_t emulated_create_device_guard(int32_t, void** guard) {
  ++emulated_guards;
  *guard = &emulated_guards;
  return 0;
}

int32_t emulated_delete_device_guard(void*) {
  --emulated_guards;
  return 0;
}

int32_t aoti_torch_get_current_cuda_stream(int32_t, void** current) {
  *current = &stream;
  return 0;
}

int32_t torch_c10_cuda_check_msg(int32_t error, const char*, const char*, uint32_t, bool, char** message) {
  *message = nullptr;
  if (error != 0) {
    *message = static_cast<char*>(malloc(64));
    snprintf(*message, 64, "CUDA error: %d", error);
  }
  return 0;
}

void torch_c10_cuda_free_error_msg(char* message) { free(message); }

}  // extern "C"
