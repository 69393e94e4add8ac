"""Tests of `parallel_plans/huggingface/serving/`."""
