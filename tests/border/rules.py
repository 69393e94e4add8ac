"""The grammar of programs: what a user may write next, and what is so afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.border.operations import REFUSED, TABLE
from tests.border.trying import STOCK, function_of, names_of


class Rule(NamedTuple):
    """Lines that a user may write next.

    Attributes:
        code: the lines; LAYOUT is drawn.
        needs: facts that hold, and with a minus facts that do not.
        gives: facts that hold afterwards, and with a minus facts that do so no more. Of them:
            `x`, an output with a token for each of the batch; `padded`, one in which some count for
            nothing, on the `left` or on the `right`; `sharded`, it is no plain tensor; `graph`, it
            requires gradients; `whole`, the plan makes outputs whole; `low`, numbers are rounded
            to bfloat16.
        compares: expressions whose values are those of one process then; `whole`, `at`, `gradients`
            and `weights` are functions of the judge.
    """

    code: str
    needs: str = ""
    gives: str = ""
    compares: tuple[str, ...] = ()


def holds(needs: str, facts: set[str]) -> bool:
    """Whether all that a rule needs is so."""
    return all((x[1:] not in facts) if x[0] == "-" else (x in facts) for x in needs.split())


STALE = "-x -padded -left -right -sharded -graph -loss -y"
"""After the model has changed or was called again, there is nothing of earlier outputs."""


def plans() -> Iterator[Rule]:
    """The plan, with options that change no result."""
    given = [("", ""), ("", ""), ("", ""), (", unshard_outputs=True", "whole")]
    given += [(f", {x}", "") for x in ("mlp_tile=4", "strategy='auto'", "kernel='reference'")]
    given += [(", offload=True", ""), (", strategy='ulysses'", "")]
    for options, gives in given:
        plan = f"context_parallel_plan(model, LAYOUT{options})"
        code = f"model = parallelize_module(model, mesh, {plan})"
        yield Rule(code, "-planned -ddp -compiled", f"planned {gives}")


def adapters() -> Iterator[Rule]:
    """Adapters of peft, and what is done with them."""
    for needs, targets in (("q_proj", "['q_proj', 'v_proj']"), ("encoder", "['Wqkv']")):
        for more in ("", ", use_dora=True", ", modules_to_save=['norm']", ", bias='all'"):
            lora = f"LoraConfig(r=2, target_modules={targets}, init_lora_weights=False{more})"
            code = f"torch.manual_seed(1)\nmodel = get_peft_model(model, {lora})"
            yield Rule(code, f"-adapted -ddp -compiled {needs}", f"adapted lora {STALE} -grads")
    ia3 = "IA3Config(target_modules=['k_proj', 'down_proj'], feedforward_modules=['down_proj'])"
    yield Rule(
        f"model = get_peft_model(model, {ia3})",
        "-adapted -ddp -compiled llama",
        f"adapted lora {STALE} -grads",
    )
    prompts = "num_virtual_tokens=3, task_type='CAUSAL_LM'"
    for kind in ("PromptTuningConfig", "PrefixTuningConfig"):
        code = f"torch.manual_seed(1)\nmodel = get_peft_model(model, {kind}({prompts}))"
        gives = f"adapted prompted {STALE} -grads"
        yield Rule(code, "-adapted -ddp -compiled llama", gives)
    gives = f"-adapted -lora {STALE} -grads"
    yield Rule(
        "model = model.merge_and_unload()", "lora -ddp -compiled", gives, ("weights(model)",)
    )


def casts() -> Iterator[Rule]:
    """Other dtypes, modes and ways to run that are no part of the plan."""
    # FSDP2 keeps the dtype of its first forward.
    yield Rule("model.to(torch.bfloat16)", "-low -graph -grads -fsdp", "low")
    yield Rule("model.double()", "-low float -fsdp", STALE)
    yield Rule("model = model.float()", "-low double -fsdp", f"{STALE} -double float")
    yield Rule("model.train()", "", "trains")
    yield Rule("model.eval()", "", "-trains")
    how = "gradient_checkpointing_kwargs="
    for more in ("", f"{how}{{'use_reentrant': False}}", f"{how}{{'use_reentrant': True}}"):
        code = f"model.train()\nmodel.gradient_checkpointing_enable({more})"
        yield Rule(code, "-checkpointed -ddp -compiled", "checkpointed trains")
    own = f"{how}{{'use_reentrant': False, 'context_fn': ring_checkpoint_contexts}}"
    yield Rule(
        f"model.train()\nmodel.gradient_checkpointing_enable({own})",
        "-checkpointed -ddp -compiled planned",
        "checkpointed trains",
    )
    code = "model.get_input_embeddings().requires_grad_(False)"
    yield Rule(code, "-ddp -compiled -adapted", f"{STALE} -grads")


def forwards() -> Iterator[Rule]:
    """Calls of the model, with a batch that says in different ways what it holds."""
    batches = [("", "x", "targets"), ("", "x", "targets"), ("", "x", "targets")]
    batches += [(", attention_mask=left", "left", "left_targets")]
    batches += [(", attention_mask=right", "right", "right_targets")]
    batches += [(", position_ids=packed, use_cache=False", "packed", "targets")]
    batches += [(", position_ids=torch.arange(3, S + 3)[None]", "x", "targets")]
    batches += [(", attention_mask=torch.ones_like(ids)", "x", "targets")]
    for (given, kind, targets), (call, needs) in product(batches, _calls()):
        padding = kind if kind in ("left", "right") else ""
        needs += " packs" if kind == "packed" else ""
        needs += " -encoder" if "position_ids" in given else ""
        yield from _called(f"{call}{given}", needs, padding, targets)
    for context in ("torch.no_grad()", "torch.inference_mode()"):
        for field, needs in FIELDS:
            code = f"with {context}:\n    out = model(input_ids=ids)\nx = {field}"
            yield Rule(code, f"{needs} -prompted", f"{STALE} x", ("x",))
    auto = "torch.autocast('cpu', dtype=torch.bfloat16)"
    code = f"with {auto}:\n    out = model(input_ids=ids, labels=targets)\nloss = out.loss"
    yield Rule(code, "labels float", f"{STALE} graph loss low", ("loss",))
    code = "own = shard_sequence(ids, mesh, 1)\nout = model(input_ids=own, labels=own)\n"
    yield Rule(f"{code}loss = out.loss", "lm planned", f"{STALE} graph loss", ("loss",))
    for field, has in FIELDS:
        code = f"out = model(input_ids=shard_sequence(ids, mesh, 1))\nx = {field}"
        yield Rule(code, f"{has} planned -prompted", f"{STALE} x graph", ("x",))
    for end in ("logits_to_keep=1", "logits_to_keep=3"):
        code = f"out = model(input_ids=ids, {end})\nloss = out.logits.square().mean()"
        yield Rule(code, "lm -prompted", f"{STALE} loss", ("out.logits", "loss"))
    code = "with stock_model(model):\n    out = model(input_ids=ids)\nx = out[0]"
    yield Rule(code, "planned logits -lora -prompted -ddp -compiled", f"{STALE} x -sharded", ("x",))
    code = "out = model(input_ids=ids, labels=targets, return_dict=False)\nloss, x = out[:2]"
    yield Rule(code, "labels -prompted", f"{STALE} x graph loss", ("loss", "x"))
    code = "out = model(input_ids=ids, labels=rows)\nloss = out.loss"
    yield Rule(code, "classes", f"{STALE} loss", ("loss", "out.logits"))
    code = "out = model(input_ids=ids, attention_mask=left)\n"
    code += "loss = F.cross_entropy(out.logits, rows)"
    yield Rule(code, "classes", f"{STALE} loss", ("loss", "out.logits"))


FIELDS = (("out.logits", "logits"), ("out.last_hidden_state", "base"))


def _calls() -> list[tuple[str, str]]:
    embedded = "model.get_input_embeddings()(ids)"
    return [
        ("model(input_ids=ids", ""),
        ("model(ids", ""),
        (f"model(inputs_embeds={embedded}", "-ddp -compiled"),
    ]


OFTEN = 3
"""How much more often calls are drawn that give an output to work with."""


def _called(call: str, needs: str, padding: str, targets: str) -> Iterator[Rule]:
    """A call with and without labels, hidden states and logits beside the loss."""
    kind = f"padded {padding}" if padding else "x"
    parts = f"at(x, {padding})" if padding else "x"
    for field, has in FIELDS:
        code = f"out = {call})\nx = {field}"
        rule = Rule(code, f"{needs} {has} -prompted", f"{STALE} {kind} graph", (parts,))
        yield from [rule] * OFTEN
    states = f"[at(h, {padding or 'ids > 0'}) for h in out.hidden_states]"
    code = f"out = {call}, output_hidden_states=True)\nx = out.hidden_states[-1]"
    # A backbone under FSDP2 returns none, whatever is asked for.
    for needed in ("-fsdp", "fsdp logits"):
        needed = f"{needs} -prompted -classes {needed}"
        yield Rule(code, needed, f"{STALE} graph", (states,))
    labelled = f"{call}, labels={targets}"
    code = f"out = {labelled})\nloss = out.loss"
    yield Rule(code, f"{needs} labels", f"{STALE} graph loss", ("loss",))
    code = f"out = {labelled}, output_logits=True)\nloss, x = out.loss, out.logits"
    needed = f"{needs} labels planned -prompted"
    yield from [Rule(code, needed, f"{STALE} {kind} graph loss", ("loss", parts))] * OFTEN
    code = f"out = {labelled}, num_items_in_batch=7)\nloss = out.loss"
    yield Rule(code, f"{needs} lm", f"{STALE} graph loss", ("loss",))


ONE_BY_ONE = "x.view(2, S, 2, -1)", "x[torch.arange(2), index[:2]]", "x[torch.arange(2), -1]"
ONE_BY_ONE += ("x.index_add(1, index[:1], x.new_ones(2, 1, x.shape[-1]))",)
"""Lines for batches of two rows."""
OF_SHARDED = "full_tensor", "unshard_sequence", "redistribute"
"""What only a sharded sequence has."""


def lines(refused: bool) -> Iterator[Rule]:
    """Lines of `operations.py` on an output."""
    for row in TABLE:
        for line in row.lines if (row.result == REFUSED) == refused else ():
            needs = "x -low" + " rows2" * (line in ONE_BY_ONE)
            needs += " sharded" * any(x in line for x in OF_SHARDED)
            if _is_statement(line):
                yield Rule(line, needs, "", ("x",))
            else:
                gives = "y" if gives_gradients(line) else "-y"
                yield Rule(f"y = {line}", needs, gives, ("y",))


def _is_statement(line: str) -> bool:
    try:
        compile(line, line, "eval")
    except SyntaxError:
        return True
    return False


def gives_gradients(line: str) -> bool:
    """Whether a line gives one tensor by which the output has a gradient."""
    x = torch.linspace(-1, 1, 2 * 12 * 8, dtype=torch.float64).view(2, 12, 8).requires_grad_()
    names = names_of(x) | {"unshard_sequence": lambda whole, dim: whole}
    try:
        found: Any = function_of(STOCK.get(line, line))(x, names)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return isinstance(found, Tensor) and found.requires_grad


def maps() -> Iterator[Rule]:
    """What makes another output of the same shape."""
    for line in (
        "x.float()",
        "x.double()",
        "x * 2",
        "x + other",
        "x.log_softmax(-1)",
        "F.gelu(x)",
        "x * mask[..., None]",
        "F.layer_norm(x, x.shape[-1:])",
        "x - x.mean(-1, keepdim=True)",
        "x / (1 + x.abs().max().detach())",
        "torch.where(mask[..., None], x, -x)",
        "x.clone()",
        "x[:]",
        "x.transpose(1, 2).transpose(1, 2)",
        "x.clamp(-2, 2)",
    ):
        yield Rule(f"x = {line}", "x", "-y", ("x",))
    yield Rule("x = x.detach()", "x", "-y -graph", ("x",))
    yield Rule("x = x.to(torch.bfloat16)", "x", "-y low", ("x",))
    yield Rule("x = unshard_sequence(x, 1)", "x sharded", "-y -sharded", ("x",))
    yield Rule("x = x.full_tensor()", "x sharded", "-y -sharded", ("x",))


LOSSES = (
    "F.cross_entropy(x.transpose(1, 2), labels)",
    "F.cross_entropy(x.transpose(1, 2), labels, reduction='sum')",
    "F.cross_entropy(x.transpose(1, 2), labels, label_smoothing=0.1)",
    "F.cross_entropy(x.transpose(1, 2), labels.masked_fill(~mask, -100))",
    "F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "F.nll_loss(x.log_softmax(-1).transpose(1, 2), labels)",
    "F.mse_loss(x, other)",
    "F.smooth_l1_loss(x, other)",
    "F.l1_loss(x, other)",
    "F.huber_loss(x, other, reduction='sum') / x.numel()",
    "x.square().mean()",
    "x.logsumexp(-1).square().mean()",
    "-(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()",
    "(x * mask[..., None]).sum() / mask.sum()",
    "x[:, -1].square().sum()",
    "F.cross_entropy(x[:, -1], labels[:, -1])",
    "x.mean(1).square().sum()",
    "x.amax(1).sum()",
    "unshard_sequence(x, 1).square().mean()",
    "F.cross_entropy(unshard_sequence(x, 1)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "(unshard_sequence(x, 1).cumsum(1) * other).mean()",
    "-x.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).mean()",
    "F.kl_div(x.log_softmax(-1), other.softmax(-1), reduction='batchmean')",
    "x.square().mean() + x[:, 0].sum()",
)
PADDED_LOSSES = (
    "F.cross_entropy(x[:, :-1].flatten(0, 1), MASK_targets[:, 1:].flatten())",
    "(x.square() * MASK[..., None]).sum() / MASK.sum()",
    "(x * MASK[..., None]).sum(1).square().sum()",
    "torch.where(MASK[..., None] > 0, x, 0.0).square().mean()",
    "x.masked_fill(MASK[..., None] == 0, 0.0).sum(1).square().sum()",
)


def losses() -> Iterator[Rule]:
    """Losses of one's own."""
    for line in LOSSES:
        needs = "x graph" + " sharded" * ("unshard" in line)
        yield Rule(f"loss = {line}", needs, "loss", ("loss",))
    for line, mask in product(PADDED_LOSSES, ("left", "right")):
        needs = f"{mask} graph" + " logits" * ("targets" in line)
        yield Rule(f"loss = {line.replace('MASK', mask)}", needs, "loss", ("loss",))
    for line in ("(y * y).sum()", "y.square().mean()", "y.double().abs().mean()"):
        yield Rule(f"loss = {line}", "y graph", "loss", ("loss",))
    yield Rule("loss = loss * 3 + x.square().mean()", "x graph loss", "", ("loss",))
    yield Rule("loss = loss / 4", "loss", "", ("loss",))
    yield from _taught()


