# SPDX-License-Identifier: Apache-2.0
"""Which block does what, and where its results go: schedules, partial states, output."""
