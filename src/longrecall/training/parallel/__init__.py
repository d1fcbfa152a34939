"""Training on several processes: where each of them stands, how the model is spread over them, how they began."""
