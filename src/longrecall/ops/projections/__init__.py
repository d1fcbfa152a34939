"""Products with weights, biases and tables, and how their gradients add up."""
