# SPDX-License-Identifier: Apache-2.0
"""Servers that the tests of stores share."""

import pytest

from ..support.emulators.store_servers import mooncake_servers, skip_without_mooncake, valkey_server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory):
    skip_without_mooncake()
    with mooncake_servers(tmp_path_factory.mktemp("mooncake")) as servers:
        yield servers


@pytest.fixture(scope="session")
def mooncake_stores(mooncake):
    """The one store that tests use, in a list; a new one takes the place of one that is closed."""
    stores = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def mooncake_store(mooncake, mooncake_stores):
    """An empty store in the memory of a Mooncake client."""
    from tvm_pagedkv.stores import MooncakeStore

    if not mooncake_stores or mooncake_stores[0]._is_closed:
        mooncake_stores[:] = [MooncakeStore(f"127.0.0.1:{mooncake[0].port}")]
    mooncake_stores[0]._client.remove_all(True)
    return mooncake_stores[0]
