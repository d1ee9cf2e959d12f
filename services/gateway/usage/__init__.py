"""What tenants use: counted, priced, and kept in Redis for whoever asks."""
