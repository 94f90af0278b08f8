// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle.cc
 * \brief Checks bundles, chooses a target and loads it.
 */
#include "bundle/bundle.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/runtime/base.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/sha256.h"
#include "base/version.h"
#include "bundle/bundle_device.h"
#include "bundle/bundle_library.h"
#include "bundle/bundle_target.h"
#include "device/device_memory.h"

namespace pagedkv {

namespace {

using StringMap = ffi::Map<ffi::String, ffi::Any>;
using Values = ffi::Array<ffi::Any>;

constexpr int kMaxDepth = 32;  // of nested brackets in a manifest
constexpr std::streamsize kChunkBytes = 1 << 20;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kAdvice = "; copy the bundle anew, or write it again";

template <typename T>
T Get(const StringMap& map, const char* name) {
  auto it = map.find(name);
  std::optional<T> value;
  if (it != map.end()) value = (*it).second.template try_cast<T>();
  if (!value) Raise(kValueError, kManifest, " of the bundle lacks '", name, "', or has it wrong");
  return *std::move(value);
}

std::set<std::string> Strings(const StringMap& map, const char* name) {
  std::set<std::string> strings;
  for (const auto& value : Get<ffi::Array<ffi::String>>(map, name)) strings.insert(value);
  return strings;
}

StringMap AsMap(const ffi::Any& value) {
  std::optional<StringMap> map = value.try_cast<StringMap>();
  if (!map) Raise(kValueError, kManifest, " of the bundle has a value where a map should be");
  return *std::move(map);
}

/*! \brief Whether brackets nest too deep: the JSON parser is recursive. */
bool NestsTooDeep(const std::string& text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_string = !in_string;
    if (in_string && c == '\\') ++i;  // an escaped quote does not end the string
    if (in_string) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > kMaxDepth) return true;
  }
  return false;
}

/*! \brief The files of a bundle. Each is compared with the manifest when it is read. */
class Files {
 public:
  explicit Files(const std::string& path) : folder_(path) {
    if (!std::filesystem::is_regular_file(folder_ / kManifest)) {
      Raise(kValueError, path, " is not a bundle: it has no ", kManifest,
            "; `tvm-pagedkv bundle` writes one");
    }
    manifest_ = Read(kManifest);
    const std::string digest = Read("manifest.sha256");
    if (digest.substr(0, digest.find(' ')) != Sha256(manifest_)) {
      Raise(kValueError, (folder_ / kManifest).string(), " is damaged: it is not what ",
            "manifest.sha256 says", kAdvice);
    }
    if (NestsTooDeep(manifest_)) {
      Raise(kValueError, (folder_ / kManifest).string(),
            " is not a manifest: its brackets nest more ", "than ", kMaxDepth, " deep");
    }
    ffi::String error;
    const ffi::Any parsed = ffi::json::Parse(manifest_, &error);
    if (!error.empty()) {
      Raise(kValueError, (folder_ / kManifest).string(), " is not JSON: ", std::string(error));
    }
    content_ = AsMap(parsed);
  }

  const std::string& manifest() const { return manifest_; }
  const StringMap& content() const { return content_; }

  /*! \brief The SHA-256 of a file, as the manifest has it. */
  std::string Digest(const std::string& name) const {
    return Get<ffi::String>(Description(name), "sha256");
  }

  /*! \brief The path of a file, after its size and digest were checked. */
  std::string Checked(const std::string& name) const {
    const std::string path = (folder_ / name).string();
    std::ifstream file = Open(name);
    Sha256Stream digest;
    int64_t size = 0;
    std::string chunk(kChunkBytes, '\0');
    do {
      file.read(chunk.data(), kChunkBytes);
      digest.Add({chunk.data(), static_cast<size_t>(file.gcount())});
      size += file.gcount();
    } while (file);
    const auto num_bytes = Get<int64_t>(Description(name), "bytes");
    if (size != num_bytes) {
      Raise(kValueError, path, " is damaged: it has ", size, " of its ", num_bytes, " bytes",
            kAdvice);
    }
    if (digest.Finish() != Digest(name)) {
      Raise(kValueError, path, " is damaged: its content is not what was written", kAdvice);
    }
    return path;
  }

 private:
  StringMap Description(const std::string& name) const {
    return AsMap(Get<ffi::Any>(Get<StringMap>(content_, "files"), name.c_str()));
  }

  std::ifstream Open(const std::string& name) const {
    RequireInside(name);
    std::ifstream file(folder_ / name, std::ios::binary);
    if (!file) Raise(kValueError, (folder_ / name).string(), " is missing", kAdvice);
    return file;
  }

