"""Parts of the tests that stand for all: `pytest --sample seams` and `--sample oldest`.

A test that is named without a case stands for the first of its cases and for a fifth of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

SEAMS = {
    "huggingface/test_census.py": ["test_sample"],
    "huggingface/test_families.py": [
        "test_family_equals_the_stock_model",
        "test_packed_batches_compile_once",
    ],
    "huggingface/test_families_trained.py": [
        "test_distributed_checkpoint_goes_on",
        "test_lora",
        "test_mixed_precision",
        "test_steps_of_fsdp_equal_one_process",
        "test_tensor_parallelism_beside_it",
    ],
    "huggingface/generation/test_generate.py": [
        "test_greedy_tokens_of_all_families",
        "test_ranks_that_begin_differently",
        "test_turns_equal_one_forward",
        "test_ways_to_generate",
    ],
    "huggingface/generation/test_generate_images.py": [
        "test_ranks_that_differ",
        "test_refused_on_every_rank",
        "test_tokens_after_images",
        "test_ways_to_generate",
    ],
    "huggingface/generation/test_hf_cache.py": [
        *(
            "test_a_chat",
            "test_a_forward_that_names_none_hands_on_its_parts_name",
            "test_bytes",
            "test_compiled",
            "test_half_done",
            "test_lookup",
            "test_loops",
        ),
        *("test_layers_that_keep_something_else", "test_loops", "test_misused"),
        *("test_refused", "test_rows"),
    ],
    "huggingface/core/test_hf_classification.py": ["test_heads_equal_one_process"],
    "huggingface/core/test_hf_model_masks.py": ["test_trains_as_one_process"],
    "huggingface/test_hf_distributed.py": ["test_sharded_and_loaded_equals_one_process"],
    "huggingface/core/test_hf_restore.py": ["test_is_as_before"],
    "huggingface/losses/test_hf_loss.py": ["test_router_outputs_equal_one_process"],
    "huggingface/test_hf_calls.py": ["test_outputs_of_all_input_forms"],
    "huggingface/states/test_hybrids.py": [
        "test_checkpointing_repeats_a_layer_with_its_own_documents",
        "test_compiled_as_a_whole",
        "test_hybrid_equals_the_stock_model",
        "test_layers_go_on_from_their_states",
        "test_packed_documents_are_as_alone",
    ],
    "huggingface/vision/test_images.py": [
        "test_equals_one_process",
        "test_images_equal_the_stock_model",
        "test_steps_of_fsdp_equal_one_process",
        "test_whole_model_in_one_graph",
    ],
    "huggingface/trainers/test_trainer.py": [
        "test_predictions_under_prompt_tuning",
        "test_survives_what_accelerate_unwraps",
        "test_trains_evaluates_and_resumes_as_one_process",
    ],
    "huggingface/trainers/test_trainer_mesh.py": [
        "test_mesh_of_a_config",
        "test_mixed_precision_and_saving",
    ],
    "huggingface/trainers/test_trainer_steps.py": ["test_steps_equal_one_process"],
    "huggingface/trainers/test_trl.py": [
        "test_head_projects_own_tokens_only",
        "test_trains_and_reports_as_one_process",
    ],
    "dtensor/test_varlen.py": ["test_every_window", "test_compiled"],
    "torchtitan/test_kernel.py": ["test_as_dense"],
    "torchtitan/test_torchtitan.py": [
        "test_compiled",
        "test_override_of_checkpointing",
        "test_resuming_on_another_ring",
        "test_stock_entry_point",
        "test_training",
    ],
    "test_diffusers.py": [
        "test_forward_and_backward_are_those_of_one_process",
        "test_without_parallelism_the_stock_attention_runs",
    ],
    "dtensor/test_cache_tag.py": ["test_export", "test_ranks_have_graphs_of_their_own"],
    "dtensor/flex/test_flex_attention.py": ["test_built", "test_the_higher_order_op"],
    "dtensor/test_dtensor.py": ["test_compiled"],
    "dtensor/test_sdpa.py": [
        "test_as_before",
        "test_dense_result",
        "test_other_handlers_are_called",
    ],
    "dtensor/test_style.py": ["test_model", "test_one_node_per_attention"],
    "ops/test_compile.py": [
        "test_inductor_equals_eager",
        "test_three_attentions_are_three_nodes_forward_and_backward",
    ],
    "ops/test_fakes.py": ["test_opcheck"],
}
"""Those that cross a seam to another library, which `make test-newest` runs, by file.