def _taught() -> Iterator[Rule]:
    """Losses by another model, which is stock, or under a plan of its own."""
    plan = "parallelize_module(teacher, mesh, context_parallel_plan(teacher, LAYOUT))"
    for planned in ("", f"{plan}\n"):
        code = f"teacher = build()\n{planned}with torch.no_grad():\n"
        code += "    goal = teacher(input_ids=ids).logits * 0.5\n"
        for line in (
            "F.kl_div(x.log_softmax(-1), goal.log_softmax(-1), log_target=True)",
            "(goal.softmax(-1) * (goal.log_softmax(-1) - x.log_softmax(-1))).sum(-1).mean()",
            "F.mse_loss(x, goal)",
        ):
            yield Rule(f"{code}loss = {line}", "x graph logits -low -float", "loss", ("loss",))


def backwards() -> Iterator[Rule]:
    """Gradients of all weights, which average over the axis."""
    gives, compared = f"grads {STALE}", ("gradients(model)",)
    yield Rule("loss.backward()\naverage(model)", "loss", gives, compared)
    for gradient in ("other", "torch.ones_like(x)"):
        code = f"x.backward({gradient})\naverage(model)"
        yield Rule(code, "x graph -low", gives, compared)
    keeping = "loss.backward(retain_graph=True)\naverage(model)"
    yield Rule(keeping, "loss", "grads -loss", compared)