  std::string Read(const std::string& name) const {
    std::ifstream file = Open(name);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  /*! \brief Refuses files outside the bundle: they would be loaded as its code. */
  void RequireInside(const std::string& name) const {
    const std::filesystem::path relative(name);
    bool is_inside = !name.empty() && relative.is_relative();
    for (const auto& part : relative) is_inside = is_inside && part != "..";
    if (is_inside) {
      std::error_code error;  // the caller reports a missing file
      const auto root = std::filesystem::weakly_canonical(folder_, error);
      const auto path = std::filesystem::weakly_canonical(folder_ / relative, error);
      is_inside =
          !error &&
          std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
    }
    if (!is_inside) {
      Raise(kValueError, kManifest, " of the bundle must name files within ", folder_.string(),
            ", and '", name, "' is elsewhere");
    }
  }

  std::filesystem::path folder_;
  std::string manifest_;
  StringMap content_;
};

void CheckVersions(const StringMap& manifest) {
  const auto versions = Get<StringMap>(manifest, "versions");
  const std::string own = Get<ffi::String>(versions, "tvm-pagedkv");
  const auto format = Get<int64_t>(manifest, "format");
  if (format != kBundleFormat || own != TVM_PAGEDKV_VERSION) {
    Raise(kValueError, "the bundle was written by tvm-pagedkv ", own, " in format ", format,
          ", and this is tvm-pagedkv ", TVM_PAGEDKV_VERSION, ", which reads its own of format ",
          kBundleFormat, ": install tvm-pagedkv ", own, ", or write the bundle again");
  }
  TVMFFIVersion version;
  TVMFFIGetVersion(&version);
  const std::string tvm = Get<ffi::String>(versions, "apache-tvm");
  if (Series(tvm) != Series(TVM_VERSION)) {
    Raise(kValueError, "the bundle was compiled by apache-tvm ", tvm, ", and this library is for ",
          Series(TVM_VERSION), ": install apache-tvm ", Series(tvm),
          " with a tvm-pagedkv for it, or write the bundle again");
  }
  const std::string present = std::to_string(version.major) + "." + std::to_string(version.minor);
  const std::string needed = Get<ffi::String>(versions, "apache-tvm-ffi");
  if (Series(needed) != present) {
    Raise(kValueError, "the bundle needs apache-tvm-ffi ", Series(needed),
          ", and this process has ", present,
          ": use the libraries of the bundle, or write the bundle again");
  }
}

std::vector<BundleTarget> ReadTargets(const Values& targets) {
  std::vector<BundleTarget> read;
  for (const ffi::Any& each : targets) {
    const StringMap map = AsMap(each);
    BundleTarget target{Get<ffi::String>(map, "name"), Get<ffi::String>(map, "device"),
                        Get<ffi::String>(map, "architecture"), Strings(map, "features")};
    if (target.device == "cuda") {
      for (const auto& code : Get<ffi::Array<ffi::String>>(map, "device_code")) {
        ReadDeviceCode(code);
        target.device_code.push_back(code);
      }
      target.driver = Get<int64_t>(map, "driver");
      target.driver_for_ptx = Get<int64_t>(map, "driver_for_ptx");
    }
    read.push_back(std::move(target));
  }
  return read;
}

ffi::Tensor Floats(const Values& values) {
  ffi::Tensor tensor = AllocateTensor({static_cast<int64_t>(values.size())}, kFloat32,
                                      DLDevice{kDLCPU, 0}, UncountedBytes());
  auto* out = static_cast<float*>(tensor.data_ptr());
  for (const ffi::Any& value : values) *out++ = static_cast<float>(value.cast<double>());
  return tensor;
}

/*! \brief Scales of K and of V, a list each, as [2, heads]; any other number of lists as well. */
ffi::Tensor ScaleRows(const Values& rows) {
  Values flat;
  bool are_alike = !rows.empty();
  for (const ffi::Any& row : rows) {
    const auto scales = row.cast<Values>();
    are_alike = are_alike && scales.size() == rows[0].cast<Values>().size();
    for (const ffi::Any& scale : scales) flat.push_back(scale);
  }
  const auto num_rows = static_cast<int64_t>(rows.size());
  const auto num_scales = static_cast<int64_t>(flat.size());
  if (!are_alike) {
    Raise(kValueError, "kv_scales of a layer must be two lists, a scale for each head", kAdvice);
  }
  const std::array<int64_t, 2> shape{num_rows, num_scales / num_rows}, strides{shape[1], 1};
  return Floats(flat).as_strided(ffi::ShapeView(shape.data(), 2),
                                 ffi::ShapeView(strides.data(), 2));
}

ffi::Tensor CopyTo(const ffi::Tensor& tensor, DLDevice device) {
  if (device.device_type == kDLCPU) return tensor;
  ffi::Tensor copy = AllocateTensor(tensor.shape(), tensor.dtype(), device, UncountedBytes());
  CopyBytes(tensor, 0, copy, 0, static_cast<int64_t>(ffi::GetDataSize(tensor)), nullptr);
  Synchronize(device, nullptr);
  return copy;
}

/*! \brief The configuration for pagedkv.create: with shapes and tensors, which JSON lacks. */
StringMap CacheMap(StringMap map, DLDevice device) {
  if (map.count("layer_indptr")) {
    const auto bounds = Get<ffi::Array<int64_t>>(map, "layer_indptr");
    map.Set("layer_indptr", ffi::Shape(std::vector<int64_t>(bounds.begin(), bounds.end())));
  }
  if (map.count("rope_ext_factors")) {
    map.Set("rope_ext_factors", CopyTo(Floats(Get<Values>(map, "rope_ext_factors")), device));
  }
  Values layers;
  for (const ffi::Any& each : Get<Values>(map, "layers")) {
    StringMap layer = AsMap(each);
    if (layer.count("kv_scales")) {
      layer.Set("kv_scales", CopyTo(ScaleRows(Get<Values>(layer, "kv_scales")), device));
    }
    layers.push_back(layer);
  }
  map.Set("layers", layers);
  return map;
}

StringMap LoadKernels(const StringMap& set, const Files& files) {
  const std::string file = Get<ffi::String>(set, "library");
  const std::string path = files.Checked(file);
  const ffi::Module library = LoadBundleLibrary(path, files.Digest(file));
  StringMap kernels;
  for (const auto& [name, symbol] : Get<StringMap>(set, "kernels")) {
    auto function = library->GetFunction(symbol.cast<ffi::String>());
    if (!function) Raise(kValueError, path, " lacks the kernel '", std::string(name), "'", kAdvice);
    kernels.Set(name, *function);
  }
  return kernels;
}

/*! \brief The first device of the target's kind. */
DLDevice DeviceFor(const std::vector<BundleTarget>& targets, const std::string& name) {
  bool is_for_gpu = !targets.empty();
  for (const BundleTarget& target : targets) {
    if (!name.empty() && target.name == name)
      return {target.device == "cuda" ? kDLCUDA : kDLCPU, 0};
    is_for_gpu = is_for_gpu && target.device == "cuda";
  }
  return {is_for_gpu ? kDLCUDA : kDLCPU, 0};
}

/*! \brief The checked paths of the libraries that run the kernels, for an architecture. */
std::vector<std::string> Libraries(const StringMap& manifest, const std::string& architecture,
                                   const Files& files) {
  std::vector<std::string> paths;
  const auto libraries = Get<StringMap>(manifest, "libraries");
  if (libraries.count(architecture) == 0) return paths;  // the process has its own libraries
  for (const auto& name : Get<ffi::Array<ffi::String>>(libraries, architecture.c_str())) {
    paths.push_back(files.Checked(name));
  }
  return paths;
}

}  // namespace

