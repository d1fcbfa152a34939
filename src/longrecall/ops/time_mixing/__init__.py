"""What RWKV does before and after its recurrence."""
