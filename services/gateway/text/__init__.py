"""From text to tokens and back. Nothing here knows gRPC; helper processes import only this and the parsers."""
