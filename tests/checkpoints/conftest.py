"""Programs here run once or twice, on a few numbers, and are compared within tolerances: compiling them quickly matters more than their speed."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
