"""Envoy's configuration, built from its own API types so that a wrong field fails in a test and not at start-up."""
