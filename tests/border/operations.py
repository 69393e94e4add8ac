"""What users do with a sharded sequence, and what each of it gives.

An operation is the line that a user writes, of `x`, a tensor (batch, sequence, features). The same
line runs on the stock tensor.
"""

from __future__ import annotations

from typing import NamedTuple

SHARDED, WHOLE, REFUSED = "sharded", "whole", "refused"
"""A sharded sequence again; plain tensors or numbers, the same on every rank; an error."""


class Row(NamedTuple):
    """Lines that give the same kind of result.

    Attributes:
        what: the family of operations.
        result: `SHARDED`, `WHOLE` or `REFUSED`.
        lines: what a user writes, of the names that `names_of` gives.
    """

    what: str
    result: str
    lines: tuple[str, ...]


TABLE = [
    Row(
        "arithmetic with numbers and sharded sequences",
        SHARDED,
        ("x * 2", "1 - x", "x + x", "x / x.norm(dim=-1, keepdim=True)", "torch.addcmul(x, x, x)"),
    ),
    Row(
        "arithmetic with whole tensors",
        SHARDED,
        ("x * mask[..., None]", "torch.where(mask[..., None], x, 0.0)", "x.argmax(-1) == labels"),
    ),
    Row(
        "arithmetic with tokens of it",
        SHARDED,
        ("x[:, :1].detach() * x", "x - x[:, -1:].detach()", "x[:, 0].detach()[:, None] + x"),
    ),
    Row("dtypes, copies", SHARDED, ("x.double()", "x.to(torch.bfloat16)", "x.detach().clone()")),
    Row("copies", SHARDED, ("copy.deepcopy(x.detach())", "x.contiguous().cpu()")),
    Row(
        "functions of each number",
        SHARDED,
        ("x.exp()", "x.sigmoid()", "F.gelu(x)", "x.clamp(-1, 1)", "x.isnan()", "x > 0"),
    ),
    Row(
        "filling by a condition",
        SHARDED,
        (
            "x.masked_fill(x > 0, 0.0)",
            "torch.where(x > 0, x, -x)",
            "x.masked_fill(~mask[..., None], 0)",
        ),
    ),
    Row("new tensors like it", SHARDED, ("torch.zeros_like(x) + x", "torch.full_like(x, 2.0) * x")),
    Row(
        "softmax over features",
        SHARDED,
        ("x.softmax(-1)", "x.log_softmax(-1)", "x.logsumexp(-1)", "F.softmax(x, dim=2)"),
    ),
    Row(
        "reductions over features",
        SHARDED,
        ("x.argmax(-1)", "x.max(-1)", "x.sum(-1)", "x.mean(-1)", "x.norm(dim=-1)", "x.var(-1)"),
    ),
    Row("sorting features", SHARDED, ("x.topk(2, -1)", "x.sort(-1)", "x.cumsum(-1)", "x.flip(-1)")),
    Row(
        "reductions over the batch",
        SHARDED,
        ("x.sum(0)", "x.mean(0)", "x.amax(0)", "x.mean((0, 2))"),
    ),
    Row(
        "layers",
        SHARDED,
        (
            "F.layer_norm(x, x.shape[-1:])",
            "F.rms_norm(x, x.shape[-1:])",
            "F.one_hot(x.argmax(-1), x.shape[-1])",
        ),
    ),
    Row(
        "features of each token by index",
        SHARDED,
        (
            "x[..., 0]",
            "x[..., :2]",
            "x[0]",
            "x[:1]",
            "x.select(-1, 1)",
            "x.gather(-1, x.argmax(-1, keepdim=True))",
        ),
    ),
    Row("all of it", SHARDED, ("x[:]", "x[:, :, :]", "x[:, None]", "x[..., None]")),
    Row(
        "other dimensions",
        SHARDED,
        (
            "x.transpose(0, 1)",
            "x.permute(2, 1, 0)",
            "x.unsqueeze(1)",
            "x[:, :, None].squeeze(2)",
            "x.unflatten(-1, (2, -1))",
            "x.view(2, S, 2, -1)",
            "x.chunk(2, -1)",
            "x.unbind(0)",
        ),
    ),
    Row(
        "joining beside it",
        SHARDED,
        ("torch.cat([x, x], -1)", "torch.stack([x, x])", "torch.cat([x, x])"),
    ),
    Row("padding features", SHARDED, ("F.pad(x, (0, 1))",)),
    Row("repeating beside it", SHARDED, ("x.repeat(2, 1, 1)", "x[None].expand(3, -1, -1, -1)")),
    Row("in place", SHARDED, ("x *= 2", "x[..., 0] = 0", "x /= 2", "x += x")),
    Row("maps over rows", SHARDED, ("torch.vmap(lambda row: row * 2)(x)",)),
    Row(
        "losses of each token",
        SHARDED,
        (
            "F.cross_entropy(x.transpose(1, 2), labels, reduction='none')",
            "F.mse_loss(x, x * 2, reduction='none')",
            "F.cosine_similarity(x, x * 2, dim=-1)",
            "F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction='none').sum(-1)",
        ),
    ),
    Row(
        "the whole",
        WHOLE,
        ("x.full_tensor()", "unshard_sequence(x, 1)", "unshard_sequence(x * 2, 1)"),
    ),
    Row("its sizes", WHOLE, ("x.shape", "x.size(1)", "len(x)", "x.numel()", "x.ndim")),
    Row(
        "one token",
        WHOLE,
        (
            "x[:, -1]",
            "x[0, -1]",
            "x[:, 0, :2]",
            "x[..., -1, :]",
            "x[:, None, -1]",
            "x.select(1, 0)",
        ),
    ),
    Row(
        "one token of what was made of it",
        WHOLE,
        (
            "x.argmax(-1)[:, -1]",
            "x.log_softmax(-1)[0, -1]",
            "x.transpose(0, 1)[-1]",
            "x[:, -1].softmax(-1).argmax(-1)",
        ),
    ),
    Row(
        "ranges of tokens",
        WHOLE,
        ("x[:, 5:9]", "x[:, :-1]", "x[:, 1:]", "x[:, ::2]", "x[0, :3]", "x.narrow(1, 0, 1)"),
    ),
    Row(
        "lists of tokens",
        WHOLE,
        (
            "x[:, index]",
            "x[:, [0, 0]]",
            "x.index_select(1, index)",
            "x[torch.arange(2), index[:2]]",
        ),
    ),
    Row(
        "sums and means over the sequence",
        WHOLE,
        (
            "x.sum(1)",
            "x.mean(1)",
            "x.mean(dim=1, keepdim=True)",
            "x.sum((0, 1))",
            "x.sum()",
            "x.mean()",
            "(x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
        ),
    ),
    Row("extremes over the sequence", WHOLE, ("x.amax(1)", "x.amin(1)", "x.max()", "x.min()")),
    Row(
        "conditions over the sequence",
        WHOLE,
        ("(x > 0).any(1)", "(x > -99).all()", "x.isnan().any()", "(x > 0).sum()"),
    ),
    Row(
        "its numbers",
        WHOLE,
        (
            "x.sum().item()",
            "x.tolist()",
            "x.detach().numpy()",
            "bool((x == x).all())",
            "float(x.detach().mean())",
        ),
    ),
    Row(
        "losses",
        WHOLE,
        (
            "F.cross_entropy(x[0], labels[0])",
            "F.cross_entropy(x.transpose(1, 2), labels)",
            "F.mse_loss(x, other)",
            "F.l1_loss(x, x * 2)",
            "F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction='batchmean')",
            "F.binary_cross_entropy_with_logits(x, x.sigmoid().detach())",
            "F.binary_cross_entropy_with_logits(x, x.sigmoid().detach(), weight=mask[..., None])",
            "F.mse_loss(x, other, weight=other.abs())",
            "F.cross_entropy(x.transpose(1, 2), x.softmax(-1).transpose(1, 2).detach())",
        ),
    ),
    Row(
        "losses of the next tokens",
        WHOLE,
        (
            "F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
            "F.cross_entropy(x[:, :-1].transpose(1, 2), labels[:, 1:])",
            "-x[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).mean()",
        ),
    ),
    Row(
        "accuracies",
        WHOLE,
        (
            "(x.argmax(-1) == labels).float().mean()",
            "(x[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()",
        ),
    ),
    Row("printing", WHOLE, ("len(str(x)) > 0", "len(f'{x}') > 0")),
    Row("features by whole labels", SHARDED, ("x.gather(-1, labels[..., None])",)),
    Row(
        "plain weights",
        REFUSED,
        ("F.linear(x, weight)", "x @ weight.T", "F.embedding(x.argmax(-1), weight)"),
    ),
    Row("order of tokens", REFUSED, ("x.flip(1)", "x.roll(1, 1)", "x.sort(1)", "x.argsort(1)")),
    Row(
        "running sums",
        REFUSED,
        ("x.cumsum(1)", "x.cumprod(1)", "x.diff(dim=1)", "x.logcumsumexp(1)"),
    ),
    Row("places of extremes", REFUSED, ("x.argmax(1)", "x.max(1)", "x.topk(1, 1)", "x.argmax()")),
    Row(
        "other reductions over the sequence",
        REFUSED,
        ("x.var(1)", "x.std()", "x.norm()", "x.logsumexp(1)", "x.median(1)", "x.prod(1)"),
    ),
    Row(
        "normalising over the sequence",
        REFUSED,
        (
            "x.softmax(1)",
            "x.log_softmax(1)",
            "F.normalize(x, dim=1)",
            "F.cosine_similarity(x, x, dim=1)",
        ),
    ),
    Row(
        "joining along it",
        REFUSED,
        ("torch.cat([x, x], 1)", "torch.hstack([x, x])", "x.repeat(1, 2, 1)"),
    ),
    Row("padding it", REFUSED, ("F.pad(x, (0, 0, 1, 0))", "F.pad(x, (0, 0, 0, 1))")),
    Row(
        "splitting it",
        REFUSED,
        (
            "x.chunk(2, 1)",
            "x.split(1, 1)",
            "x.unbind(1)",
            "x.unflatten(1, (1, -1))",
            "x.unfold(1, 1, 1)",
        ),
    ),
    Row("loops over tokens", REFUSED, ("[token for token in x.transpose(0, 1)]",)),
    Row(
        "positions by a tensor",
        REFUSED,
        ("x.gather(1, labels[..., None])", "x.take_along_dim(labels[..., None], 1)"),
    ),
    Row(
        "writing tokens",
        REFUSED,
        (
            "x[:, 0] = 0",
            "x[:, :1] += 1",
            "x.scatter(1, labels[..., None], 0.0)",
            "x.index_add(1, index[:1], x.new_ones(2, 1, x.shape[-1]))",
        ),
    ),
    Row(
        "conditions as an index",
        REFUSED,
        ("x[x > 0]", "x[mask]", "x[torch.arange(2), -1]", "x.nonzero()", "x.masked_select(x > 0)"),
    ),
    Row(
        "products of tokens",
        REFUSED,
        ("x.transpose(1, 2) @ x", "torch.einsum('bsh,bth->bst', x, x)"),
    ),
    Row("parts of matrices", REFUSED, ("x.tril()", "torch.triu(x)")),
    Row(
        "kernels along it",
        REFUSED,
        (
            "F.avg_pool1d(x.transpose(1, 2), 1)",
            "F.interpolate(x.transpose(1, 2), scale_factor=2)",
            "F.conv1d(x.transpose(1, 2), weight[:, :, None])",
        ),
    ),
    Row("repeats of tokens", REFUSED, ("x.repeat_interleave(2, 1)",)),
    Row(
        "counts of values",
        REFUSED,
        (
            "x.argmax(-1).unique()",
            "x.histc(4)",
            "x.quantile(0.5)",
            "torch.bincount(x.argmax(-1).flatten())",
        ),
    ),
    Row("losses of tokens by a sequence", REFUSED, ("F.mse_loss(x[:, ::1], x)",)),
    Row("placements", REFUSED, ("x.redistribute(placements=[Shard(2)])",)),
    Row("maps that index tokens", REFUSED, ("torch.vmap(lambda row: row[-1])(x)",)),
]
"""By family. Lines of a row give the same kind of result; an operation is in one row."""

OPERATIONS: dict[str, str] = {line: row.result for row in TABLE for line in row.lines}
