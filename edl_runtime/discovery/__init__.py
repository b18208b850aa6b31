"""The discovery endpoint: lists pools and assigns teachers by HTTP, for students without access to Redis."""