def updates() -> Iterator[Rule]:
    """What is done with gradients."""
    trained = "[x for x in model.parameters() if x.requires_grad]"
    after, compared = f"-grads {STALE}", ("weights(model)",)
    for needs, optimizer in (
        ("grads", f"torch.optim.SGD({trained}, lr=0.1, momentum=0.9)"),
        # A small eps would make steps of what is rounding alone.
        ("grads double -low", f"torch.optim.AdamW({trained}, lr=0.01, eps=1e-3)"),
    ):
        code = f"optimizer = {optimizer}\noptimizer.step()\noptimizer.zero_grad()"
        yield Rule(code, needs, after, compared)
    code = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    yield Rule(code, "grads", "", ("norm", "gradients(model)"))


def savings() -> Iterator[Rule]:
    """State that is saved and loaded, copies, plans that are taken off."""
    after, compared = f"-grads {STALE}", ("weights(model)",)
    saved = "file = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)\n"
    loaded = "model.load_state_dict(torch.load(file))"
    yield Rule(f"{saved}{loaded}", "-fsdp", after, compared)
    code = "where = folder()\ndcp.save({'x': x.detach()}, checkpoint_id=where)\n"
    code += "y = torch.zeros_like(x.detach())\ndcp.load({'x': y}, checkpoint_id=where)"
    yield Rule(code, "x", "-y", ("y",))
    fresh = f"{saved}model = build()\n{loaded}"
    new = f"{after} -planned -whole -checkpointed -trains"
    yield Rule(fresh, "-adapted -ddp -compiled -low", new, compared)
    code = "where = folder()\nmodel.save_pretrained(where)\ndist.barrier()\n"
    code += "model = type(model).from_pretrained(where, dtype=next(model.parameters()).dtype)\n"
    code += "dist.barrier()"
    yield Rule(code, "-adapted -ddp -compiled -low", new, compared)
    yield Rule("torch.save(model, io.BytesIO())", "-adapted -ddp -compiled -planned", "", compared)
    yield Rule("model = copy.deepcopy(model)", "-ddp -compiled", after, compared)
    gives = f"{after} -planned -whole"
    yield Rule("model = restore_model(model)", "planned -ddp -compiled", gives, compared)
    for name in ("", ", unshard_outputs=True"):
        plan = f"context_parallel_plan(model, LAYOUT{name})"
        code = f"model = parallelize_module(restore_model(model), mesh, {plan})"
        gives = f"{after} -whole" + " whole" * bool(name)
        yield Rule(code, "planned -ddp -compiled", gives, compared)


