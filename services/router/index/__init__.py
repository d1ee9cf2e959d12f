"""The router's replica of the location index: which location holds which leading blocks of a prompt."""
