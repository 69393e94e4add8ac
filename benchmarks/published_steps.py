"""Published measurements of whole training steps, for benchmarks/published.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor_ring import simulate_step
from dtensor_ring.lab.machine import Machine

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "llama3-8b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
}
FLOPS, OVER_FIRST = "TFLOP/s of a GPU", "tokens/s over the first"


@dataclass(frozen=True)
class StepSetting:
    """What a training step was measured for.

    Attributes:
        source: a name in `sources` of the file.
        machine: a preset.
        kernel: the attention kernel of the measurement.
        model: a name in `MODELS`.
        dtype: of matrix products.
        checkpoint: what backward computes again, see `simulate_step`.
        unit: of the value. FLOPs count hidden pairs of tokens, too.
        counts: what is compared: "value".
        seq_len: tokens of a sequence.
        mesh: sizes of dp, cp and tp.
    """

    source: str
    machine: str
    kernel: str
    model: str
    dtype: str
    checkpoint: str
    unit: str
    counts: tuple[str, ...]
    seq_len: int
    mesh: tuple[int, int, int]

    @property
    def described(self) -> str:
        """The setting in a few words."""
        dp, cp, tp = self.mesh
        return (
            f"{dp * cp * tp} {self.machine}, {self.model}, {self.seq_len // 1024}K, dp {dp}, "
            f"cp {cp}, tp {tp}"
        )


def step_settings(table: Mapping[str, Any]) -> list[StepSetting]:
    """Return the settings of an entry of `steps`, one for each of its values."""
    shared = {name: x for name, x in table.items() if name != "values"}
    shared["counts"] = tuple(shared["counts"])
    return [
        StepSetting(**shared, seq_len=x["seq_len"], mesh=tuple(x["mesh"])) for x in table["values"]
    ]


def simulated_steps(table: Mapping[str, Any], machine: Machine) -> list[float]:
    """Return what the simulator makes of the values of a table, in their unit."""
    found = []
    for setting, value in zip(step_settings(table), table["values"], strict=True):
        dp, cp, tp = setting.mesh
        step = simulate_step(
            MODELS[setting.model],
            setting.seq_len,
            {"dp": dp, "cp": cp, "tp": tp},
            machine,
            strategy=value["strategy"],
            layout=value["layout"],
            dtype=setting.dtype,
            checkpoint=setting.checkpoint,
            compiled=True,
        )
        rate = step.flops_of_all_pairs / step.seconds / 1e12
        found.append(rate if setting.unit == FLOPS else step.tokens_per_second)
    return _over_first(found) if table["unit"] == OVER_FIRST else found


def _over_first(numbers: Sequence[float]) -> list[float]:
    return [x / numbers[0] for x in numbers]