def wrappers() -> Iterator[Rule]:
    """Other libraries over the model."""
    yield Rule("model = DistributedDataParallel(model)", "planned -ddp -compiled", f"ddp {STALE}")
    gives = f"ddp fsdp {STALE} -grads"
    yield Rule("shard_weights(model)", "planned -ddp -compiled -classes", gives)
    compiled = "model = torch.compile(model, backend='aot_eager')"
    yield Rule(compiled, "compiles planned -compiled -ddp", f"compiled {STALE}")


def generations() -> Iterator[Rule]:
    """Tokens that the model generates."""
    needs = "lm -low -prompted -ddp -compiled"
    how = "max_new_tokens=3, do_sample=False"
    ones, stateless = ", attention_mask=torch.ones_like(ids)", ", use_cache=False"
    given = [(ones, "caches"), (ones + stateless, ""), (", attention_mask=left" + stateless, "")]
    given += [(", attention_mask=left", "caches"), (f"{ones}, num_beams=2", "caches")]
    given += [(f"{ones}, prefill_chunk_size=4", "caches")]
    given += [(f"{ones}, num_return_sequences=2, num_beams=2", "caches")]
    for more, has in given:
        code = f"model.eval()\nsaid = model.generate(ids, {how}{more})"
        yield Rule(code, f"{needs} {has}", "-trains", ("said",))
    scored = "return_dict_in_generate=True, output_scores=True"
    code = f"model.eval()\nout = model.generate(ids, {how}{ones}, {scored})"
    yield Rule(code, f"{needs} caches", "-trains", ("out.sequences", "out.scores"))
    code = "model.eval()\ntorch.manual_seed(3)\n"
    code += f"said = model.generate(ids, max_new_tokens=3, do_sample=True{ones})"
    yield Rule(code, f"{needs} caches", "-trains", ("said",))
    turn = f"said = model.generate(said, {how}, cache=cache, attention_mask=torch.ones_like(said))"
    code = f"model.eval()\nsaid, cache = ids, ContextParallelCache(model)\n{turn}\n"
    code += f"said = torch.cat([said, ids], 1)\n{turn}"
    yield Rule(code, f"{needs} caches planned", "-trains", ("said",))
    code = "model.eval()\nwith torch.no_grad():\n    out = model(input_ids=ids, use_cache=True)\n"
    code += "    next_ids = out.logits[:, -1:].argmax(-1)\n"
    code += "    more = model(input_ids=next_ids, CACHE=out.CACHE)"
    yield Rule(
        code.replace("CACHE", "past_key_values"),
        f"{needs} caches",
        f"-trains {STALE}",
        ("next_ids", "more.logits"),
    )


