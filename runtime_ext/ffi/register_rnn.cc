// SPDX-License-Identifier: Apache-2.0
/*!
 * \file register_rnn.cc
 * \brief The stock names that take an RNN state, and ours.
 */
#include "ffi/register_rnn.h"

#include <tvm/ffi/reflection/registry.h>

#include "ffi/method.h"
#include "ffi/override.h"
#include "rnn/rnn_state.h"

namespace pagedkv {

namespace {

/*! \brief A function that makes the call as the only thread inside the RNN state. */
template <auto kMethod>
ffi::Function StateMethod(int num_optional = 0) {
  using Type = decltype(TypeOf(kMethod));
  return ffi::Function::FromPacked([num_optional](ffi::PackedArgs args, ffi::Any* result) {
    CheckCount(args, Type::kNumArgs, num_optional);
    const RNNState state = TakeArgument<RNNState>(args, 0);
    RNNStateObj& object = *state.get();
    Translate([&] { object.Enter([&] { Type::template Call<kMethod>(object, args, result); }); });
  });
}

RNNState CreateRNNState(int64_t num_layers, int64_t max_num_sequences, int64_t max_history,
                        ffi::Array<ffi::Function> f_gets, ffi::Array<ffi::Function> f_sets,
                        ffi::Array<ffi::Tensor> init_values) {
  return Translate([&] {
    return RNNState(RNNStateConfig{num_layers, max_num_sequences, max_history, std::move(f_gets),
                                   std::move(f_sets), std::move(init_values)});
  });
}

/*! \brief Returns the state, so that a model can order later calls after this one. */
void SetState(ffi::PackedArgs args, ffi::Any* result) {
  static const ffi::Function set = StateMethod<&RNNStateObj::Set>();
  set.CallPacked(args, result);
  *result = args[0];
}

void Serve(const char* name, ffi::Function function) {
  Override<RNNStateObj>(name, "a KV cache or an RNN state", std::move(function));
}

}  // namespace

void RegisterRNNState() {
  tvm::ffi::reflection::ObjectDef<RNNStateObj>();
  OverrideCreate("vm.builtin.rnn_state_create", ffi::Function::FromTyped(CreateRNNState));
  Serve("vm.builtin.rnn_state_get", StateMethod<&RNNStateObj::Get>());
  Serve("vm.builtin.rnn_state_set", ffi::Function::FromPacked(SetState));
  Serve("vm.builtin.rnn_state_debug_get", StateMethod<&RNNStateObj::DebugGet>());
  Serve("vm.builtin.kv_state_clear", StateMethod<&RNNStateObj::Clear>());
  Serve("vm.builtin.kv_state_add_sequence", StateMethod<&RNNStateObj::Add>());
  Serve("vm.builtin.kv_state_remove_sequence", StateMethod<&RNNStateObj::Remove>());
  Serve("vm.builtin.kv_state_fork_sequence", StateMethod<&RNNStateObj::Fork>());
  Serve("vm.builtin.kv_state_popn", StateMethod<&RNNStateObj::PopN>());
  Serve("vm.builtin.kv_state_begin_forward",
        StateMethod<&RNNStateObj::BeginForward>(/*num_optional=*/1));
  Serve("vm.builtin.kv_state_end_forward", StateMethod<&RNNStateObj::EndForward>());
  Serve("pagedkv.abort_forward", StateMethod<&RNNStateObj::AbortForward>());
  Serve("pagedkv.is_in_forward", StateMethod<&RNNStateObj::IsInForward>());
  Serve("pagedkv.stats", StateMethod<&RNNStateObj::Stats>());
  Serve("pagedkv.check_integrity", StateMethod<&RNNStateObj::CheckIntegrity>());
  Serve("pagedkv.rnn_state_can_fork", StateMethod<&RNNStateObj::CanFork>());
  Serve("pagedkv.rnn_state_can_popn", StateMethod<&RNNStateObj::CanPopN>());
}

}  // namespace pagedkv
