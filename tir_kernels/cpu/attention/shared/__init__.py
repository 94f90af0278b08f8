# SPDX-License-Identifier: Apache-2.0
"""Many query rows over the same positions: shared prefixes, and the heads of MLA."""
