// The packed image of a model on disk: header, directory, then the blobs.
//
// It is read into huge pages, not mapped: a file mapping has 4 KiB pages, which cost more in every later step than
// one copy out of the page cache costs at the start.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "model.h"

namespace octavo {

constexpr char kMagic[] = "OCTIMG01";  // raise the number when pack.h changes

struct ImageHeader {
  char magic[8];
  char key[184];  // who this image belongs to; NUL padded
  int64_t entries, data_at, data_bytes;
};
struct ImageEntry {
  char name[96];
  int32_t form, type;
  int64_t rows, cols, bytes, at;  // at: offset in the data, a multiple of 64
};

inline int save_image(const Model& m, const char* path, const char* key) {
  ImageHeader header = {};
  memcpy(header.magic, kMagic, 8);
  if (strlen(key) >= sizeof header.key) return fail("the image key has more than %zu bytes", sizeof header.key - 1);
  strcpy(header.key, key);
  std::vector<ImageEntry> entries;
  int64_t at = 0;
  for (auto& item : m.blobs) {
    ImageEntry e = {};
    if (item.first.size() >= sizeof e.name) return fail("the weight name %s is too long", item.first.c_str());
    strcpy(e.name, item.first.c_str());
    const Blob& b = item.second;
    e.form = b.form, e.type = b.type, e.rows = b.rows, e.cols = b.cols, e.bytes = b.bytes, e.at = at;
    entries.push_back(e);
    at += round_up(b.bytes, 64);
  }
  header.entries = (int64_t)entries.size();
  header.data_at = round_up(sizeof header + entries.size() * sizeof(ImageEntry), 4096);
  header.data_bytes = at;
  // Written beside it and renamed, so that a reader never sees half an image.
  std::string part = std::string(path) + "." + std::to_string(getpid()) + ".part";
  FILE* f = fopen(part.c_str(), "wb");
  if (!f) return fail("can't write %s: %s", part.c_str(), strerror(errno));
  bool ok = fwrite(&header, sizeof header, 1, f) == 1 &&
            fwrite(entries.data(), sizeof(ImageEntry), entries.size(), f) == entries.size();
  size_t i = 0;
  for (auto& item : m.blobs) {
    ok = ok && fseek(f, header.data_at + entries[i++].at, SEEK_SET) == 0 &&
         fwrite(item.second.data, 1, item.second.bytes, f) == (size_t)item.second.bytes;
  }
  ok = ok && fflush(f) == 0 && ftruncate(fileno(f), header.data_at + at) == 0;
  ok = fclose(f) == 0 && ok;
  if (ok && rename(part.c_str(), path) == 0) return 0;
  int error = errno;
  unlink(part.c_str());
  return fail("can't write %s: %s", path, strerror(error));
}

inline bool read_fully(int fd, void* to, int64_t bytes, int64_t at) {
  while (bytes > 0) {
    ssize_t got = pread(fd, to, bytes, at);
    if (got <= 0) return false;
    to = (char*)to + got, bytes -= got, at += got;
  }
  return true;
}

inline int read_image(Model& m, int fd, const char* path, const char* key) {
  ImageHeader header;
  if (!read_fully(fd, &header, sizeof header, 0) || memcmp(header.magic, kMagic, 8))
    return fail("%s is not a packed image of this version", path);
  header.key[sizeof header.key - 1] = 0;
  if (strcmp(header.key, key)) return fail("%s was packed for '%s', not for '%s'", path, header.key, key);
  int64_t size = lseek(fd, 0, SEEK_END);
  if (header.entries < 0 || header.entries > 1 << 20 || header.data_bytes < 0 ||
      header.data_at + header.data_bytes != size)
    return fail("%s is cut short", path);
  std::vector<ImageEntry> entries(header.entries);
  if (!read_fully(fd, entries.data(), header.entries * sizeof(ImageEntry), sizeof header))
    return fail("%s is cut short", path);
  uint8_t* data = m.allocate(header.data_bytes);
  if (!data) return -1;
  if (!read_fully(fd, data, header.data_bytes, header.data_at)) return fail("%s can't be read", path);
  for (ImageEntry& e : entries) {
    e.name[sizeof e.name - 1] = 0;
    if (e.at < 0 || e.bytes < 0 || e.at + e.bytes > header.data_bytes) return fail("%s is damaged", path);
    m.blobs[e.name] = {e.form, e.type, e.rows, e.cols, e.bytes, data + e.at};
  }
  return 0;
}

inline int load_image(Model& m, const char* path, const char* key) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail("can't open %s: %s", path, strerror(errno));
  int status = read_image(m, fd, path, key);
  close(fd);
  if (status < 0) m.blobs.clear();
  return status;
}

}  // namespace octavo
