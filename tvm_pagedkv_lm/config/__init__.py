# SPDX-License-Identifier: Apache-2.0
"""What a decoder of any family is: shapes, options and types, as frozen records."""
