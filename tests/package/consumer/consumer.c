// A program of somebody else's: casts four values with only the installed library.
#include <stdio.h>

#include <fp8core/fp8core.h>

int main(void) {
  float values[4] = {1.0f, 1.0625f, -448.0f, 1000.0f};
  unsigned char codes[4];
  fp8core_context *context;
  if (fp8core_context_create(&context, NULL) != FP8CORE_OK) {
    fprintf(stderr, "%s\n", fp8core_last_error());
    return 1;
  }
  const int64_t shape[1] = {4};
  const fp8core_tensor source = fp8core_tensor_create(values, FP8CORE_FP32, 1, shape);
  const fp8core_tensor destination = fp8core_tensor_create(codes, FP8CORE_E4M3, 1, shape);
  const fp8core_status status = fp8core_cast(context, NULL, &source, &destination);
  fp8core_context_destroy(&context);
  printf("libfp8core %s: %02x %02x %02x %02x\n", fp8core_version(), codes[0], codes[1], codes[2], codes[3]);
  return !(status == FP8CORE_OK && codes[0] == 0x38 && codes[1] == 0x38 && codes[2] == 0xfe && codes[3] == 0x7e);
}
