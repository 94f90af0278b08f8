// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_phase.h
 * \brief The phase of a cache between begin_forward and end_forward, and the calls that it allows.
 *
 *     kIdle -> kChanging -> kForward <-> kAttending
 *       ^----------'           '-> kIdle (end_forward, abort_forward)
 *
 * A kernel, or a handler, that calls back into the cache finds it kChanging or kAttending.
 */
#ifndef TVM_PAGEDKV_STEP_STEP_PHASE_H_
#define TVM_PAGEDKV_STEP_STEP_PHASE_H_

namespace pagedkv {

class StepPhase {
 public:
  // Each throws Error (ValueError) that names the call in any other phase.
  void RequireIdle(const char* what) const;
  /*! \brief Within a step, and no kernel of it runs. */
  void RequireForward(const char* what) const;
  /*! \brief Like RequireForward, for the calls that end the step. */
  void RequireOpenStep(const char* what) const;
  /*! \brief Page tables are consistent: within a step that is so as well. */
  void RequireNotChanging(const char* what) const;

  bool is_idle() const { return phase_ == Phase::kIdle; }
  bool is_in_forward() const { return phase_ == Phase::kForward || phase_ == Phase::kAttending; }
  /*! \brief Neither pages change nor a kernel runs. */
  bool is_quiet() const { return phase_ == Phase::kIdle || phase_ == Phase::kForward; }
  bool has_slid() const { return phase_ != Phase::kForward; }
  void EndStep() { phase_ = Phase::kIdle; }

  /*! \brief A change of page tables while idle. Without BeginStep the cache is idle after it. */
  class Change {
   public:
    explicit Change(StepPhase* phase) : phase_(phase) { phase->phase_ = Phase::kChanging; }
    ~Change() {
      if (phase_->phase_ == Phase::kChanging) phase_->phase_ = Phase::kIdle;
    }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    void BeginStep() { phase_->phase_ = Phase::kForward; }

   private:
    StepPhase* phase_;
  };

  /*! \brief A call of a layer within a step. */
  class Attending {
   public:
    Attending(StepPhase* phase, const char* what) : phase_(phase) {
      phase->RequireForward(what);
      phase->phase_ = Phase::kAttending;
    }
    ~Attending() { phase_->phase_ = Phase::kForward; }
    Attending(const Attending&) = delete;
    Attending& operator=(const Attending&) = delete;

   private:
    StepPhase* phase_;
  };

 private:
  enum class Phase { kIdle, kChanging, kForward, kAttending };

  Phase phase_ = Phase::kIdle;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_STEP_PHASE_H_
