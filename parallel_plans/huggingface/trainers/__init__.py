"""The mesh and the options of the trainers."""
