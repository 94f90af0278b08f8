# SPDX-License-Identifier: Apache-2.0
"""RNN states, whose kernels apache-tvm 0.27 cannot parse."""


class RNNState:
    @staticmethod
    def create_get_func(shape, dtype, max_batch_size, max_history, state_id):
        raise SyntaxError

    @staticmethod
    def create_set_func(shape, dtype, max_batch_size, max_history, state_id):
        raise SyntaxError
