"""The inert-knob linter: every setting is read, and changing it changes something."""
