"""Post-training: recipes, streamed data, interventions on the initial state, and the training loop."""
