# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs/: their code runs, their links and paths lead somewhere."""
