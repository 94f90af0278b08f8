// SPDX-License-Identifier: Apache-2.0
/*!
 * \file pipeline_stage.h
 * \brief Which layers of the model a cache keeps: those of its pipeline stage.
 *
 * Layers have the ids that they have in the whole model, in every stage.
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

  /*! \throws Error (IndexError) that tells whose layer it is, when it is not of this stage. */
  void RequireOwn(int64_t layer) const;

  /*!
   * \brief Checks the stages of a model and finds the one of this cache.
   * \param layer_indptr First layer of each stage, then num_layers; empty: one stage.
   * \param index The stage; not given: that of the Disco worker which runs this thread. Workers of
   *   one stage have consecutive ids.
   * \throws Error (ValueError).
   */
  static PipelineStage Resolve(std::vector<int64_t> layer_indptr, int64_t num_layers,
                               std::optional<int64_t> index);
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_PIPELINE_STAGE_H_
