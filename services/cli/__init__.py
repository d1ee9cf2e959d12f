"""The command line and the supervisor of a mesh on one machine.

It starts services as processes and speaks to them over their public addresses; it imports none of them.
"""
