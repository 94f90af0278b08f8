# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: shapes in the type column of the API reference are code."""

import re


def on_page_content(html: str, **_) -> str:
    """Render ``...`` where a docstring's type was taken literally."""
    return re.sub(r"``([^`<]+)``", r"<code>\1</code>", html)