They call what the library's users call, and compare with its stock model or trainer, so that they
fail where a release of it has moved what we replace, read or register ourselves in.
"""
OLDEST = {
    "ops/test_op.py": [
        "test_as_exact_as_one_process[2]",
        "test_autocast_does_what_it_does_to_sdpa[dtype0]",
    ],
    "ops/test_compile.py": [
        "test_five_batches_of_documents_compile_once",
        "test_inductor_equals_eager",
        "test_three_attentions_are_three_nodes_forward_and_backward",
    ],
    "all_to_all/test_op.py": ["test_opcheck", "test_ranks_that_differ_are_reported"],
    "ops/test_fakes.py": [
        "test_fake_kernels_promise_what_the_real_ones_return",
        "test_flops_of_dtensors_are_those_of_all_ranks[None]",
        "test_forward_mode_is_refused",
        "test_opcheck[cross]",
        "test_second_derivatives_are_refused",
    ],
    "ops/test_state.py": ["test_ops", "test_ops_of_rows"],
    "ops/test_transforms.py": [
        "test_transform[module-ulysses]",
        "test_transform[vmap of grad-ring]",
    ],
    "dtensor/flex/test_flex_attention.py": [
        "test_five_batches_compile_once",
        "test_the_higher_order_op",
    ],
    "dtensor/test_agreement.py": [
        "test_autocast_of_one_rank",
        "test_compiled_calls_are_not_compared",
        "test_every_rank_raises_and_the_ring_still_works[DTensors-3]",
    ],
    "dtensor/test_cache_tag.py": ["test_export", "test_ranks_have_graphs_of_their_own", "test_tag"],
    "dtensor/test_choice.py": ["test_a_graph_for_all_lengths"],
    "dtensor/test_dtensor.py": [
        "test_compiled[dp, cp: uneven zigzag, prefix]",
        "test_dense_result[cp]",
        "test_refusals",
    ],
    "dtensor/test_gather.py": ["test_gradients_average_over_the_axis", "test_sum_over_the_axis"],
    "dtensor/test_merge.py": ["test_compiled", "test_opcheck[dtype0-order0]"],
    "dtensor/test_sdpa.py": [
        "test_as_before",
        "test_dense_result[dp, cp, grouped]",
        "test_ops_of_gpus[flash]",
        "test_other_handlers_are_called",
        "test_unfused[causal]",
    ],
    "dtensor/test_sequence.py": [
        "test_all_lengths_compile_twice",
        "test_gradients[zigzag]",
        "test_round_trips[2]",
    ],
    "dtensor/test_style.py": ["test_one_node_per_attention", "test_ring_attention_inside"],
    "all_to_all/test_ulysses.py": ["test_as_dense[zigzag, causal, ulysses of 2]"],
    "all_to_all/test_ulysses_compiled.py": [
        "test_one_node_for_each_exchange_and_five_batches_compile_once"
    ],
    "dtensor/test_varlen.py": ["test_compiled", "test_every_window[2-contiguous]"],
    "huggingface/test_families.py": ["test_family_equals_the_stock_model[Gemma 3-4-zigzag]"],
    "huggingface/test_families_trained.py": ["test_steps_of_fsdp_equal_one_process[full-calls1]"],
    "huggingface/generation/test_generate.py": ["test_ways_to_generate[Llama-2]"],
    "decode/test_decode_op.py": [
        "test_a_hundred_steps_compile_twice_at_most",
        "test_by_placements[dp, cp]",
        "test_opcheck[runs and rows]",
    ],
    "test_fuzz.py": ["test_fuzz[zigzag-4 ranks, 2]"],
    "test_gpu_check.py": ["test_every_step_of_several_ranks"],
    "test_played.py": [
        "test_ring[zigzag-reference on cpu]",
        "test_ring_of_large_messages[zigzag-1]",
    ],
    "test_public.py": ["test_import_loads_nothing_else"],
    "agreement/test_checked_transport.py": [
        "test_a_difference_is_named_on_every_rank",
        "test_two_threads_on_one_group",
    ],
    "agreement/test_record_group.py": [
        "test_a_lost_connection_is_told_around_the_ring",
        "test_made_once_and_ended_with_the_group",
    ],
    "transport/test_rotation.py": ["test_rotation[zigzag]"],
}
"""Those that `.ci/run` has with the oldest torch, by file: each way to a ring, compiled or not.

They call what differs from torch to torch: its dispatcher, its compiler, DTensors and groups.
"""
SAMPLES = {"seams": SEAMS, "oldest": OLDEST}


def sampled(items: Sequence[pytest.Item], sample: str) -> list[pytest.Item]:
    """The tests of a sample, in their order.

    Raises:
        pytest.UsageError: if a test has no longer a case that the sample names.
    """
    names = {f"tests/{file}::{name}" for file, of in SAMPLES[sample].items() for name in of}
    tests, there = {_test(item) for item in items}, {item.nodeid for item in items}
    lost = {name for name in names if name.partition("[")[0] in tests} - there - tests
    if lost:
        raise pytest.UsageError(f"no such cases: {', '.join(sorted(lost))}")
    seen: set[str] = set()
    kept = []
    for item in items:
        test, is_case = _test(item), item.nodeid in names
        stands = test not in seen or crc32(item.nodeid.encode()) % 5 == 0
        if is_case or (test in names and stands):
            kept.append(item)
        seen.add(test)
    return kept


def without_repeats(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those without the mark `repeats`; of tests with the mark `pairs`, cases that pair values.

    Two values of different parameters, which meet in some case, meet in one that is kept.
    """
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            products.setdefault(_test(item), []).append(item)
    covering = {id(item) for cases in products.values() for item in _covering(cases)}
    return [
        item
        for item in items
        if not item.get_closest_marker("repeats")
        and (id(item) in covering or not item.get_closest_marker("pairs"))
    ]


def _covering(cases: Sequence[Any]) -> list[Any]:
    """Cases in which all pairs of values occur: the next is one that has most of what is left."""
    pairs = {
        case: frozenset(combinations(((k, id(x)) for k, x in case.callspec.params.items()), 2))
        for case in cases
    }
    left, kept = frozenset().union(*pairs.values()), []
    while left:
        kept.append(max(pairs, key=lambda case: len(pairs[case] & left)))
        left -= pairs.pop(kept[-1])
    return kept


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
