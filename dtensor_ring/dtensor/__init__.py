"""DTensors and meshes: what users call, and what dispatches to the ops."""
