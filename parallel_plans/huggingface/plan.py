"""Defines the plan for `parallelize_module` that shards a model's sequence over a mesh axis."""

from __future__ import annotations

from copy import deepcopy
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring import SequenceAxis, TransferPolicy
from dtensor_ring.extension import AnyMachine, Layout, check_axis_options, format_named, name_layer
from parallel_plans.huggingface.activations.kept_for_backward import KeptForBackward
from parallel_plans.huggingface.activations.token_tiles import check_tile
from parallel_plans.huggingface.core.attention_function import (
    IMPLEMENTATION,
    attention,
    attention_dropout,
    number_attention,
)
from parallel_plans.huggingface.core.bias_tables import make_tables
from parallel_plans.huggingface.core.local_attention import keep_local_attention
from parallel_plans.huggingface.core.model_masks import mask_of
from parallel_plans.huggingface.core.modules import (
    backbone_of,
    changing,
    join_behind,
    language_model_of,
    linear_head,
    origin,
)
from parallel_plans.huggingface.core.passed_on import pass_on
from parallel_plans.huggingface.core.patterns import (
    LayerMasks,
    by_layer,
    read_patterns,
    with_strategies,
)
from parallel_plans.huggingface.core.random_state import random_of_rank
from parallel_plans.huggingface.core.versions import uses_cache
from parallel_plans.huggingface.generation.generate import forward_with_cache, install_generate
from parallel_plans.huggingface.losses.loss import (
    LogitsTransform,
    LossFunction,
    find_logits_transform,
    give_labels,
    install_head,
    other_balance,
    other_loss,
    predicts_next,
    take_losses,
)
from parallel_plans.huggingface.probing.eligibility import check_model, without_adapters
from parallel_plans.huggingface.probing.probe import check_attention, check_head, check_token_mixing
from parallel_plans.huggingface.probing.proxy_model import needs_proxy, small_proxy, without_weights
from parallel_plans.huggingface.selecting import indexers
from parallel_plans.huggingface.serving.two_groups import install_batches
from parallel_plans.huggingface.sharding.local_batch import refuse_local, why_whole
from parallel_plans.huggingface.sharding.sharding import Sharding, forward_by_name, shardings_of
from parallel_plans.huggingface.states import state_passing, stateful
from parallel_plans.huggingface.states.default_layout import (
    compared_layouts,
    fastest_layout,
    hybrid_of,
    named_layout,
)
from parallel_plans.huggingface.vision.image_sharding import check_deal_images
from parallel_plans.huggingface.vision.outer_model import install_outer_model
from parallel_plans.strategies import Strategies, StrategyChoice
from parallel_plans.tested import warn_untested


