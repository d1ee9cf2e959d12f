"""A discrete-event simulation of a cluster that drives the router's own decisions: no sockets, no clock."""
