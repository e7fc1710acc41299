// A CUDA driver that is played, as far as cuDNN wants one to make plans for a GPU that is not there: it takes the
// kernels that cuDNN compiles, and runs none. Its soname is libcuda.so.1, so that who loads that afterwards gets this
// one.
#include <string.h>

#pragma GCC visibility push(default)

#define DONE(name)                                                                                                     \
  int name(void);                                                                                                      \
  int name(void) { return 0; }

DONE(cuCtxGetCurrent)
DONE(cuCtxGetLimit)
DONE(cuCtxPopCurrent)
DONE(cuCtxPushCurrent)
DONE(cuDeviceGet)
DONE(cuDeviceGetCount)
DONE(cuFuncSetAttribute)
DONE(cuKernelGetAttribute)
DONE(cuKernelSetAttribute)
DONE(cuLibraryLoadFromFile)
DONE(cuLibraryUnload)
DONE(cuLinkAddData)
DONE(cuLinkComplete)
DONE(cuLinkCreate)
DONE(cuLinkDestroy)
DONE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DONE(cuOccupancyMaxPotentialClusterSize)
DONE(cuStreamGetCtx)

// What would compute says that it can't: CUDA_ERROR_NOT_SUPPORTED.
#define REFUSED(name)                                                                                                  \
  int name(void);                                                                                                      \
  int name(void) { return 801; }

REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLaunchKernelEx)

// What libraries and kernels are known by.
static int library_place;
static int kernel_place;

// Kernels taken so far, and the last one's name.
int fake_driver_kernels;
char fake_driver_kernel[256];

int cuDriverGetVersion(int *version);
int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

int cuLibraryLoadData(void **library, const void *code);
int cuLibraryLoadData(void **library, const void *code) {
  // CUDA_ERROR_INVALID_IMAGE for what is no ELF file.
  if (!code || memcmp(code, "\177ELF", 4) != 0) return 200;
  *library = &library_place;
  return 0;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name);
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  if (library != &library_place) return 1;
  *kernel = &kernel_place;
  fake_driver_kernels++;
  (void)strncpy(fake_driver_kernel, name, sizeof(fake_driver_kernel) - 1);
  return 0;
}

int cuKernelGetFunction(void **function, void *kernel);
int cuKernelGetFunction(void **function, void *kernel) {
  *function = kernel;
  return 0;
}

int cuGetErrorName(int error, const char **text);
int cuGetErrorName(int error, const char **text) {
  *text = error == 0 ? "CUDA_SUCCESS" : "CUDA_ERROR";
  return 0;
}

int cuGetErrorString(int error, const char **text);
int cuGetErrorString(int error, const char **text) {
  *text = error == 0 ? "no error" : "an error of the played driver";
  return 0;
}
