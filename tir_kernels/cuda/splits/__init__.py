# SPDX-License-Identifier: Apache-2.0
"""How blocks share out work on the device, and how their partial states are merged."""
