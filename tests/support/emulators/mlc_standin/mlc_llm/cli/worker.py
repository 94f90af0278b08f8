# SPDX-License-Identifier: Apache-2.0
"""A worker process: calls Disco's loop with the arguments that the launcher gave."""

import sys

from tvm_ffi import get_global_func


def main():
    get_global_func("runtime.disco.WorkerProcess")(*map(int, sys.argv[1:6]))


if __name__ == "__main__":
    main()
