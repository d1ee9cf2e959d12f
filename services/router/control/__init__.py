"""What operators set through the control API, and what they ask of a router."""
