"""A whole model that reads images, under its plan and torch.compile: one graph, and exact."""

from __future__ import annotations

import warnings
from typing import Any

from torch._dynamo.testing import CompileCounterWithBackend

from tests.dense import largest
from tests.huggingface.vision.test_images import planned
from tests.multimodal import batch_of, small_model
from tests.pool import on_ranks
from tests.results import difference, results_of

FAMILY, CASE = "LLaVA", "several images"
"""Its language model makes its masks. Those of Gemma 3 differ with the batch."""


def shallow(model: Any) -> Any:
    """The model with one layer of text: a compiler takes its time for each."""
    del model.model.language_model.layers[1:]
    return model


@on_ranks(2, timeout=300)
def test_whole_model_in_one_graph() -> None:
    # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model, counter = shallow(planned(FAMILY)), CompileCounterWithBackend("aot_eager")
    # Transformers puts its hooks in at the first call, which cannot be compiled.
    model(**batch_of(FAMILY, CASE))
    model.compile(backend=counter, fullgraph=True)
    errors = []
    for seed in (1, 2):  # other tokens, and no other graph
        batch = batch_of(FAMILY, CASE, seed)
        expected = results_of(shallow(small_model(FAMILY)), batch)
        errors.append(difference(results_of(model, batch), expected)[0])
    assert counter.frame_count == 1
    assert largest(errors) < 1e-5