def context_parallel_plan(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    strategy: StrategyChoice = None,
    kernel: str | None = None,
    policy: TransferPolicy | None = None,
    machine: AnyMachine | None = None,
    unshard_outputs: bool = False,
    deal_images: bool | None = None,
    cache_dtype: str | None = None,
    mlp_tile: int | None = None,
    offload: bool = False,
    local_batch: bool = False,
) -> dict[str, Any]:
    """Return a plan for `parallelize_module` that shards the model's sequence over a mesh axis.

    Call the model as before, with the **whole** batch on every rank of the axis. Inside, tokens,
    positions and next-token labels are sharded over the ranks in layout order, and attention runs
    as ring attention. The output `loss` is the mean over all valid tokens, the same number on every
    rank. `logits` and hidden states are DTensors with `Shard(1)`, which `unshard_sequence` makes
    whole; under `torch.compile` they carry no gradient if `labels` are given. With `labels`, a
    language model returns logits only if it is called with `output_logits=True`: if its head is a
    plain projection, the loss does not need them.

    Gradients: all ranks of the axis have one loss, and the **mean** of their gradients is the
    gradient of one process, as over data-parallel ranks. So DDP over all ranks, and FSDP2 over the
    flattened (dp, cp) mesh, train without changes; without either, average `param.grad` over the
    axis. This also holds for a head or a loss term of your own on whole outputs.

    Args:
        model: a decoder or encoder of transformers 5.x that uses its attention interface: a base
            model, or one with a head `ForCausalLM`, `ForConditionalGeneration` (with images, which
            every rank gets), `ForMaskedLM`, `ForTokenClassification` or
            `ForSequenceClassification`, whose logits are whole.
        layout: the order in which tokens are sharded. "zigzag", the default, balances causal
            attention; "balanced" shards each batch by its documents (not under `torch.compile`).
            For a model with stateful layers, the default is "zigzag" or "contiguous", whichever
            costs fewer bytes in its longest sequence; the logger `dtensor_ring` reports it. "auto"
            is one of these two for any model: for one without such layers, the one whose
            attentions take less time on `machine` in its longest sequence, or 32,768 tokens.
        strategy: how attention is made parallel, see `SequenceAxis`: one strategy for all layers,
            or one by name in the config's `layer_types`: `{"sliding": "ring", "full": "ulysses"}`.
            "auto" chooses for each layer by its mask.
        kernel: name of the block kernel; by default the first suitable of `available_kernels()`.
        policy: the dtypes in which messages are sent, see `TransferPolicy`.
        machine: what "auto" simulates, of strategies and layouts, see `SequenceAxis`.
        unshard_outputs: return logits and hidden states whole, as plain tensors, on every rank.
        deal_images: whether each rank runs the vision encoder on its share of the images only, and
            receives the embeddings of the others. By default, a cost model compares the saved flops
            with the bytes to send. This does not change results.
        cache_dtype: what caches of `generate` keep full blocks of 64 tokens in, `"int8"` or `"fp8"`
            (e4m3): about half the bytes of bfloat16. docs/numerics.md has the errors. By default,
            they round nothing.
        mlp_tile: run MLPs, blocks of experts and norms over tiles of so many tokens of this rank,
            and again in backward, for which they keep their input only. This changes no result but
            by rounding.
        offload: keep in pinned host memory what layers keep for backward, where transformers
            checkpoints them (`activation_checkpointing_enable`): their inputs, and with
            `ring_checkpoint_contexts` the results of their attention. They come back before they
            are needed, beside the kernels. On a CPU, nothing moves.
        local_batch: whether forwards get this rank's tokens, labels, positions and mask only, in
            the order of the layout, as shards of one batch: then no rank needs the whole. DTensors
            with `Shard(1)` over the axis are taken so in any case. Not for heads and outer models
            that read the whole batch, nor for "balanced"; `generate` takes whole prompts.

    Returns:
        A plan with one entry, for the model itself.

    Raises:
        ValueError: if anything but attention reads along the sequence; if the layout, the kernel,
            `cache_dtype` or a strategy is unknown; if the model has no layers of a given name; if
            `deal_images` is set for a model without images; if `mlp_tile` is no number of tokens;
            or if `local_batch` is set where the whole batch is needed.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh, context_parallel_plan(model))
        >>> tokens = torch.arange(8).unsqueeze(0)
        >>> output = model(input_ids=tokens, labels=tokens, output_logits=True)
        >>> output.loss.shape, unshard_sequence(output.logits, 1).shape
        (torch.Size([]), torch.Size([1, 8, 8]))
    """
    warn_untested("transformers")
    check_model(model)
    state_passing.check_layout(model, named_layout(layout))
    check_deal_images(model, deal_images)
    if local_batch:
        refuse_local(why_whole(model), named_layout(layout))
    strategies = Strategies.of(strategy)
    if isinstance(policy, TransferPolicy):  # others are refused by the axis
        policy.refuse_order(
            "context_parallel_plan, whose layers and losses add up all tokens of a rank,"
        )
    how: dict[str, Any] = {"strategy": strategies.common, "kernel": kernel, "policy": policy}
    how["machine"] = machine
    format_named(cache_dtype)  # an error here points at the user's option
    check_tile(mlp_tile)
    return {
        "": ShardedModel(
            layout,
            how,
            unshard_outputs,
            strategies,
            deal_images=deal_images,
            cache_dtype=cache_dtype,
            kept=KeptForBackward(mlp_tile, offload),
            local_batch=local_batch,
        )
    }


