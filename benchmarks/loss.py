"""What the loss of a language model costs, in time and memory, next to that of whole logits.

    python benchmarks/loss.py

One process of one thread. The hidden states of a rank's tokens go through the projection to their
cross-entropy, forward and backward: by whole logits as transformers does it, by torch's
`linear_cross_entropy` where there is one (torch 2.15), and by ours. Times are of the processor, so
that other work on the machine counts little; bytes are those of the larger tensors that ops made,
beside the gradients. With ``--quick`` it takes seconds and writes to ``out``.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from harness import is_quick, origin, publish, table_of
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parallel_plans.huggingface.losses.cross_entropy import projected_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """Tokens of a rank, vocabulary entries, and numbers of a hidden state."""

    num_tokens: int
    num_words: int
    width: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, weight and labels."""
        torch.manual_seed(0)
        hidden = torch.randn(self.num_tokens, self.width, requires_grad=True)
        weight = torch.randn(self.num_words, self.width).mul_(0.02).requires_grad_()
        return hidden, weight, torch.randint(self.num_words, (self.num_tokens,))


@dataclass(frozen=True)
class Cost:
    """Seconds of the processor, and the largest number of bytes, in units of whole logits."""

    name: str
    problem: Problem
    forward: list[float]
    both: list[float]
    logits: float


PROBLEMS = Problem(512, 16384, 512), Problem(1024, 32768, 256)


def stock(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As in transformers."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, reduction="sum") / len(labels)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As under the plan."""
    return projected_cross_entropy(hidden, weight, None, labels).sum() / len(labels)


def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """With the chunks that it chooses."""
    options = torch.nn.LinearCrossEntropyOptions()
    total = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)
    return total / len(labels)


def losses() -> dict[str, Loss]:
    """Whole logits come first: the others are compared with them."""
    found: dict[str, Loss] = {"whole logits": stock, "ours": ours}
    if hasattr(F, "linear_cross_entropy"):
        found["torch's linear_cross_entropy"] = of_torch
    return found


def timed(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """Of one forward, and with its backward."""
    for x in tensors:
        x.grad = None
    start = time.process_time()
    found = loss(*tensors)
    middle = time.process_time()
    found.backward()
    return middle - start, time.process_time() - start


def peak(loss: Loss, problem: Problem) -> float:
    """The largest number of bytes beside the gradients, in units of whole logits in float32."""
    tensors = problem.tensors()
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as profiler:
        loss(*tensors).backward()
    memory = [x for x in profiler.profiler.kineto_results.events() if x.name() == "[memory]"]
    alive = largest = 0
    for event in sorted(memory, key=lambda x: x.start_ns()):
        alive += event.nbytes()
        largest = max(largest, alive)
    gradients = 4 * (problem.num_tokens + problem.num_words) * problem.width
    return (largest - gradients) / (4 * problem.num_tokens * problem.num_words)


def measure(problem: Problem, turns: int) -> list[Cost]:
    """All in turns."""
    candidates, tensors = losses(), problem.tensors()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for _ in range(turns):
        for name, loss in candidates.items():
            times[name].append(timed(loss, tensors))
    return [
        Cost(name, problem, *(list(x) for x in zip(*times[name], strict=True)), peak(loss, problem))
        for name, loss in candidates.items()
    ]


def report(console: Console, costs: list[Cost]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        "\nMedians, of seconds and of ratios of neighbouring times to those of whole logits; "
        "float32, one thread.\nMemory beside the gradients, in units of the logits in float32.\n"
    )
    numbers = ("forward", "ratio", "with backward", "ratio", "memory")
    table = table_of(("tokens x words x width", "loss"), numbers)
    for cost in costs:
        whole = next(x for x in costs if x.problem == cost.problem)
        columns = [
            text
            for own, other in ((cost.forward, whole.forward), (cost.both, whole.both))
            for text in (f"{median(own):.2f}", f"{ratio(own, other):.2f}")
        ]
        size = " x ".join(str(x) for x in asdict(cost.problem).values())
        table.add_row(size, cost.name, *columns, f"{cost.logits:.2f}")
    console.print(table)


def ratio(times: list[float], others: list[float]) -> float:
    """The median of those of neighbouring times."""
    return median(x / y for x, y in zip(times, others, strict=True))


def main() -> None:
    quick = is_quick(__doc__, "take seconds")
    torch.set_num_threads(1)
    about = origin()
    problems = (Problem(64, 2048, 64),) if quick else PROBLEMS
    costs = [cost for problem in problems for cost in measure(problem, 2 if quick else 5)]
    measured = {"costs": [asdict(cost) for cost in costs]}
    publish("loss", "Losses on CPUs", quick, about, measured, partial(report, costs=costs))


if __name__ == "__main__":
    main()
