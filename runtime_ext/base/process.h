// SPDX-License-Identifier: Apache-2.0
/*!
 * \file process.h
 * \brief Tells objects in a forked child from those of its own.
 */
#ifndef TVM_PAGEDKV_BASE_PROCESS_H_
#define TVM_PAGEDKV_BASE_PROCESS_H_

#include <cstdint>

namespace pagedkv {

/*! \brief The number of forks between the process that loaded the library and this one. */
int64_t NumForks();

/*!
 * \brief A member of objects that own threads, shared memory or memory of a device.
 *
 * A forked child has none of these, only copies of the objects. Their methods raise there, and
 * their destructors do nothing.
 */
class OwnProcess {
 public:
  /*! \brief Whether this process made the object. */
  bool IsThis() const { return num_forks_ == NumForks(); }
  /*!
   * \param what The object.
   * \throws Error (RuntimeError) in a forked child.
   */
  void Require(const char* what) const;

 private:
  int64_t num_forks_ = NumForks();
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_PROCESS_H_
