// Virtual memory of a GPU: reserve a range of addresses, put memory behind parts of it, take it away again.
//
// The driver (CUDA's libcuda, or HIP's runtime from version 6 on) is loaded by name when a range is reserved, so nothing
// of it is needed to build this. Both have the same functions under two prefixes, with the same layout of arguments; where
// their headers are found, the layouts are compared at compile time (-DOCT_CHECK_CUDA, -DOCT_CHECK_HIP).
//
// Memory comes in granules (2 MiB, usually), which are larger than a page of KV. A granule is mapped as long as any
// committed part lies in it: each has a count. Nothing stays behind a call that failed.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#ifdef OCT_CHECK_CUDA
#include <cuda.h>
#endif
#ifdef OCT_CHECK_HIP
#include <hip/hip_runtime_api.h>
#endif

namespace {

struct Location {
  int type;  // 1 = a device
  int id;
};

struct Properties {  // CUmemAllocationProp, hipMemAllocationProp
  int type;          // 1 = pinned: the only type
  int shared_handles;
  Location location;
  void* windows;
  unsigned char flags[8];
};

struct Access {  // CUmemAccessDesc, hipMemAccessDesc
  Location location;
  int flags;  // 3 = read and write
};

constexpr int kOldestHip = 60000000;  // before that, hipMemAllocationProp was laid out otherwise
constexpr int kPinned = 1, kDevice = 1, kReadWrite = 3, kMinimumGranularity = 0;

#ifdef OCT_CHECK_CUDA
static_assert(sizeof(Properties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(Properties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(Properties, windows) == offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(Properties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(Access) == sizeof(CUmemAccessDesc));
static_assert(offsetof(Access, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(kPinned == CU_MEM_ALLOCATION_TYPE_PINNED && kDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kMinimumGranularity == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(sizeof(CUdeviceptr) == 8 && sizeof(CUmemGenericAllocationHandle) == 8);
#endif
#ifdef OCT_CHECK_HIP
static_assert(sizeof(Properties) == sizeof(hipMemAllocationProp));
static_assert(offsetof(Properties, location) == offsetof(hipMemAllocationProp, location));
static_assert(offsetof(Properties, windows) == offsetof(hipMemAllocationProp, win32HandleMetaData));
static_assert(offsetof(Properties, flags) == offsetof(hipMemAllocationProp, allocFlags));
static_assert(sizeof(Access) == sizeof(hipMemAccessDesc));
static_assert(offsetof(Access, flags) == offsetof(hipMemAccessDesc, flags));
static_assert(kPinned == hipMemAllocationTypePinned && kDevice == hipMemLocationTypeDevice);
static_assert(kReadWrite == hipMemAccessFlagsProtReadWrite);
static_assert(kMinimumGranularity == hipMemAllocationGranularityMinimum);
static_assert(sizeof(hipMemGenericAllocationHandle_t) == 8);
#endif

// Status 0 is success everywhere.
struct Driver {
  int (*init)(unsigned);
  int (*granularity)(size_t*, const Properties*, int);
  int (*reserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long);
  int (*free_address)(uint64_t, size_t);
  int (*create)(uint64_t*, size_t, const Properties*, unsigned long long);
  int (*release)(uint64_t);
  int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  int (*unmap)(uint64_t, size_t);
  int (*set_access)(uint64_t, size_t, const Access*, size_t);
};

struct Granule {
  uint64_t handle = 0;
  uint32_t parts = 0;  // committed parts that lie in it; 0 = no memory behind it
};

// The first failure, for the caller to read.
struct Error {
  char* text;
  int size;

  int operator()(const char* call, int status) const {
    std::snprintf(text, size, "%s failed with status %d", call, status);
    return status ? status : -1;
  }
};

}  // namespace

struct OctVmm {
  void* library = nullptr;
  Driver driver{};
  Properties properties{};
  uint64_t address = 0;
  size_t bytes = 0, granule = 0, committed = 0;
  std::vector<Granule> granules;

  ~OctVmm() {
    for (size_t i = 0; i < granules.size(); ++i)
      if (granules[i].parts) take(i);
    if (address) driver.free_address(address, bytes);
    if (library) dlclose(library);
  }

  bool load(const char* name, const char* prefix) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) return false;
    bool all = true;
    auto find = [&](auto& function, const char* rest) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, (std::string(prefix) + rest).c_str()));
      all = all && function;
    };
    find(driver.init, "Init");
    find(driver.granularity, "MemGetAllocationGranularity");
    find(driver.reserve, "MemAddressReserve");
    find(driver.free_address, "MemAddressFree");
    find(driver.create, "MemCreate");
    find(driver.release, "MemRelease");
    find(driver.map, "MemMap");
    find(driver.unmap, "MemUnmap");
    find(driver.set_access, "MemSetAccess");
    if (std::string(prefix) != "hip") return all;
    int (*version)(int*) = nullptr;
    find(version, "RuntimeGetVersion");
    int is = 0;
    return all && version(&is) == 0 && is >= kOldestHip;
  }

  int give(size_t i, const Error& error) {
    const uint64_t at = address + i * granule;
    uint64_t handle = 0;
    if (int status = driver.create(&handle, granule, &properties, 0)) return error("MemCreate", status);
    if (int status = driver.map(at, granule, 0, handle, 0)) {
      driver.release(handle);
      return error("MemMap", status);
    }
    const Access access{properties.location, kReadWrite};
    if (int status = driver.set_access(at, granule, &access, 1)) {
      driver.unmap(at, granule);
      driver.release(handle);
      return error("MemSetAccess", status);
    }
    granules[i].handle = handle;
    committed += granule;
    return 0;
  }

  void take(size_t i) {
    driver.unmap(address + i * granule, granule);
    driver.release(granules[i].handle);
    granules[i] = {};
    committed -= granule;
  }

  bool holds(size_t offset, size_t size) const { return size && offset < bytes && size <= bytes - offset; }
};

extern "C" {

// Reserve at least `bytes` addresses on a device; null, and `error` says why, when that fails. `library` is the
// driver's file, `prefix` of its functions: "cu" or "hip".
OctVmm* oct_vmm_reserve(const char* library, const char* prefix, int device, size_t bytes, char* text, int size) {
  const Error error{text, size};
  auto* range = new OctVmm;
  auto fail = [&](const char* call, int status) {
    error(call, status);
    delete range;
    return nullptr;
  };
  if (!range->load(library, prefix)) return fail("loading the driver", -1);
  range->properties.type = kPinned;
  range->properties.location = {kDevice, device};
  const Driver& driver = range->driver;
  if (int status = driver.init(0)) return fail("Init", status);
  if (int status = driver.granularity(&range->granule, &range->properties, kMinimumGranularity))
    return fail("MemGetAllocationGranularity", status);
  if (!range->granule) return fail("MemGetAllocationGranularity", -1);
  const size_t count = (bytes + range->granule - 1) / range->granule;
  range->bytes = count * range->granule;
  if (int status = driver.reserve(&range->address, range->bytes, 0, 0, 0)) {
    range->address = 0;
    return fail("MemAddressReserve", status);
  }
  range->granules.resize(count);
  return range;
}

uint64_t oct_vmm_address(const OctVmm* range) { return range->address; }
size_t oct_vmm_bytes(const OctVmm* range) { return range->bytes; }
size_t oct_vmm_granule(const OctVmm* range) { return range->granule; }
size_t oct_vmm_committed(const OctVmm* range) { return range->committed; }

// Put memory behind [offset, offset + size). Each part is committed once until it is released.
int oct_vmm_commit(OctVmm* range, size_t offset, size_t size, char* text, int text_size) {
  const Error error{text, text_size};
  if (!range->holds(offset, size)) return error("commit outside of the range", -1);
  const size_t first = offset / range->granule, last = (offset + size - 1) / range->granule;
  for (size_t i = first; i <= last; ++i) {
    if (range->granules[i].parts == 0) {
      if (int status = range->give(i, error)) {
        while (i-- > first)
          if (--range->granules[i].parts == 0) range->take(i);
        return status;
      }
    }
    ++range->granules[i].parts;
  }
  return 0;
}

// The reverse; refused for a part that isn't committed. The device must be done with it.
int oct_vmm_release(OctVmm* range, size_t offset, size_t size, char* text, int text_size) {
  const Error error{text, text_size};
  if (!range->holds(offset, size)) return error("release outside of the range", -1);
  const size_t first = offset / range->granule, last = (offset + size - 1) / range->granule;
  for (size_t i = first; i <= last; ++i)
    if (range->granules[i].parts == 0) return error("release of what isn't committed", -1);
  for (size_t i = first; i <= last; ++i)
    if (--range->granules[i].parts == 0) range->take(i);
  return 0;
}

// Everything goes back, committed or not.
void oct_vmm_free(OctVmm* range) { delete range; }

}  // extern "C"
