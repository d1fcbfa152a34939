"""The linear recurrence in Triton."""
