"""The tests that cross a seam to another library: `pytest --seams`, which `make test-newest` runs.

They call what the library's users call, and compare with its stock model or trainer, so that they
fail where a release of it has moved what we replace, read or register ourselves in.
"""

from __future__ import annotations

SEAMS = {
    "huggingface/test_census.py": ["test_sample"],
    "huggingface/test_families.py": ["test_family_equals_the_stock_model"],
    "huggingface/test_families_compiled.py": ["test_packed_batches_compile_once"],
    "huggingface/test_families_trained.py": [
        "test_distributed_checkpoint_goes_on",
        "test_lora",
        "test_mixed_precision",
        "test_ten_steps_of_fsdp_equal_one_process",
        "test_tensor_parallelism_beside_it",
    ],
    "huggingface/test_generate.py": [
        "test_greedy_tokens_of_all_families",
        "test_turns_equal_one_forward",
        "test_ways_to_generate",
    ],
    "huggingface/test_generate_images.py": [
        "test_refused_on_every_rank",
        "test_tokens_after_images",
        "test_ways_to_generate",
    ],
    "huggingface/test_generate_ranks.py": ["test_ranks_that_begin_differently"],
    "huggingface/test_hf_cache.py": ["test_cache", "test_layers_that_keep_something_else"],
    "huggingface/test_hf_cached.py": ["test_calls"],
    "huggingface/test_hf_classification.py": ["test_heads_equal_one_process"],
    "huggingface/test_hf_given.py": ["test_trains_as_one_process"],
    "huggingface/test_hf_meta.py": ["test_sharded_and_loaded_equals_one_process"],
    "huggingface/test_hf_restore.py": ["test_is_as_before"],
    "huggingface/test_hf_router.py": ["test_router_outputs_equal_one_process"],
    "huggingface/test_hf_versions.py": ["test_a_forward_that_names_none_hands_on_its_parts_name"],
    "huggingface/test_huggingface.py": ["test_outputs_of_all_input_forms"],
    "huggingface/test_hybrids.py": [
        "test_compiled_as_a_whole",
        "test_hybrid_equals_the_stock_model",
        "test_layers_go_on_from_their_states",
    ],
    "huggingface/test_hybrids_packed.py": [
        "test_checkpointing_repeats_a_layer_with_its_own_documents",
        "test_packed_documents_are_as_alone",
    ],
    "huggingface/test_images.py": [
        "test_images_equal_the_stock_model",
        "test_ten_steps_of_fsdp_equal_one_process",
    ],
    "huggingface/test_images_compiled.py": ["test_whole_model_in_one_graph"],
    "huggingface/test_images_dealt.py": ["test_equals_one_process"],
    "huggingface/test_trainer.py": [
        "test_predictions_under_prompt_tuning",
        "test_survives_what_accelerate_unwraps",
        "test_trains_evaluates_and_resumes_as_one_process",
    ],
    "huggingface/test_trainer_mesh.py": [
        "test_mesh_of_a_config",
        "test_mixed_precision_and_saving",
    ],
    "huggingface/test_trainer_steps.py": ["test_ten_steps_equal_one_process"],
    "huggingface/test_trl.py": [
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
    "dtensor/test_cache_tag.py": ["test_ranks_have_graphs_of_their_own"],
    "dtensor/flex/test_flex_attention.py": ["test_built", "test_the_higher_order_op"],
    "dtensor/test_dtensor.py": ["test_compiled"],
    "dtensor/test_export.py": ["test_export"],
    "dtensor/test_sdpa.py": ["test_dense_result"],
    "dtensor/test_sdpa_handlers.py": ["test_as_before", "test_other_handlers_are_called"],
    "dtensor/test_style.py": ["test_compiled_model", "test_model", "test_one_node_per_attention"],
    "ops/test_compile.py": [
        "test_inductor_equals_eager",
        "test_three_attentions_are_three_nodes_forward_and_backward",
    ],
    "ops/test_fakes.py": ["test_opcheck"],
}
"""Names of tests, by file."""


def is_seam(nodeid: str) -> bool:
    """Whether a test, or a case of it, is one of them."""
    file, _, name = nodeid.partition("[")[0].partition("::")
    return name in SEAMS.get(file.removeprefix("tests/"), ())
