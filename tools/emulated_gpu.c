/* Lets cuDNN and Transformer Engine answer what they would choose on a GPU that is not here; they compute nothing.
 *
 * Loaded before them (LD_PRELOAD, with an empty libcuda.so.1 in the loader's path). cuDNN can be asked about a device
 * that is described to it (its "device properties", since 9.8) in the place of a handle, which needs a GPU. The caller
 * here, Transformer Engine's library, uses a handle: wherever it gives one to cuDNN, the description is given instead.
 * EMULATED_GPU is that description, JSON as cuDNN itself would write it. The CUDA runtime's questions about the device
 * are answered from EMULATED_CAPABILITY, 90 for compute capability 9.0.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*find_symbol)(void *, const char *);

static find_symbol real_dlsym(void) {
  static find_symbol found;
  if (!found) found = (find_symbol)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (!found) found = (find_symbol)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  return found;
}

static void *of_cudnn(const char *name) {
  void *library = dlopen("libcudnn_graph.so.9", RTLD_NOLOAD | RTLD_LAZY);
  void *function = library ? real_dlsym()(library, name) : NULL;
  if (!function) {
    fprintf(stderr, "emulated_gpu: cuDNN is not loaded, or has no %s\n", name);
    exit(3);
  }
  return function;
}

static const char *setting(const char *name) {
  const char *value = getenv(name);
  if (!value) {
    fprintf(stderr, "emulated_gpu: %s is not set\n", name);
    exit(3);
  }
  return value;
}

static cudnnStatus_t set(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t count, const void *values) {
  static cudnnStatus_t (*real)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t,
                               int64_t, const void *);
  if (!real) real = of_cudnn("cudnnBackendSetAttribute");
  return real(descriptor, name, type, count, values);
}

static cudnnStatus_t set_device(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name) {
  static cudnnBackendDescriptor_t device;
  if (!device) {
    cudnnStatus_t (*create)(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *) =
        of_cudnn("cudnnBackendCreateDescriptor");
    cudnnStatus_t (*finalize)(cudnnBackendDescriptor_t) = of_cudnn("cudnnBackendFinalize");
    const char *json = setting("EMULATED_GPU");
    if (create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &device) ||
        set(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(json), json) ||
        finalize(device)) {
      fprintf(stderr, "emulated_gpu: cuDNN does not take EMULATED_GPU for a device\n");
      exit(3);
    }
  }
  return set(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  static char never_read;
  *handle = (cudnnHandle_t)&never_read;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *values) {
  if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) return CUDNN_STATUS_SUCCESS;
  if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) return set_device(descriptor, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
  cudnnStatus_t status = set(descriptor, name, type, count, values);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  if (name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) return set_device(descriptor, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
  if (name == CUDNN_ATTR_ENGINE_OPERATION_GRAPH) return set_device(descriptor, CUDNN_ATTR_ENGINE_DEVICEPROP);
  return status;
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  (void)device;
  memset(properties, 0, sizeof *properties);
  properties->major = atoi(setting("EMULATED_CAPABILITY")) / 10;
  properties->minor = atoi(setting("EMULATED_CAPABILITY")) % 10;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? properties.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? properties.minor
                                                            : 0;
  return cudaSuccess;
}

/* Every function of the driver: asked for when libraries are loaded, and for the current context. */
static int succeed(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  (void)symbol, (void)version, (void)flags;
  *function = (void *)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* cuDNN's parts find each other, and Transformer Engine finds cuDNN, by name. */
void *dlsym(void *handle, const char *name) {
  static const struct {
    const char *name;
    void *function;
  } ours[] = {
      {"cudnnBackendSetAttribute", (void *)cudnnBackendSetAttribute},
      {"cudnnCreate", (void *)cudnnCreate},
      {"cudaGetDevice", (void *)cudaGetDevice},
      {"cudaGetDeviceCount", (void *)cudaGetDeviceCount},
      {"cudaGetDeviceProperties", (void *)cudaGetDeviceProperties},
      {"cudaDeviceGetAttribute", (void *)cudaDeviceGetAttribute},
  };
  for (size_t index = 0; index < sizeof ours / sizeof *ours; index++)
    if (!strcmp(name, ours[index].name)) return ours[index].function;
  void *found = real_dlsym()(handle, name);
  if (!found && !strncmp(name, "cu", 2) && isupper((unsigned char)name[2])) return (void *)succeed;
  return found;
}
