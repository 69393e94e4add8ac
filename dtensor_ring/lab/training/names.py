"""Names that a step is asked for by. The command line needs them before torch is there."""

# How much of a layer its backward computes again: nothing; all but its attention; all of it.
CHECKPOINTS = ("none", "attention", "full")

# Axes of a mesh, as in torchtitan; "dp" is short for "dp_shard".
MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
