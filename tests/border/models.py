"""The models of programs: decoders, heads of each kind, bare models."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """A model that programs build.

    Attributes:
        family: of `tests/families.py`.
        head: the end of its class's name; empty for the usual one.
        features: of its output.
        facts: what it can do, see `Rule` of `rules.py`.
        weight: how often it is drawn.
        targets: its labels.
        dtypes: that the stock model runs in.
        attention: the implementation of the stock model; "eager" rounds to float32, and has no
            numbers where a row of padding sees nothing in double.
        changes: of its config.
    """

    family: str
    head: str
    features: int
    facts: str
    weight: int = 2
    targets: str = "ids.clone()"
    dtypes: tuple[str, ...] = ("double", "double", "float")
    attention: str = "sdpa"
    changes: str = ""


_TEXT, _FLOAT = "lm logits labels", {"dtypes": ("float",)}
MODELS = {
    "Llama": Model("Llama", "", 32, f"{_TEXT} packs caches q_proj llama", 5),
    "Gemma 2": Model(
        "Gemma 2", "", 32, f"{_TEXT} packs caches q_proj gemma", 4, attention="eager", **_FLOAT
    ),
    "LFM2": Model("LFM2", "", 32, f"{_TEXT} hybrid q_proj", 3),
    "Granite 4": Model("Granite 4", "", 32, f"{_TEXT} hybrid", 1, **_FLOAT),
    "Qwen3-Next": Model("Qwen3-Next", "", 32, f"{_TEXT} hybrid q_proj", 1, **_FLOAT),
    "tokens": Model(
        "Llama",
        "ForTokenClassification",
        2,
        "logits q_proj labels",
        targets="ids % 2",
        changes=", classifier_dropout=0.0",
    ),
    "masked": Model("ModernBERT", "ForMaskedLM", 32, "logits encoder labels", 2),
    "encoder": Model("ModernBERT", "Model", 16, "base encoder", 2),
    "decoder": Model("Llama", "Model", 16, "base packs q_proj", 1),
    "classes": Model("Llama", "ForSequenceClassification", 2, "classes q_proj", 2),
}
"""Decoders, some with a window or layers with a state, heads of each kind, bare models."""
LAYOUTS = ("'zigzag'", "'striped'", "None", "'contiguous'", "'zigzag'", "'striped'", "'auto'")
LAYOUTS += ("'balanced'",)
