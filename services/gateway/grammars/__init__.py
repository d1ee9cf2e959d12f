"""From what a request says of its answer's form to a grammar that has been checked."""
