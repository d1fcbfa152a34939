"""The embedded default: the main job from end to end, with the control beside it."""
