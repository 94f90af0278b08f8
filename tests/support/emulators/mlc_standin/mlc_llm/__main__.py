# SPDX-License-Identifier: Apache-2.0
"""Commands: here only one, which tells what it was given and whether our cache is installed."""

import sys


def main() -> None:
    from .compiler_pass import dispatch_kv_cache_creation

    cache = dispatch_kv_cache_creation.kv_cache.TIRPagedKVCache
    print(f"{cache.__module__} {' '.join(sys.argv[1:])}")


if __name__ == "__main__":
    main()
