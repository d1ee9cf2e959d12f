"""What routers tell each other through Redis: what each has granted and closed, and who waits in its gateways."""