def changes() -> Iterator[Rule]:
    """What is changed in a model that was planned already."""
    needs = "-ddp -compiled -adapted"
    for has, line in (
        ("gemma", "model.config.final_logit_softcapping = 2.0"),
        ("gemma", "model.config.final_logit_softcapping = None"),
        ("gemma", "model.config.sliding_window = 3"),
        ("gemma", "model.model.layers[0].self_attn.sliding_window = 3"),
        ("gemma", "model.model.layers[1].self_attn.attn_logit_softcapping = 0.5"),
        ("llama", "model.model.norm.variance_epsilon = 0.1"),
        ("llama", "model.model.layers[0].self_attn.scaling = 0.1"),
        ("llama", "model.model.layers = model.model.layers[:1]"),
        ("llama", "model.config.use_cache = False"),
        ("llama", "model.config.output_hidden_states = True"),
        ("llama", "model.lm_head.weight.data.mul_(2)"),
        ("llama", "model.lm_head.register_forward_hook(lambda module, args, out: out * 2)"),
        ("llama", "model.model.norm.register_forward_hook(lambda module, args, out: out * 2)"),
        ("llama", "model.lm_head.bias = torch.nn.Parameter(torch.ones(32, dtype=model.dtype))"),
        ("llama double", "model.lm_head = torch.nn.Linear(16, 32, dtype=torch.double)"),
        ("lm", "model.resize_token_embeddings(32)"),
        ("llama", "model.set_attn_implementation('sdpa')"),
    ):
        seed = "torch.manual_seed(2)\n" if "Linear" in line else ""
        yield Rule(f"{seed}{line}", f"{needs} {has}", f"{STALE} -grads")


RULES: dict[str, list[Rule]] = {
    "plan": list(plans()),
    "forward": list(forwards()),
    "backward": list(backwards()),
    "loss": list(losses()),
    "map": list(maps()),
    "operation": list(lines(False)),
    "refused": list(lines(True)),
    "update": list(updates()),
    "adapters": list(adapters()),
    "cast": list(casts()),
    "saving": list(savings()),
    "generation": list(generations()),
    "change": list(changes()),
    "wrapper": list(wrappers()),
}
"""By family; simple ones come first, as hypothesis shrinks to them."""
WEIGHTS = {
    "plan": 14,
    "forward": 20,
    "backward": 12,
    "loss": 10,
    "map": 10,
    "operation": 12,
    "refused": 1,
    "update": 24,
    "adapters": 4,
    "cast": 4,
    "saving": 5,
    "generation": 5,
    "change": 4,
    "wrapper": 2,
}
