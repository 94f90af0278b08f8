# SPDX-License-Identifier: Apache-2.0
"""What the arguments of attention kernels are (`inputs`), and how arrays are matched (`arrays`)."""
