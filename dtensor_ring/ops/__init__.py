"""The registered ops: their options, schema, autograd, checks and flops."""
