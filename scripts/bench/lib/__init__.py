# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks: cases, rounds, shares of the machine's limits, tables."""
