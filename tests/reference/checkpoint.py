# SPDX-License-Identifier: Apache-2.0
"""The bytes that a checkpoint holds for a layer, from the rows of the sequence."""

from __future__ import annotations

import numpy as np


def page_group(planes, first_page: int, page_size: int) -> np.ndarray:
    """Rows in pages, those that are not in use zero.

    Parameters
    ----------
    planes : K and V ``[length, Hk, D]``, or the latent rows ``[length, D]`` alone
    first_page : int
        Pages that have slid out of the layer's window.

    Returns
    -------
    ``[1, num_pages, 2, Hk, page_size, D]``, or ``[1, num_pages, page_size, D]`` of latent rows
    """
    length = len(planes[0])
    num_pages = -(-length // page_size)
    pages = np.zeros((num_pages, page_size, len(planes), *planes[0].shape[1:]), planes[0].dtype)
    for position in range(length):
        for plane, rows in enumerate(planes):
            pages[position // page_size, position % page_size, plane] = rows[position]
    if len(planes) == 1:
        return pages[None, first_page:, :, 0]
    return pages.transpose(0, 2, 3, 1, 4)[None, first_page:]  # slots behind the heads
