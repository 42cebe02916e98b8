"""What the command line can do: one file per family of modes, picked by name."""
