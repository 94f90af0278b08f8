# SPDX-License-Identifier: Apache-2.0
"""Work division among blocks on the device, and the merge of their partial states."""
