// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cgroup_test.cc
 * \brief The limit of memory, from folders such as Linux mounts.
 */
#include "device/cgroup.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "check.h"

namespace pagedkv::cgroup_test {

namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("cgroup_test_" + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }

  void Write(const std::string& name, const std::string& text) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text << "\n";
  }
  std::optional<double> Limit() const {
    return CgroupMemoryLimit(path_.string(), (path_ / "self").string());
  }

 private:
  fs::path path_;
};

TEST_CASE("cgroup: version2") {
  Folder folder;
  REQUIRE(!folder.Limit());  // there is nothing
  folder.Write("self", "0::/slice/app");
  REQUIRE(!folder.Limit());
  folder.Write("slice/app/memory.max", "max");
  REQUIRE(!folder.Limit());
  folder.Write("slice/app/memory.max", "3000");
  REQUIRE_EQ(*folder.Limit(), 3000);
  folder.Write("slice/memory.max", "2000");  // a parent's limit holds too
  REQUIRE_EQ(*folder.Limit(), 2000);
  folder.Write("slice/app/memory.max", "1000");
  REQUIRE_EQ(*folder.Limit(), 1000);
  folder.Write("slice/other/memory.max", "1");  // another group's does not
  REQUIRE_EQ(*folder.Limit(), 1000);
  folder.Write("memory.max", "500");
  REQUIRE_EQ(*folder.Limit(), 500);
  folder.Write("self", "0::/not/mounted/here");  // in a container
  REQUIRE_EQ(*folder.Limit(), 500);
  folder.Write("self", "nonsense\n0:\n::");
  folder.Write("memory.max", "words");
  REQUIRE(!folder.Limit());
}

TEST_CASE("cgroup: version1") {
  Folder folder;
  folder.Write("self", "5:cpu,cpuacct:/app\n4:memory:/app\n1:name=systemd:/app\n0::/");
  folder.Write("cpu,cpuacct/app/memory.limit_in_bytes", "1");  // not that of memory
  REQUIRE(!folder.Limit());
  folder.Write("memory/memory.limit_in_bytes", "9223372036854771712");  // none
  REQUIRE_EQ(*folder.Limit(), 9223372036854771712.0);
  folder.Write("memory/app/memory.limit_in_bytes", "4096");
  REQUIRE_EQ(*folder.Limit(), 4096);
  folder.Write("unified/memory.max", "100");  // both mounted
  REQUIRE_EQ(*folder.Limit(), 100);
}

}  // namespace

}  // namespace pagedkv::cgroup_test