class ShardedModel(ParallelStyle):
    """Shards the inputs of a model along the sequence, and joins its outputs."""

    def __init__(
        self,
        layout: Layout | str | None,
        how: dict[str, Any],
        unshard_outputs: bool,
        strategies: Strategies,
        deal_images: bool | None = None,
        cache_dtype: str | None = None,
        kept: KeptForBackward | None = None,
        local_batch: bool = False,
    ) -> None:
        super().__init__()
        self.kept = kept or KeptForBackward()
        self.deal_images, self.cache_dtype = deal_images, cache_dtype
        self.local_batch = local_batch
        self.strategies = strategies
        self.is_auto, self.how = layout == "auto", how
        self.is_picked = layout is None or self.is_auto
        self.layout = named_layout(layout)
        # Check here, so that an error points at the user's options, not at the plan's application.
        check_axis_options(self.layout, **how)
        self.unshard_outputs = unshard_outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(IMPLEMENTATION, attention)
        AttentionMaskInterface.register(IMPLEMENTATION, mask_of)
        check_model(module)
        model: Any = without_adapters(module)
        state_passing.check_layout(model, self.layout)
        backbone = backbone_of(model)
        parts = (model, backbone, language_model_of(backbone))
        replaced = [x for x in parts if "forward" in vars(x)]
        if replaced:
            is_ours = bool(shardings_of(model))
            by = "a context_parallel_plan" if is_ours else origin(replaced[0].forward)
            raise ValueError(
                f"the forward of this model was replaced already, by {by}; apply "
                "the plan once, and before other libraries (device_map, mixed precision, trainers)"
            )
        is_loaded_in_shards = getattr(model, "is_distributed_loading_by_transformers", False)
        if not is_loaded_in_shards and any(isinstance(x, FSDPModule) for x in model.modules()):
            raise ValueError("the model is sharded already; apply the plan before fully_shard")
        with changing(module):
            _own_config(module, model.config)
            self._install(model, backbone, device_mesh)
        return module

    def _install(self, model: Any, backbone: Any, device_mesh: DeviceMesh) -> None:
        """Shard the backbone of a model, and join the inputs of a head behind it."""
        decoder = language_model_of(backbone)
        outer = None if decoder is backbone else backbone
        is_proxy = needs_proxy(backbone)
        examined = small_proxy(backbone) if is_proxy else backbone
        layer_masks, states, why_not, transform, drops = _examine(examined)
        if is_proxy and states:
            # States of the proxy are smaller.
            states = state_passing.specs_of(without_weights(decoder))
        if is_proxy and by_layer(layer_masks):  # the proxy lacks most layers
            whole = language_model_of(small_proxy(backbone, every_layer=True))
            with indexers.describing_scores(whole):
                layer_masks = read_patterns(whole, sees_by_place=indexers.choose_pools(whole))
        layer_masks = with_strategies(layer_masks, self.strategies, device_mesh.size())
        axis = self._axis(decoder, layer_masks, states, device_mesh)
        self.kept.install(backbone)
        decoder.set_attn_implementation(IMPLEMENTATION)
        # An outer model makes the masks of its decoder, and may read the name from its own config.
        model.config.get_text_config()._attn_implementation = IMPLEMENTATION
        if transform is not None:
            install_head(backbone, transform)
        head = None if self.unshard_outputs else linear_head(model, backbone)
        # Any head that is not linear gets the hidden states whole.
        unshards = self.unshard_outputs or (head is None and backbone is not model)
        passing = None
        if states:
            passing = state_passing.AxisStatePassing(axis, states, hybrid_of(decoder, states))
        sharding = Sharding(
            decoder,
            axis,
            layer_masks,
            _loss_of(backbone, why_not),
            unshards,
            passing=passing,
            cache_dtype=self.cache_dtype,
            local_batch=self.local_batch,
            why_whole=why_whole(model),
            drops=drops,
            counts_places=indexers.count_places(decoder),
        )
        if passing is not None:
            stateful.pass_states(stateful.stateful_layers(decoder), passing)
        indexers.select_keys_of(decoder)
        pass_on(decoder)
        make_tables(decoder)
        keep_local_attention(decoder)
        if head is not None:
            join_behind(head, sharding.join)
        if outer is not None:
            install_outer_model(outer, decoder, sharding, self.deal_images)
        else:
            backbone.forward = _sharded_forward(backbone, sharding)
        install_generate(model, sharding)
        install_batches(model, context_parallel_plan)
        _name_layers(model)
        sharding.tokenwise.remember(decoder)
        # Insert it first: pickle must reach its error before objects that transformers added.
        others = dict(vars(model))
        vars(model).clear()
        vars(model).update({"context_parallel_sharding": sharding} | others)

    def _axis(
        self,
        decoder: Any,
        layer_masks: LayerMasks,
        states: state_passing.StateSpecs,
        mesh: DeviceMesh,
    ) -> SequenceAxis:
        """Return the axis of the model, with the layout that is named, or that is picked for it."""
        # With layers that carry a state, the tokens that move around them may cost more than
        # attention; only a model without such layers is picked for by its attention alone.
        costs = None
        if self.is_picked:
            common = self.strategies.common
            costs = compared_layouts(decoder, layer_masks, states, mesh.size(), common)
        layout: Layout | str = costs.best if costs else self.layout
        if self.is_auto and not costs:
            layout = fastest_layout(decoder, layer_masks, mesh, **self.how)
        return SequenceAxis(mesh, layout, **self.how)


