# SPDX-License-Identifier: Apache-2.0
"""Servers that the tests of stores share."""

import pytest

from ..support.store_servers import mooncake_servers, skip_without_mooncake, valkey_server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory):
    skip_without_mooncake()
    with mooncake_servers(tmp_path_factory.mktemp("mooncake")) as servers:
        yield servers
