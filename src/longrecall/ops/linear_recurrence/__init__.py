"""The linear recurrence of channels that decay each by itself, and the weighted average of RWKV-4 made of it."""
