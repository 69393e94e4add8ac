"""FlexAttention: its masks as slices, and `flex_attention` on DTensors as ring attention."""
