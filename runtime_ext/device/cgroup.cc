// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cgroup.cc
 * \brief Limits of memory, of version 1 and version 2.
 */
#include "device/cgroup.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

namespace pagedkv {

namespace {

namespace fs = std::filesystem;

/*! \brief The number in a file; nothing for "max", and where there is no such file. */
std::optional<double> ReadLimit(const fs::path& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc()) return std::nullopt;
  return static_cast<double>(value);
}

bool Contains(const std::string& list, const std::string& name) {
  return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

}  // namespace

std::optional<double> CgroupMemoryLimit(const std::string& root, const std::string& membership) {
  std::optional<double> minimum;
  // A container may see the name of a group that is not mounted there, and its own one as the root.
  auto take = [&](const fs::path& mount, const std::string& group, const char* file) {
    for (fs::path path = fs::path(group).relative_path();; path = path.parent_path()) {
      const std::optional<double> limit = ReadLimit(mount / path / file);
      if (limit) minimum = std::min(minimum.value_or(*limit), *limit);
      if (path.empty()) break;
    }
  };
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // "4:memory:/group", "0::/group"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      take(root, group, "memory.max");
      take(fs::path(root) / "unified", group, "memory.max");
    } else if (Contains(controllers, "memory")) {
      take(fs::path(root) / "memory", group, "memory.limit_in_bytes");
    }
  }
  return minimum;
}

}  // namespace pagedkv
