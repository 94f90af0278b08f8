// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_phase.cc
 * \brief The calls that each phase of a step allows.
 */
#include "step/step_phase.h"

#include "base/error.h"

namespace pagedkv {

void StepPhase::RequireIdle(const char* what) const {
  if (phase_ != Phase::kIdle) {
    Raise(kValueError, what, " is not possible within a step; call end_forward first");
  }
}

void StepPhase::RequireForward(const char* what) const {
  if (phase_ == Phase::kAttending) {
    Raise(kValueError, what, " is not possible while a kernel of the step runs");
  }
  if (phase_ != Phase::kForward) {
    Raise(kValueError, what, " is possible within a step only; call begin_forward first");
  }
}

void StepPhase::RequireOpenStep(const char* what) const {
  if (phase_ == Phase::kAttending) {
    Raise(kValueError, what, " is not possible while a kernel of the step runs");
  }
  if (phase_ != Phase::kForward) Raise(kValueError, what, " without begin_forward");
}

void StepPhase::RequireNotChanging(const char* what) const {
  if (phase_ == Phase::kChanging) {
    Raise(kValueError, what, " is not possible while the cache changes its pages");
  }
}

}  // namespace pagedkv
