"""Log-probabilities and gradients by the tree beside those of transformers and torch's autograd.

They are stored (make_torch_gradients.py), so the test needs only a file. Its tolerances allow for
transformers' norms and rotary angles, which are in float32 for every dtype.
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from labs.training import log_probs
from treeattn_llama import Llama

HERE = Path(__file__).parent
MODEL = HERE.parents[2] / "llama" / "tests" / "data" / "llamas" / "llama32"

pytestmark = pytest.mark.slow


def test_as_transformers_and_torch_have_it():
    expected = dict(np.load(HERE / "torch_gradients.npz"))
    rows = [row[row >= 0].tolist() for row in expected["rows"]]
    with jax.enable_x64(True):
        model = Llama.load(MODEL, dtype=np.float64)

        def loss(weights):
            found = log_probs(model, rows, weights=weights)
            return (found * expected["weights"]).sum(), found

        gradient, found = jax.grad(loss, has_aux=True)(model.weights)
    np.testing.assert_allclose(found, expected["log_probs"], rtol=0, atol=2e-6)
    fields = {"embedding": gradient.embedding, "norm": gradient.norm}
    for i, layer in enumerate(gradient.layers):
        fields |= {f"{name} {i}": x for name, x in layer._asdict().items() if x is not None}
    assert {*fields} == {*expected} - {"rows", "weights", "log_probs"}
    for name, x in fields.items():
        off = np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name])
        assert off < 2e-6, (name, off)
