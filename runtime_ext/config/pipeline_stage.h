// SPDX-License-Identifier: Apache-2.0
/*!
 * \file pipeline_stage.h
 * \brief The pipeline stage of a cache: which layers of the model it keeps.
 *
 * Layer ids are those of the whole model, in every stage.
 */
#ifndef TVM_PAGEDKV_CONFIG_PIPELINE_STAGE_H_
#define TVM_PAGEDKV_CONFIG_PIPELINE_STAGE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pagedkv {

struct PipelineStage {
  /*! \brief First layer of each stage, then the number of layers. */
  std::vector<int64_t> layer_indptr;
  int64_t index = 0;

  int64_t begin() const { return layer_indptr[index]; }
  int64_t end() const { return layer_indptr[index + 1]; }
  int64_t num_stages() const { return static_cast<int64_t>(layer_indptr.size()) - 1; }
  int64_t num_layers() const { return layer_indptr.back(); }

  /*! \throws Error (IndexError) that names the stage of the layer, when it is another one. */
  void RequireOwn(int64_t layer) const;

  /*!
   * \brief Checks the stages of a model and finds that of this cache.
   * \param layer_indptr First layer of each stage, then num_layers; empty for one stage.
   * \param index The stage. By default that of the Disco worker that runs this thread; workers of
   *   one stage have consecutive ids.
   * \throws Error (ValueError).
   */
  static PipelineStage Resolve(std::vector<int64_t> layer_indptr, int64_t num_layers,
                               std::optional<int64_t> index);
};

/*! \brief The id of the Disco worker that runs this thread, if one does. */
std::optional<int64_t> CurrentWorkerId();

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_PIPELINE_STAGE_H_
