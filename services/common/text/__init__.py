"""The text side of a model's artifact. Gateways tokenise with it, workers follow grammars with it."""
