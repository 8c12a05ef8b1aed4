// A driver of virtual memory without a GPU: memory is the host's, every call is written down and checked, any can fail.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace {
constexpr size_t kGranule = 64 << 10;
std::string calls;                             // what was asked for, in order
std::map<std::string, int> fail_at;            // the n-th call from now fails
std::map<uint64_t, size_t> reserved;           // address -> bytes
std::map<uint64_t, bool> handles;              // -> mapped
std::map<uint64_t, uint64_t> mapped;           // address -> handle
uint64_t next_handle = 1;
bool misused = false;

int call(const std::string& name, const std::string& detail = "") {
  calls += name + detail + "\n";
  auto wanted = fail_at.find(name);
  if (wanted != fail_at.end() && --wanted->second == 0) {
    fail_at.erase(wanted);
    return 2;
  }
  return 0;
}

int check(bool right) {
  misused |= !right;
  return right ? 0 : 1;
}

std::string at(uint64_t address) {
  auto range = reserved.upper_bound(address);
  if (range == reserved.begin()) return " nowhere";
  --range;
  return " " + std::to_string((address - range->first) / kGranule);
}

bool inside(uint64_t address, size_t size) {
  auto range = reserved.upper_bound(address);
  if (range == reserved.begin()) return false;
  --range;
  return address % kGranule == 0 && size == kGranule && address + size <= range->first + range->second;
}
}  // namespace

extern "C" {
const char* fake_calls() { return calls.c_str(); }
void fake_fail(const char* name, int n) { fail_at[name] = n; }
int fake_misused() { return misused; }
size_t fake_left() { return reserved.size() + handles.size() + mapped.size(); }
void fake_forget() { calls.clear(); }

#define DRIVER(prefix)                                                                                             \
  int prefix##Init(unsigned) { return call("init"); }                                                              \
  int prefix##MemGetAllocationGranularity(size_t* size, const int* properties, int) {                              \
    check(properties[0] == 1 && properties[2] == 1);                                                               \
    *size = kGranule;                                                                                              \
    return call("granularity", " of device " + std::to_string(properties[3]));                                     \
  }                                                                                                                \
  int prefix##MemAddressReserve(uint64_t* address, size_t size, size_t, uint64_t, unsigned long long) {            \
    if (int status = call("reserve", " " + std::to_string(size / kGranule))) return status;                        \
    check(size % kGranule == 0);                                                                                   \
    char* where = static_cast<char*>(mmap(nullptr, size + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)); \
    *address = (reinterpret_cast<uint64_t>(where) + kGranule - 1) / kGranule * kGranule;                           \
    reserved[*address] = size;                                                                                     \
    return 0;                                                                                                      \
  }                                                                                                                \
  int prefix##MemAddressFree(uint64_t address, size_t size) {                                                      \
    check(reserved.count(address) && reserved[address] == size && mapped.empty());                                 \
    reserved.erase(address);                                                                                       \
    return call("free");                                                                                           \
  }                                                                                                                \
  int prefix##MemCreate(uint64_t* handle, size_t size, const int*, unsigned long long) {                           \
    if (int status = call("create")) return status;                                                                \
    check(size == kGranule);                                                                                       \
    handles[*handle = next_handle++] = false;                                                                      \
    return 0;                                                                                                      \
  }                                                                                                                \
  int prefix##MemRelease(uint64_t handle) {                                                                        \
    check(handles.count(handle) && !handles[handle]);                                                              \
    handles.erase(handle);                                                                                         \
    return call("release");                                                                                        \
  }                                                                                                                \
  int prefix##MemMap(uint64_t address, size_t size, size_t, uint64_t handle, unsigned long long) {                 \
    if (int status = call("map", at(address))) return status;                                                      \
    check(inside(address, size) && handles.count(handle) && !mapped.count(address));                               \
    handles[mapped[address] = handle] = true;                                                                      \
    return 0;                                                                                                      \
  }                                                                                                                \
  int prefix##MemUnmap(uint64_t address, size_t size) {                                                            \
    check(inside(address, size) && mapped.count(address));                                                         \
    handles[mapped[address]] = false;                                                                              \
    mapped.erase(address);                                                                                         \
    mprotect(reinterpret_cast<void*>(address), size, PROT_NONE);                                                   \
    return call("unmap", at(address));                                                                             \
  }                                                                                                                \
  int prefix##MemSetAccess(uint64_t address, size_t size, const int* access, size_t n) {                           \
    if (int status = call("access", at(address))) return status;                                                   \
    check(mapped.count(address) && access[2] == 3 && n == 1);                                                      \
    return mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);                               \
  }

DRIVER(cu)
DRIVER(hip)

int hipRuntimeGetVersion(int* version) {
  *version = fail_at.count("old") ? 50200000 : 60200000;
  return 0;
}
}