def _loss_of(backbone: Any, why_not: tuple[str | None, str | None]) -> LossFunction:
    """Return the loss of a model, and why shards cannot compute it, or that of its routers."""
    why_no_loss, why_no_balance = why_not
    return LossFunction(
        getattr(backbone, "_loss_function", None),
        predicts_next(backbone),
        why_no_loss,
        why_no_balance,
    )


def _examine(
    model: Any,
) -> tuple[
    LayerMasks,
    state_passing.StateSpecs,
    tuple[str | None, str | None],
    LogitsTransform | None,
    bool,
]:
    """Return layer masks and states, why shards cannot compute losses, and the logits transform.

    The losses are the label loss and the load-balancing loss. The last result is whether attention
    drops weights in training. The model is left unchanged.
    """
    decoder = language_model_of(model)
    before = decoder.config._attn_implementation
    try:
        with indexers.describing_scores(decoder):
            layer_masks: LayerMasks = {}
            drops = False
            if stateful.attention_layers(decoder) or not stateful.stateful_layers(decoder):
                layer_masks = read_patterns(decoder, sees_by_place=indexers.choose_pools(decoder))
                check_attention(decoder)
                drops = attention_dropout(decoder) > 0
            states = check_token_mixing(decoder)
            if decoder is not model:
                check_head(model)
            reasons = other_loss(model), other_balance(model)
            transform = None if reasons[0] else find_logits_transform(model)
        return layer_masks, states, reasons, transform, drops
    finally:
        # The probes replaced the attention of the model: restore it.
        decoder.set_attn_implementation(before)


def _name_layers(model: Any) -> None:
    """Give the layers that send messages their names, which ranks compare."""
    layers = {*stateful.attention_layers(model), *stateful.stateful_layers(model)}
    found = [(name, module) for name, module in model.named_modules() if module in layers]
    for number, (name, module) in enumerate(found):
        name_layer(module, name)
        number_attention(module, number)


def _own_config(model: nn.Module, shared: Any) -> None:
    """Copy the config, so that other models that share it keep their attention."""
    copies: dict[int, Any] = {}  # also holds the copies of nested configs
    deepcopy(shared, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) in copies:
            module.config = copies[id(config)]


def _sharded_forward(model: nn.Module, sharding: Sharding) -> MethodType:
    """Return the model's forward with its inputs sharded and its outputs joined."""
    plain = type(model).forward

    def run(self: nn.Module, arguments: dict[str, Any]) -> Any:
        if "ring" in arguments:  # these are a rank's tokens already
            return plain(self, **arguments)
        if uses_cache(arguments):
            return forward_with_cache(plain, self, sharding, arguments)
        batch, spec = sharding.inputs(self, arguments)
        give_labels(self, spec.head_labels)
        try:
            with random_of_rank(self, sharding.rank, spec.plan.indices.device):
                output = plain(self, **batch)
        finally:
            losses = take_losses(self)
        return sharding.joined(output, spec, losses)

    return forward_by_name(model, sharding.arguments, run)
