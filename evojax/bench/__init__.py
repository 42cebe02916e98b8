"""Speed of this machine: whole training steps of named shapes, decoding, updates, compilation."""
