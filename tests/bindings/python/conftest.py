# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the bundled model, loaded once."""
import pytest
import tessera


@pytest.fixture(scope='session')
def model():
    with tessera.Model(device='cpu', threads=2, max_model_len=4096) as loaded:
        yield loaded