int64_t ChooseBundleTarget(const Values& targets, const ffi::Optional<StringMap>& machine,
                           const ffi::Optional<ffi::String>& name) {
  Machine chosen = ThisCPU();
  if (machine.has_value()) {
    const StringMap& map = machine.value();
    chosen = {Get<ffi::String>(map, "device"), Get<ffi::String>(map, "architecture"),
              Strings(map, "features")};
    if (chosen.device == "cuda") {
      chosen.compute_capability = Get<int64_t>(map, "compute_capability");
      chosen.driver = Get<int64_t>(map, "driver");
    }
  }
  return static_cast<int64_t>(ChooseTarget(ReadTargets(targets), chosen, name.value_or("")));
}

StringMap LoadBundle(const std::string& path, const ffi::Optional<ffi::String>& target,
                     const ffi::Optional<DLDevice>& device) {
  const Files files(path);
  const StringMap& manifest = files.content();
  CheckVersions(manifest);
  const auto described = Get<Values>(manifest, "targets");
  const std::vector<BundleTarget> targets = ReadTargets(described);
  const std::string wanted = target.value_or("");
  const DLDevice chosen_device = device.value_or(DeviceFor(targets, wanted));
  const std::vector<std::string> libraries = Libraries(manifest, ThisCPU().architecture, files);
  const Machine machine = MachineOf(chosen_device, libraries);
  const StringMap chosen = AsMap(described[ChooseTarget(targets, machine, wanted)]);
  if (machine.device == "cuda" && machine.compute_capability == 0) {
    Raise(kRuntimeError, "there is no device cuda:", chosen_device.device_id,
          ": the driver does not have it");
  }
  ffi::Array<StringMap> kernels;
  for (const ffi::Any& set : Get<Values>(chosen, "kernel_sets")) {
    kernels.push_back(LoadKernels(AsMap(set), files));
  }
  return {{"config", CacheMap(Get<StringMap>(manifest, "cache"), chosen_device)},
          {"kernels", kernels},
          {"device", chosen_device},
          {"target", Get<ffi::String>(chosen, "name")},
          {"manifest", ffi::String(files.manifest())}};
}

}  // namespace pagedkv
